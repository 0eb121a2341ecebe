"""What a forward could change besides its module: data in classes, which all instances share, and generators of random numbers.

Both are put back after a trace, and refused if they changed, for a planned step would not change them again.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from actsolve.capture.settings import OWN, class_data, containers, own_classes


class SharedState:
    """The data in the classes of a module and of its submodules, and the generators in their attributes, as they are now."""

    def __init__(self, module: torch.nn.Module) -> None:
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
