"""What can be left in eager, and by what name.

A submodule by its path; a callable attribute of a module (a method, a function that was put there) by that path and its name;
the loss function of the step, and what is in it where it is a module, as `loss_fn`; and a class whose modules the forward makes
as it runs, by its import path. Where a name may be two of these, the model's own comes first.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

LOSS = "loss_fn"


@dataclass(frozen=True)
class Part:
    """Something that is called in a step.

    Attributes:
        path: Its name.
        owner: The module whose attribute is called; of a class None, for there is one at each call.
        name: Of that attribute.
        kind: The class, if it is one.
        is_outside: Whether its owner is no part of the model.
    """

    path: str
    owner: torch.nn.Module | None
    name: str = "forward"
    kind: type[torch.nn.Module] | None = None
    is_outside: bool = False

    @property
    def is_module(self) -> bool:
        """Whether a module is called, all of whose tensors are its own."""
        return self.name == "forward"

    @contextlib.contextmanager
    def replaced(self, call: Callable[..., Any], model: torch.nn.Module) -> Iterator[None]:
        """Within this context ``call(owner, function, *args, **kwargs)`` is called in its place."""
        with _in_class(self.kind, call, model) if self.kind is not None else _in_owner(self, call):
            yield


@contextlib.contextmanager
def _in_owner(part: Part, call: Callable[..., Any]) -> Iterator[None]:
    owner = part.owner
    assert owner is not None
    function, before = getattr(owner, part.name), dict(owner.__dict__)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(owner, function, *args, **kwargs)

    if isinstance(inspect.getattr_static(owner, part.name), property):
        setattr(owner, part.name, replaced)  # its setter knows where
    else:
        owner.__dict__[part.name] = replaced
    changed = [name for name, value in owner.__dict__.items() if name not in before or value is not before[name]]
    try:
        yield
    finally:
        for name in changed:
            if name in before:
                owner.__dict__[name] = before[name]
            else:
                owner.__dict__.pop(name, None)


@contextlib.contextmanager
def _in_class(kind: type[torch.nn.Module], call: Callable[..., Any], model: torch.nn.Module) -> Iterator[None]:
    function: Any = kind.forward
    is_own = "forward" in vars(kind)
    held = set(map(id, model.modules()))

    def replaced(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = function.__get__(module)
        return bound(*args, **kwargs) if id(module) in held or type(module) is not kind else call(module, bound, *args, **kwargs)

    kind.forward = replaced
    try:
        yield
    finally:
        if is_own:
            kind.forward = function
        else:
            del kind.forward


class Parts:
    """The parts of a step, by name.

    Attributes:
        model: What is trained.
        loss: Holds the loss function as an attribute, as the model holds its parts; None if there is none.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> None:
        self.model = model
        self.loss: Any = None
        if loss_fn is not None:
            self.loss = torch.nn.Module()
            setattr(self.loss, LOSS, loss_fn)

    @property
    def loss_fn(self) -> Callable[[Any], torch.Tensor] | None:
        """What calls the loss function, or what stands in for it."""
        return None if self.loss is None else lambda output: self.loss.loss_fn(output)

    def at(self, path: str) -> Part | None:
        """Return the part of that name; None if there is none, or if it is the model itself."""
        found = _in_module(self.model, path, is_outside=False)
        if found is None and self.loss is not None and path.partition(".")[0] == LOSS:
            found = _in_module(self.loss, path, is_outside=True)
        return found or _class_at(path)

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of the model, then those of the loss function, each with its name as a part."""
        yield from self.model.named_modules()
        if self.loss is not None and not hasattr(self.model, LOSS):
            yield from ((path, module) for path, module in self.loss.named_modules() if path)


def module_at(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """Return the submodule of that path; None if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def is_called(module: torch.nn.Module) -> bool:
    """Whether ``module`` has a forward, which Python runs."""
    never_called = torch.nn.Module.forward  # of a list of modules; a scripted class has none of its own
    return getattr(type(module), "forward", None) is not never_called and not isinstance(module, torch.jit.ScriptModule)


def is_callable_attribute(module: torch.nn.Module, name: str) -> bool:
    """Whether ``module`` has a method or function of that name, which not all modules have, and another can take its place."""
    if name.startswith("__") or hasattr(torch.nn.Module, name) or isinstance(module, torch.jit.ScriptModule):
        return False
    held = inspect.getattr_static(module, name, None)
    if held is None or (isinstance(held, property) and held.fset is None) or name in module._modules:
        return False
    value = getattr(module, name, None)
    return callable(value) and not isinstance(value, (type, torch.nn.Module))


def class_path(kind: type) -> str:
    """Return the import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _in_module(model: torch.nn.Module, path: str, *, is_outside: bool) -> Part | None:
    module = module_at(model, path) if path else None
    if module is not None:
        return Part(path, module, is_outside=is_outside) if is_called(module) else None
    around, _, name = path.rpartition(".")
    owner = module_at(model, around)
    if owner is None or not name or not is_callable_attribute(owner, name):
        return None
    return Part(path, owner, name, is_outside=is_outside)


def _class_at(path: str) -> Part | None:
    """Return the class of modules that was imported as ``path``; None for torch's own, and ours."""
    module, names = path.rpartition(".")[0], path.rpartition(".")[2]
    while module and module not in sys.modules:
        module, _, name = module.rpartition(".")
        names = f"{name}.{names}"
    found: Any = sys.modules.get(module)
    for name in names.split(".") if found is not None else ():
        found = getattr(found, name, None)
    if module.partition(".")[0] in ("torch", "actsolve") or not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        return None
    return Part(path, None, kind=found, is_outside=True) if found.forward is not torch.nn.Module.forward else None
