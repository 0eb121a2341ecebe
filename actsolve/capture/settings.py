"""Python values that a forward may depend on: as a key, and as the containers in which it could change them.

A trace has them as they were. So the key of a plan holds them by value as far as they are data: scalars, lists, dicts, tuples,
sets, small arrays, and objects that hold nothing else (a config). What is no data (a function, a tokenizer, a trainer) counts as
the same as long as it is the same object, and what is inside it is not looked at.
The data in the classes of a module counts as well, but for torch's own.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Types of constants that are compared by value."""

_DATA = SCALARS | {list, dict, tuple, set, frozenset, deque}
_MAX_ARRAY_BYTES = 1 << 16
OWN = frozenset(torch.nn.Module().__dict__)  # nn.Module's own attributes: parameters, submodules, hooks, the mode
_CODE = (type(lambda: None), type(len), type(torch.relu), type, type(np))
FOREIGN = frozenset({"torch", "numpy", "builtins", "threading", "logging"})  # packages whose objects are no data


class Same:
    """A key for a constant that cannot be compared by value: equal only for the very same object."""

    def __init__(self, constant: Any) -> None:
        self._constant = constant

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._constant is other._constant

    def __hash__(self) -> int:
        return id(self._constant)


class _NoData(Exception):
    """An object holds something that is no data."""


def settings_key(child: torch.nn.Module) -> tuple[Any, ...]:
    """Return a key of the attributes of one module that are neither tensors nor modules."""
    found: list[Any] = [type(child), child.training]
    seen: dict[int, int] = {}
    for owner in own_classes(type(child)):
        for name, value in vars(owner).items():  # `class_data` would take twice as long
            kind = type(value)
            if kind in SCALARS:
                found.append(scalar_key(value))
            elif kind in _DATA and not name.startswith("__"):
                found.append((name, value_key(value, seen)))
    for name, value in child.__dict__.items():
        if name in OWN or isinstance(value, torch.Tensor):
            continue
        kind = type(value)
        if kind in SCALARS:
            found.append((name, *scalar_key(value)))
        elif kind in (list, dict):  # tensors in these are state: their place counts, not which they are
            items = enumerate(value) if kind is list else value.items()
            found.append((kind, *((k, torch.Tensor if isinstance(v, torch.Tensor) else value_key(v, seen)) for k, v in items)))
        else:
            found.append(value_key(value, seen))
    return tuple(found)


def scalar_key(value: Any) -> Any:
    """Return a key of a scalar that tells 0.0 from -0.0, and in which NaN equals itself."""
    kind = type(value)
    return (kind, repr(value)) if kind is float or kind is complex else (kind, value)


def own_classes(kind: type) -> tuple[type, ...]:
    """Return the classes that ``kind`` is made of, without torch's and Python's."""
    found = _OWN_CLASSES.get(kind)
    if found is None:
        found = tuple(owner for owner in kind.__mro__ if owner.__module__.partition(".")[0] not in FOREIGN)
        _OWN_CLASSES[kind] = found
    return found


_OWN_CLASSES: dict[type, tuple[type, ...]] = {}  # found before: it is asked at each call


def class_data(owner: type) -> dict[str, Any]:
    """Return the data among the attributes of a class: a setting, a counter, a list that its instances share."""
    return {name: value for name, value in vars(owner).items() if type(value) in _DATA and not name.startswith("__")}


def value_key(value: Any, seen: dict[int, int] | None = None, *, strict: bool = False) -> Any:
    """Return a hashable key that is equal for equal data, and for the same object that is no data."""
    kind = type(value)
    if kind in SCALARS:
        return scalar_key(value)
    if isinstance(value, (torch.Tensor, *_CODE)):
        return Same(value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return kind, seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, (list, tuple, deque)):
        return kind, tuple(value_key(v, seen, strict=strict) for v in value)
    if isinstance(value, dict):
        return kind, tuple((k, value_key(v, seen, strict=strict)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return (kind, value.shape, str(value.dtype), value.tobytes()) if value.nbytes <= _MAX_ARRAY_BYTES else Same(value)
    if (attributes := _data(value)) is not None:
        try:
            return kind, tuple((n, value_key(v, seen, strict=True)) for n, v in attributes.items())
        except _NoData:
            pass
    if strict:
        raise _NoData
    return Same(value)


def closed_over(function: Any) -> list[Any]:
    """Return what a function refers to besides its arguments: another object there is another function."""
    if isinstance(function, functools.partial):
        return [*closed_over(function.func), *function.args, *function.keywords.values()]
    code_of = getattr(function, "__func__", function)
    cells = [cell.cell_contents for cell in getattr(code_of, "__closure__", None) or () if _is_set(cell)]
    code, variables = getattr(code_of, "__code__", None), getattr(code_of, "__globals__", {})
    named = [variables[name] for name in (code.co_names if code is not None else ()) if name in variables]
    owner = getattr(function, "__self__", function)
    return [*cells, *named, *getattr(owner, "__dict__", {}).values()]


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises where it is empty
    except ValueError:
        return False
    return True


def containers(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name of an attribute, and a list, dict, set or deque in it or below; of objects that are data, their dict."""
    seen: set[int] = set()
    for name, top in attributes.items():
        if name in OWN:
            continue
        waiting = [top]
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, (torch.Tensor, torch.nn.Module, *_CODE)):
                continue
            seen.add(id(value))
            if isinstance(value, (list, dict, set, deque)):
                yield name, value
            if isinstance(value, (list, tuple, deque)):
                waiting.extend(value)
            elif isinstance(value, dict):
                waiting.extend(value.values())
            elif (held := _data(value)) is not None and not isinstance(value_key(value), Same):
                waiting.append(held)


def _data(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that may be data."""
    if isinstance(value, torch.nn.Module) or type(value).__module__.partition(".")[0] in FOREIGN:
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None
