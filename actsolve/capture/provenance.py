"""Where in the user's model each traced op comes from: module and source line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from actsolve.capture.randomness import is_lifted
from actsolve.capture.torch_internals import annotate
from actsolve.errors import CaptureError

_TORCH_DIRECTORY = str(Path(torch.__file__).parent)
_OWN_DIRECTORY = str(Path(__file__).parents[1])
_ORIGIN = "_actsolve_origin"
_TENSOR: Any = torch.Tensor
_CASTS = frozenset({_TENSOR.to, _TENSOR.type, _TENSOR.type_as, _TENSOR.bfloat16, _TENSOR.half})
_NOT_TRACED = frozenset({_TENSOR.data.__set__, _TENSOR.grad.__set__})
_SHOWN = frozenset({torch.Tensor.__format__, torch.Tensor.__repr__})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an op was traced.

    Attributes:
        module: Path of the module that ran it.
        source: ``file:line``; empty where only torch's code led to it.
        autocast_region: Number of the outermost autocast region, if autocast would keep the op's casts.
        is_of_loss: Whether the loss function ran it.
    """

    module: str
    source: str
    autocast_region: int | None = None
    is_of_loss: bool = False


class _Recorder(TorchFunctionMode):
    """Annotates traced nodes with the module that runs and the innermost line of the user's."""

    def __init__(self, module_names: dict[torch.nn.Module, str], entry: CodeType, keeps_casts: bool) -> None:
        super().__init__()
        self._entry = entry
        self._keeps_casts = keeps_casts
        self._names = module_names
        self._running: list[str] = []
        self._regions_ended = 0
        self._in_loss = False

    def of_loss(self, loss_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``loss_fn``, whose ops are noted as those of the loss."""

        def noted(output: Any) -> Any:
            self._in_loss = True
            try:
                return loss_fn(output)
            finally:
                self._in_loss = False

        return noted

    def end_autocast_region(self) -> None:
        """Called in place of ``torch.clear_autocast_cache``."""
        self._regions_ended += 1

    def enter_module(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._running.append(self._names.get(module, self._running[-1] if self._running else ""))

    def leave_module(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_lifted():
            return func(*args, **(kwargs or {}))
        source = _user_line(sys._getframe(1), self._entry)
        if func in _NOT_TRACED:
            refused = CaptureError(
                "the forward sets the data of a tensor",
                where=source,
                why="torch does not trace that",
                try_="copy_(), or a new tensor in place of the old one",
            )
            refused.module = self._running[-1] if self._running else None
            raise refused
        if func in _SHOWN:
            return "a tensor"  # as text it asks for what is in it, in a run for real, and a planned step shows nothing
        region = self._regions_ended if self._keeps_casts and func not in _CASTS else None
        origin = Origin(self._running[-1] if self._running else "", source, region, self._in_loss)
        annotate(origin)
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if not hasattr(error, _ORIGIN):
                setattr(error, _ORIGIN, origin)
            raise


def origin_of(error: BaseException) -> Origin | None:
    """Return the op that raised ``error`` while it was traced; None if Python did."""
    return getattr(error, _ORIGIN, None)


def _user_line(frame: FrameType | None, entry: CodeType) -> str:
    """Return ``file:line`` of the innermost frame that is neither torch's nor ours, within that of ``entry``; else nothing.

    What called us is not where an op comes from: for a model made of torch's own modules alone it is our command line.
    """
    while frame is not None and frame.f_code is not entry:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH_DIRECTORY, _OWN_DIRECTORY)):
            return f"{short_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def short_path(file: str) -> str:
    """Return ``file`` relative to the working directory or to its import root, whichever is shorter."""
    path = Path(file)
    for root in (Path.cwd(), *map(Path, sys.path)):
        try:
            return str(path.relative_to(root))
        except ValueError:
            continue
    return file


@contextlib.contextmanager
def recorded_origins(root: torch.nn.Module, *, entry: CodeType, keeps_casts: bool) -> Iterator[_Recorder]:
    """Within this context, nodes traced from ``root`` and its submodules carry their `Origin`. Yield what notes it.

    Args:
        root: What is traced.
        entry: The code that calls it; lines of its callers are not shown.
        keeps_casts: Whether autocast keeps its casts of weights. Not asked here: tracing turns that off.
    """
    recorder = _Recorder({module: name for name, module in root.named_modules()}, entry, keeps_casts)
    enter = nn_module.register_module_forward_pre_hook(recorder.enter_module)
    leave = nn_module.register_module_forward_hook(recorder.leave_module, always_call=True)
    try:
        with recorder, mock.patch.object(torch, "clear_autocast_cache", recorder.end_autocast_region):
            yield recorder
    finally:
        enter.remove()
        leave.remove()
