"""Which part of a step did what no trace can follow: the smallest that runs it, and those around that.

Read from the frames of Python that were running: that of a module's forward or of a method, that of a function which a module
has as an attribute and calls, of the loss function, or of a module that the forward has made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from actsolve.capture.provenance import origin_of
from actsolve.capture.randomness import python_states
from actsolve.eager_parts import LOSS, Parts, class_path, is_callable_attribute
from actsolve.errors import ActsolveError

_NO_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def parts_that_raised(error: BaseException, parts: Parts) -> tuple[str, ...]:
    """Return the names of what was running when ``error`` was raised, the innermost first; without the model itself."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    origin = origin_of(error)
    found = _running(frames, parts)
    return found or ((origin.module,) if origin is not None and origin.module else ())


def parts_that_draw(run: Callable[[], Any], parts: Parts) -> tuple[str, ...]:
    """Run, and return the names of what was running where Python's or NumPy's generator first went on, likewise."""
    found: list[tuple[str, ...]] = []
    before = python_states()
    profile = sys.getprofile()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "return" or found or frame.f_code.co_filename.startswith(_NO_USERS) or python_states() == before:
            return
        frames: list[FrameType] = []
        caller: FrameType | None = frame
        while caller is not None:
            frames.append(caller)
            caller = caller.f_back
        found.append(_running(frames[::-1], parts))

    sys.setprofile(look)
    try:
        with contextlib.suppress(ActsolveError), torch.enable_grad():
            run()
    finally:
        sys.setprofile(profile)
    return found[0] if found else ()


def _running(frames: Sequence[FrameType], parts: Parts) -> tuple[str, ...]:
    """Return the names of the parts that run in ``frames``, of which the outermost comes first."""
    paths: dict[int, str] = {}
    for path, module in parts.named_modules():
        paths.setdefault(id(module), path)
    loss_fn = None if parts.loss is None else parts.loss.loss_fn
    found: dict[str, None] = {}
    caller: FrameType | None = None
    for frame in frames:
        owner = _owner(frame)
        names = [_called_by(caller, frame, paths)]
        if id(owner) in paths:
            names.append(_of_module(owner, frame, paths[id(owner)]))
        elif isinstance(owner, torch.nn.Module) and frame.f_code.co_name == "forward":
            names.append(class_path(type(owner)))
        elif _code_of(loss_fn) is frame.f_code:
            names.append(LOSS)
        found |= {name: None for name in names if name and parts.at(name) is not None}
        caller = frame
    return tuple(reversed(found))


def _of_module(module: torch.nn.Module, frame: FrameType, path: str) -> str:
    """Return the name of the method of ``module`` that runs in ``frame``, the module's own for its forward, or nothing."""
    name = frame.f_code.co_name
    method = inspect.unwrap(getattr(type(module), name, None) or _no_method)
    if getattr(method, "__code__", None) is frame.f_code and is_callable_attribute(module, name):
        return _joined(path, name)
    return path if frame.f_locals.get("self") is module else ""


def _called_by(caller: FrameType | None, frame: FrameType, paths: dict[int, str]) -> str:
    """Return the name of the attribute that a module's frame ``caller`` has called, to which ``frame`` belongs; or nothing."""
    module: Any = None if caller is None else _owner(caller)
    if caller is None or id(module) not in paths:
        return ""
    for name in caller.f_code.co_names:
        if is_callable_attribute(module, name) and _code_of(getattr(module, name)) is frame.f_code:
            return _joined(paths[id(module)], name)
    return ""


def _owner(frame: FrameType) -> Any:
    """Return whose method runs in ``frame``, if one does: its first argument, or the `self` of what is around a function."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    first = frame.f_locals.get(names[0]) if names else None
    return first if isinstance(first, torch.nn.Module) else frame.f_locals.get("self")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _code_of(function: Any) -> Any:
    """Return the code that runs where ``function`` is called, if that is Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)


def _no_method() -> None:
    """Stands for a method that is not there."""
