"""Where the tensors of a module live, and what a traced forward does to the module.

The state of a module is every tensor that it holds: parameters, buffers, and plain tensors in attributes, or in lists and
dicts that are attributes. All of it is an input of the traced step, so that a tensor that is replaced is seen at the next
call. A buffer or attribute that the forward assigns a tensor to is an output of the step, and is assigned at each call.
Any other change of the module or its classes in the forward (a list that grows, a generator of Python's that draws) would be lost
after the trace: it is refused, and all is as it was before.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actsolve.capture.hooks import only_computes
from actsolve.capture.randomness import drawn_in_python
from actsolve.capture.settings import OWN, SCALARS, containers
from actsolve.capture.shared_state import SharedState
from actsolve.errors import CaptureError
from actsolve.graph import Kind

Place = tuple[Any, Any]
"""A container and a key: the tensor is ``container[key]``."""

_OPAQUE = SCALARS | {type(lambda: None), type(len), type(torch.relu), type}


def state_places(module: torch.nn.Module, leave_out: frozenset[Write] = frozenset()) -> list[Place]:
    """Return the place of each tensor of ``module``, each tensor once: parameters, then buffers, then others.

    Cheap enough for every call: about a millisecond for a thousand submodules.

    Args:
        module: What holds the tensors.
        leave_out: Attributes that are no state: the forward assigns them before it reads them.
    """
    written = {(id(module.get_submodule(w.path).__dict__), w.name) for w in leave_out}
    parameters: dict[int, Place] = {}
    buffers: dict[int, Place] = {}
    others: dict[int, Place] = {}
    for child in submodules(module):
        for name, parameter in child._parameters.items():
            if parameter is not None:
                parameters.setdefault(id(parameter), (child._parameters, name))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                buffers.setdefault(id(buffer), (child._buffers, name))
        for name, value in child.__dict__.items():
            if name not in OWN and type(value) not in _OPAQUE and (id(child.__dict__), name) not in written:
                for container, key in _places_in(child.__dict__, name, value):
                    others.setdefault(id(container[key]), (container, key))
    first = parameters | {i: place for i, place in buffers.items() if i not in parameters}
    return [*first.values(), *(place for i, place in others.items() if i not in first)]


def every_place(module: torch.nn.Module) -> Iterator[Place]:
    """Yield each place where a tensor of ``module`` is, also of one that is in several."""
    for child in submodules(module):
        for tensors in (child._parameters, child._buffers):
            yield from ((tensors, name) for name, tensor in tensors.items() if tensor is not None)
        for name, value in child.__dict__.items():
            if name not in OWN and type(value) not in _OPAQUE:
                yield from _places_in(child.__dict__, name, value)


def submodules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return ``module`` and all modules in it, each once, in the order of ``module.modules()``, which takes longer."""
    found: dict[int, torch.nn.Module] = {}
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if id(child) not in found:
            found[id(child)] = child
            waiting.extend(m for m in reversed(child._modules.values()) if m is not None)
    return list(found.values())


def _places_in(attributes: dict[str, Any], name: str, value: Any) -> list[Place]:
    if isinstance(value, torch.Tensor):
        return [(attributes, name)]
    if isinstance(value, list):
        return [(value, i) for i, item in enumerate(value) if isinstance(item, torch.Tensor)]
    if isinstance(value, dict):
        return [(value, key) for key, item in value.items() if isinstance(item, torch.Tensor)]
    return []


def state_names(module: torch.nn.Module, leave_out: frozenset[Write] = frozenset()) -> list[tuple[Kind, str]]:
    """Return the kind and the qualified name of each tensor of `state_places`, in its order."""
    names: dict[tuple[int, Any], tuple[Kind, str]] = {}
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in child._parameters:
            names[id(child._parameters), name] = (Kind.PARAMETER, prefix + name)
        for name in child._buffers:
            names[id(child._buffers), name] = (Kind.BUFFER, prefix + name)
        for name, value in child.__dict__.items():
            if name not in OWN:
                for container, key in _places_in(child.__dict__, name, value):
                    label = prefix + name if container is child.__dict__ else f"{prefix}{name}[{key!r}]"
                    names[id(container), key] = (Kind.BUFFER, label)
    return [names[id(container), key] for container, key in state_places(module, leave_out)]


@dataclass(frozen=True)
class Write:
    """A tensor that the forward assigns to a buffer or an attribute.

    Attributes:
        path: Of the submodule.
        name: Of the buffer or attribute.
        is_buffer: Which of the two.
    """

    path: str
    name: str
    is_buffer: bool

    @property
    def attribute(self) -> str:
        """The qualified name."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def assign(self, module: torch.nn.Module, tensor: torch.Tensor) -> None:
        """Do in ``module`` what the forward did."""
        child = module.get_submodule(self.path)
        (child._buffers if self.is_buffer else child.__dict__)[self.name] = tensor


@dataclass(frozen=True)
class Setting:
    """A plain value that the forward puts into an attribute, or into a list, dict or config among these, such as its mode.

    So is a hook on a submodule that only computes (`only_computes`): it is put among the hooks, where eager has it afterwards.

    Attributes:
        path: Of the submodule.
        name: Of the attribute that it is in, or is.
        below: Which of the attributes' containers it is put into, in the order of `containers`; None for the attributes, or for
            the hooks of that name.
        key: Where in it.
        value: What is put there.
    """

    path: str
    name: str
    below: int | None
    key: Any
    value: Any

    def assign(self, module: torch.nn.Module) -> None:
        """Do in ``module`` what the forward did."""
        attributes = module.get_submodule(self.path).__dict__
        if self.below is not None:
            _below(attributes)[self.below][1][self.key] = self.value
        else:
            (attributes[self.name] if self.name in OWN else attributes)[self.key] = self.value


def _below(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(containers(attributes))


class TracedState:
    """A module whose tensors are replaced while it is traced, and which is put back as it was afterwards.

    Args:
        module: The module.
        leave_out: What of its state is no input.
        functions: What else is traced with it.
    """

    def __init__(self, module: torch.nn.Module, leave_out: frozenset[Write], functions: Iterable[Any] = ()) -> None:
        self._module, self._leave_out = module, leave_out
        self._before: dict[int, tuple[Any, Any]] = {}  # by id: attributes, lists and dicts, and what they held
        self._below: list[tuple[str, str, int, Any]] = []  # path, attribute, and a container in it, by its number there
        for path, child in module.named_modules():
            for container in (child.__dict__, *(v for v in child.__dict__.values() if isinstance(v, (list, dict)))):
                self._before[id(container)] = (container, copy.copy(container))
            for number, (name, container) in enumerate(_below(child.__dict__)):
                if id(container) not in self._before or container is child.__dict__.get(name):
                    self._before.setdefault(id(container), (container, copy.copy(container)))
                    self._below.append((path, name, number, container))
        self.settings: list[Setting] = []
        self._shared = SharedState(module, functions)
        self._pass = "forward"
        self._new: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def replaced(self, tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Within this context the state of the module, in the order of `state_places`, is ``tensors``."""
        olds = [container[key] for container, key in state_places(self._module, self._leave_out)]
        self._new = {id(old): new for old, new in zip(olds, tensors, strict=True)}
        try:
            for container, content in self._before.values():
                for key, value in _items(content):
                    if isinstance(value, torch.Tensor):
                        container[key] = self._new.get(id(value), value)
            yield
        finally:
            for container, content in self._before.values():
                _put_back(container, content)
            self._shared.put_back()

    def refuse_changes_since(self, writes: dict[Write, torch.Tensor], settings: Sequence[Setting]) -> None:
        """Raise if the module is not as it was when `writes` and `settings` were these: its backward has changed it."""
        self._pass = "backward"
        now = self.writes()
        changed: list[Write | Setting] = [w for w in dict.fromkeys([*now, *writes]) if now.get(w) is not writes.get(w)]
        changed += [s for s in dict.fromkeys([*self.settings, *settings]) if (s in self.settings) != (s in settings)]
        for change in changed:
            raise self._lost(change.path, change.name)

    def writes(self) -> dict[Write, torch.Tensor]:
        """Return the tensors that the forward has assigned; note its `settings`. To be called within `replaced`.

        Raises:
            CaptureError: the forward changed the module in another way.
        """
        writes: dict[Write, torch.Tensor] = {}
        self.settings = []
        for path, child in self._module.named_modules():
            for name in self._changed_keys(child.__dict__):
                value = child.__dict__.get(name)
                if _expendable(child, name):
                    continue
                if name not in OWN and name in child.__dict__ and _by_value(value):
                    self.settings.append(Setting(path, name, None, name, value))
                else:
                    writes[Write(path, name, is_buffer=False)] = self._assigned(path, name, value)
            for name in self._changed_keys(child._buffers):
                writes[Write(path, name, is_buffer=True)] = self._assigned(path, name, child._buffers.get(name))
            for name in OWN & child.__dict__.keys() - {"_buffers"}:
                if isinstance(child.__dict__[name], dict):
                    self.settings += self._hooks_in(path, name, child.__dict__[name])
        for path, name, number, container in self._below:
            if not _expendable(self._module.get_submodule(path), name):
                self.settings += self._settings_in(path, name, number, container)
        if (changed := self._shared.changed()) is not None:
            raise self._lost("", f"{changed}, an attribute of a class")
        if (drawn_from := self._shared.drawn_from()) is not None:
            raise drawn_in_python(drawn_from, self._pass)
        return writes

    def _hooks_in(self, path: str, name: str, hooks: dict[Any, Any]) -> Iterator[Setting]:
        """Yield the hooks that were added, and what goes with them; raise for any other change of what nn.Module keeps."""
        for key in self._changed_keys(hooks):
            value = hooks.get(key)
            if not name.startswith("_forward_") or not (value is True or only_computes(value)):
                raise self._lost(path, str(key))
            yield Setting(path, name, None, key, value)

    def _settings_in(self, path: str, name: str, number: int, container: Any) -> Iterator[Setting]:
        now = dict(_items(container))
        for key in self._changed_keys(container):
            grown = not isinstance(container, dict) and key >= len(self._before[id(container)][1])
            if grown or key not in now or not _by_value(now[key]):
                raise self._lost(path, name)
            yield Setting(path, name, number, key, now[key])

    def _changed_keys(self, container: Any) -> list[Any]:
        if id(container) not in self._before:
            return []
        _, before = self._before[id(container)]
        if isinstance(container, set):
            return list(before ^ container)
        old, new = dict(_items(before)), dict(_items(container))
        return [k for k in dict.fromkeys([*new, *old]) if k not in old or k not in new or self._changed(old[k], new[k])]

    def _changed(self, before: Any, now: Any) -> bool:
        """Whether ``now`` is another thing than ``before``, or than the tensor that stands for it."""
        expected = self._new.get(id(before), before) if isinstance(before, torch.Tensor) else before
        return now is not expected and not (_by_value(now) and type(now) is type(before) and now == before)

    def _assigned(self, path: str, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise self._lost(path, name)
        if value.requires_grad and not value.is_leaf and value.retains_grad:
            raise self._lost(path, name, "it is to retain its gradient, which a planned step does not pass on")
        return value

    def _lost(self, path: str, name: str, why: str = "") -> CaptureError:
        return _lost_change(path, name, why, self._pass)


@contextlib.contextmanager
def put_back(values: Iterable[Any]) -> Iterator[None]:
    """After this context, lists, dicts, sets and plain objects among ``values``, and in them, hold what they held before."""
    before = [(container, copy.copy(container)) for _, container in containers({str(i): value for i, value in enumerate(values)})]
    try:
        yield
    finally:
        for container, content in before:
            _put_back(container, content)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys of a container and what is there; a set has none."""
    if isinstance(container, dict):
        return list(container.items())
    return [] if isinstance(container, set) else list(enumerate(container))


def _put_back(container: Any, content: Any) -> None:
    """Let ``container`` hold what it held; a dict keeps what it still has in its place, for it may be a module's own."""
    if isinstance(container, dict):
        for key in container.keys() - content.keys():
            del container[key]
        container.update(content)
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


def _by_value(constant: Any) -> bool:
    return type(constant) in SCALARS or (isinstance(constant, tuple) and all(type(c) in SCALARS for c in constant))


def _expendable(child: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is only a cache of torch's own."""
    return isinstance(child, torch.nn.RNNBase) and name.startswith("_flat_weight")


@contextlib.contextmanager
def caches_put_back(module: torch.nn.Module) -> Iterator[None]:
    """After this context torch's own caches in ``module``, of tensors that it holds elsewhere too, are as they were."""
    before = [
        (child.__dict__, {name: value for name, value in child.__dict__.items() if _expendable(child, name)})
        for child in submodules(module)
        if isinstance(child, torch.nn.RNNBase)
    ]
    try:
        yield
    finally:
        for attributes, caches in before:
            attributes.update(caches)


def _lost_change(path: str, name: str, why: str = "", which: str = "forward") -> CaptureError:
    return CaptureError(
        f"the {which} changes {f'{path}.{name}' if path else name}",
        why=why or "a planned step runs no Python, so that the change would not be repeated",
        try_="keep what changes in a buffer; if it is a cache that is filled once, call the module once before optimizing it",
    )


@contextlib.contextmanager
def settled(module: torch.nn.Module, settings: tuple[Setting, ...]) -> Iterator[None]:
    """Within this context ``module`` is as after a forward that made ``settings``."""
    state = TracedState(module, frozenset())
    with state.replaced(tuple(container[key] for container, key in state_places(module))):
        for setting in settings:
            setting.assign(module)
        yield


def refuse_again(settings: tuple[Setting, ...]) -> None:
    """Raise if a forward has made ``settings`` in a module that had been called before: it would do so at each call."""
    if settings:
        raise _lost_change(settings[0].path, settings[0].name)
