"""What the command line is pointed at: a zoo name, ``path/file.py:factory`` or ``package.module:factory``.

The code of the target is executed. Whatever goes wrong in it is the user's to mend, so each failure is one message with
the user's own file and line, never a traceback through ours.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from actsolve.capture.torch_internals import fake_building
from actsolve.errors import ActsolveError, UsageError
from actsolve.json_file import shown
from actsolve.training_step import TrainingStep

_FORMS = "a name of the zoo, path/file.py:factory, or package.module:factory"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SEED = 0
_FAKE_HINT = "--real, if it is that this code reads the values of tensors: it was built without any, of fake tensors"


class Target:
    """A factory of training steps, as the user named it. Finding it executes the code that it is in.

    Args:
        name: A zoo name, ``path/file.py:factory`` or ``package.module:factory``.

    Raises:
        UsageError: there is no such target, or its code fails.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._factory = _factory_of(name)

    def step(self, overrides: Sequence[str] = (), *, fake: bool = False) -> TrainingStep:
        """Return the training step that the factory makes.

        Args:
            overrides: Keyword arguments for the factory, as ``name=value``.
            fake: Build it of fake tensors: shapes without memory, for models of any size. It can be planned, not run.

        Raises:
            UsageError: the factory fails or returns something else, or an override does not suit it.
        """
        arguments = _arguments(self.name, self._factory, overrides)
        torch.manual_seed(_SEED)  # two steps of one target are equal
        building = fake_building() if fake else contextlib.nullcontext()
        with _user_code(self.name, "cannot be built", hint=_FAKE_HINT if fake else None), building:
            step = self._factory(**arguments)
        return _checked(self.name, step)

    def setting(self, name: str, overrides: Sequence[str] = ()) -> Any:
        """Return the value of a keyword argument, from the overrides or by default; None if there is none."""
        arguments = _arguments(self.name, self._factory, overrides)
        parameter = _accepted(self._factory)[0].get(name)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return arguments.get(name, default)


def load_target(name: str, overrides: Sequence[str] = (), *, fake: bool = False) -> TrainingStep:
    """Return the training step of a target: `Target` and `Target.step` in one."""
    return Target(name).step(overrides, fake=fake)


# -- from a name to a factory ------------------------------------------------------------------------------------------


def _factory_of(target: str) -> Callable[..., Any]:
    place, colon, name = target.rpartition(":")
    if not colon:
        return _zoo_factory(target)
    if not place or not name:
        raise UsageError(f"cannot read the target {shown(target)!r}", why="a side of the colon is empty", try_=_FORMS)
    module = _file_module(target, Path(place)) if place.endswith(".py") or "/" in place else _package_module(target, place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        _no_such_factory(target, module, name)
    if not callable(found):
        raise UsageError(
            f"{shown(target)} is no factory", why=f"it is a {type(found).__name__}, not a function", try_="a function of it"
        )
    return typing.cast("Callable[..., Any]", found)


def _zoo_factory(name: str) -> Callable[..., Any]:
    import models_zoo

    try:
        return models_zoo.get(name)
    except KeyError:
        known = [*models_zoo.names(), *models_zoo.ALIASES]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        why = "it has no colon, and the zoo has no such name"
        hint = f"{' or '.join(near)}; " if near else f"one of {', '.join(models_zoo.ALIASES)}; "
        raise UsageError(f"there is no target {shown(name)!r}", why=why, try_=f"{hint}or file.py:factory") from None


def _file_module(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        why = "it is a directory" if path.is_dir() else "there is no such file"
        raise UsageError(f"cannot load the target {shown(target)}", where=shown(path), why=why, try_=_FORMS)
    name = f"actsolve_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot load the target {shown(target)}", where=shown(path), why="it is no Python file", try_=_FORMS)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script, what lies beside it can be imported
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look here
    try:
        with _user_code(target, "cannot be imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _package_module(target: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with python -m
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None  # a parent that is not there
    except Exception as error:  # a parent whose import fails
        _fail(target, "cannot be imported", error)
    if found is None:
        raise UsageError(
            f"cannot load the target {shown(target)}", why=f"there is no module {shown(name)!r}", try_="file.py:factory"
        )
    with _user_code(target, "cannot be imported"):
        return importlib.import_module(name)


def _no_such_factory(target: str, module: ModuleType, name: str) -> NoReturn:
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    near = difflib.get_close_matches(name, own, n=3) or own[:5]
    raise UsageError(
        f"cannot load the target {shown(target)}",
        where=shown(module.__file__ or module.__name__),
        why=f"there is no {shown(name)} in it",
        try_=f"one of its functions: {', '.join(near)}" if near else "a function that returns actsolve.TrainingStep",
    )


# -- overrides ---------------------------------------------------------------------------------------------------------


def _arguments(target: str, factory: Callable[..., Any], overrides: Sequence[str]) -> dict[str, Any]:
    accepted, takes_any = _accepted(factory)
    arguments: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"cannot read the override {shown(override)!r}", why="it is not name=value", try_="--set batch=8")
        if name in arguments:
            raise UsageError(f"the override {shown(name)} is given twice")
        if name not in accepted and not takes_any:
            near = difflib.get_close_matches(name, accepted, n=1)
            raise UsageError(
                f"{shown(target)} has no setting {shown(name)!r}",
                why=f"it takes {', '.join(accepted) or 'none'}",
                try_=f"--set {near[0]}={shown(text)}" if near else None,
            )
        arguments[name] = _value(name, text, accepted.get(name))
    missing = [n for n, p in accepted.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise UsageError(f"{shown(target)} needs a value for {', '.join(missing)}", try_=f"--set {missing[0]}=...")
    return arguments


def _accepted(factory: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that can be given by name, and whether any other name is taken as well."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return {}, True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {p.name: p for p in parameters if p.kind in by_name}
    try:
        hints = typing.get_type_hints(factory)
    except Exception:  # annotations that name what is not there
        hints = {}
    accepted = {name: p.replace(annotation=hints.get(name, p.annotation)) for name, p in accepted.items()}
    return accepted, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _value(name: str, text: str, parameter: inspect.Parameter | None) -> Any:
    """Return ``text`` as what the parameter's default or annotation says; as what it looks like where neither does."""
    kind = _kind_of(parameter)
    if parameter is not None and parameter.default is None and text.strip().lower() == "none":
        return None
    if kind is None:
        return _guessed(text)
    try:
        return _READ[kind](text.strip())
    except ValueError:
        pass
    assert parameter is not None
    default = "" if parameter.default in (parameter.empty, None) else f", {parameter.default!r} by default"
    raise UsageError(f"cannot set {shown(name)} to {shown(text)!r}", why=f"it is of type {kind.__name__}{default}")


def _kind_of(parameter: inspect.Parameter | None) -> type | None:
    if parameter is None:
        return None
    default = parameter.default
    if default is not parameter.empty and default is not None:
        if type(default) in _READ:
            return type(default)
        raise UsageError(
            f"cannot set {shown(parameter.name)}",
            why=f"it is a {type(default).__name__}; only numbers, true or false, and text can be given here",
            try_="a factory of your own that sets it",
        )
    options = typing.get_args(parameter.annotation) or (parameter.annotation,)
    known = [o for o in options if o in _READ]
    return known[0] if len(known) == 1 else None


def _bool(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return text.lower() in _TRUE


def _guessed(text: str) -> Any:
    if text.strip().lower() in ("none", "null"):
        return None
    for read in (int, float, lambda t: _bool(t.strip())):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


_READ: dict[type, Callable[[str], Any]] = {bool: _bool, int: int, float: float, str: str}


# -- running the user's code -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _user_code(target: str, what: str, hint: str | None = None) -> Iterator[None]:
    """Turn whatever the user's code raises into one message; Ctrl-C goes through."""
    try:
        yield
    except (ActsolveError, KeyboardInterrupt):
        raise
    except BaseException as error:
        _fail(target, what, error, hint)


def _fail(target: str, what: str, error: BaseException, try_: str | None = None) -> NoReturn:
    text = str(error).strip().splitlines()
    if isinstance(error, SyntaxError):
        text = [error.msg]
    reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    raise UsageError(f"{shown(target)} {what}", where=_place_of(error), why=shown(reason), try_=try_) from error


def _place_of(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame in the user's own code, or of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return shown(f"{error.filename}:{error.lineno}")
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    frames = [f for f in frames if not _is_installed(Path(f.filename))] or frames
    return shown(f"{_short(frames[-1].filename)}:{frames[-1].lineno}") if frames else None


def _is_installed(path: Path) -> bool:
    """Whether a file is of the standard library or of an installed package; the zoo counts as the user's own."""
    installed = "site-packages" in path.parts or path.is_relative_to(sysconfig.get_path("stdlib"))
    return installed and "models_zoo" not in path.parts


def _short(path: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(path).resolve().relative_to(Path.cwd()))
    return path


def _checked(target: str, step: Any) -> TrainingStep:
    if not isinstance(step, TrainingStep):
        raise UsageError(
            f"{shown(target)} returns a {type(step).__name__}",
            why="a factory returns one training step",
            try_="return actsolve.TrainingStep(model, args=(inputs, targets))",
        )
    wanted: dict[str, tuple[bool, str]] = {
        "model": (isinstance(step.model, torch.nn.Module), "a torch.nn.Module"),
        "args": (isinstance(step.args, Sequence) and not isinstance(step.args, str), "a tuple of inputs"),
        "kwargs": (isinstance(step.kwargs, Mapping), "a mapping of inputs"),
        "loss_fn": (step.loss_fn is None or callable(step.loss_fn), "None, or a function of the output"),
    }
    for name, (right, kind) in wanted.items():
        if not right:
            found = type(getattr(step, name)).__name__
            raise UsageError(f"the training step of {shown(target)} has a wrong {name}", why=f"it is a {found}, not {kind}")
    return step
