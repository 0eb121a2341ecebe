"""What a forward could change besides its module: data in classes, which all instances share, and generators of random numbers.

Both are put back after a trace, and refused if they changed, for a planned step would not change them again.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

from actsolve.capture.settings import FOREIGN, OWN, class_data, closed_over, containers, own_classes

_FEW = 100  # entries of a container that is looked into for generators: larger ones are data


class SharedState:
    """The data in the classes of a module and of its submodules, and the generators that they can reach, as they are now.

    These are in attributes, or what functions refer to: methods, functions that they call, and ``functions`` besides.
    """

    def __init__(self, module: torch.nn.Module, functions: Iterable[Any] = ()) -> None:
        owners = {owner for kind in {type(child) for child in module.modules()} for owner in own_classes(kind)}
        self._data = {owner: class_data(owner) for owner in owners}
        self._inside = [
            (f"{owner.__qualname__}.{name}", container, copy.copy(container))
            for owner, data in self._data.items()
            for name, container in containers(data)
        ]
        self._generators: list[tuple[str, Any, bytes, Callable[[], None]]] = []
        for path, child in module.named_modules():
            for name, value in child.__dict__.items():
                if name not in OWN and (state := _generator_state(value)) is not None:
                    self._generators.append((f"{path}.{name}" if path else name, value, *state))
        methods = [value for owner in owners for value in vars(owner).values()]
        methods += [value for child in module.modules() for value in child.__dict__.values() if callable(value)]
        known = _own_generators() | {id(generator) for _, generator, *_ in self._generators}
        for name, generator in _referred_generators([*functions, *methods], known):
            if (state := _generator_state(generator)) is not None:
                self._generators.append((name, generator, *state))

    def changed(self) -> str | None:
        """Return the name of data in a class that is no longer as it was, or None."""
        for owner, before in self._data.items():
            now = class_data(owner)
            for name in dict.fromkeys([*before, *now]):
                if name not in before or name not in now or not _is_same(before[name], now[name]):
                    return f"{owner.__qualname__}.{name}"
        return next((name for name, container, content in self._inside if not _is_same(content, container)), None)

    def drawn_from(self) -> str | None:
        """Return the name and the kind of a generator that is no longer as it was, or None."""
        for name, generator, before, _ in self._generators:
            now = _generator_state(generator)
            if now is not None and now[0] != before:
                return f"{name}, a {type(generator).__name__}"
        return None

    def put_back(self) -> None:
        for owner, before in self._data.items():
            for name in class_data(owner).keys() - before.keys():
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        for _, container, content in self._inside:
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(content)
        for *_, put_back in self._generators:
            put_back()


def _referred_generators(functions: Iterable[Any], known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the generators that functions refer to, and those that functions which these refer to do, each by its place.

    Args:
        functions: Where to begin.
        known: Ids of generators that are left out.
    """
    pending = [("", function) for function in functions]
    seen, kinds = set[int](), _generator_kinds()
    while pending:
        name, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        value = getattr(value, "__wrapped__", value)
        owner = getattr(value, "__self__", None)
        found = next((v for v in (value, owner) if isinstance(v, kinds)), None)
        if found is not None and id(found) not in known:
            known.add(id(found))
            yield name or type(found).__name__, found
        elif isinstance(value, (FunctionType, MethodType, functools.partial)) and not _is_foreign(value):
            pending += [(getattr(value, "__qualname__", name), v) for v in closed_over(value)]
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _FEW:
            pending += [(name, v) for v in (value.values() if isinstance(value, dict) else value)]


def _own_generators() -> set[int]:
    """Return the ids of the generators behind the functions of `random` and `numpy.random` (`randomness.python_states`)."""
    numpy = sys.modules.get("numpy")
    return {id(f.__self__) for f in (random.random, *(() if numpy is None else (numpy.random.rand,)))}


def _is_foreign(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] in FOREIGN


def _generator_kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState)))


def _is_same(before: Any, now: Any) -> bool:
    """Whether ``now`` is what it was, or a container of the same things in the same order."""
    if isinstance(before, dict) and isinstance(now, dict):
        return list(map(id, before)) == list(map(id, now)) and list(map(id, before.values())) == list(map(id, now.values()))
    if isinstance(before, (list, tuple)) and type(before) is type(now):
        return list(map(id, before)) == list(map(id, now))
    return before is now or (type(before) is type(now) and not isinstance(before, torch.Tensor) and bool(before == now))


def _generator_state(value: Any) -> tuple[bytes, Callable[[], None]] | None:
    """Return the state of a generator of Python's or NumPy's, and what sets it back; None for anything else."""
    numpy = sys.modules.get("numpy")
    state: Any
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        state = value.getstate()
        return pickle.dumps(state), lambda: value.setstate(state)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        state = value.bit_generator.state
        return pickle.dumps(state), lambda: setattr(value.bit_generator, "state", state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        state = value.get_state(legacy=False)
        return pickle.dumps(state), lambda: value.set_state(state)
    return None
