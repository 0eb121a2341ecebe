"""Nested inputs and outputs, taken apart into leaves and put together again.

What torch's pytrees know, and besides them dataclasses and `types.SimpleNamespace`, which users pass and return without
registering them. Of what a forward returns, also other objects that hold tensors, such as a cache of keys and values: these are
the forward's own, made anew at each call.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actsolve.capture.settings import FOREIGN, SCALARS, Same, value_key
from actsolve.errors import CaptureError

_MAX_DEPTH = 4  # how deep an object is searched for tensors


@dataclass(frozen=True)
class Structure:
    """How leaves were nested: a pytree, some of whose leaves are records with a structure of their own.

    Attributes:
        spec: The pytree around the records.
        records: Per leaf of it: None, or the record's class, its field names and the structure of its fields.
    """

    spec: pytree.TreeSpec
    records: tuple[tuple[type, tuple[str, ...], Structure] | None, ...]

    @property
    def n_leaves(self) -> int:
        return sum(1 if record is None else record[2].n_leaves for record in self.records)

    def restore(self, leaves: list[Any]) -> Any:
        """Return what `take_apart` was given, with ``leaves`` in place of its own."""
        parts, start = [], 0
        for record in self.records:
            if record is None:
                parts.append(leaves[start])
                start += 1
            else:
                cls, names, fields = record
                parts.append(_new_record(cls, names, fields.restore(leaves[start : start + fields.n_leaves])))
                start += fields.n_leaves
        return pytree.tree_unflatten(parts, self.spec)

    @property
    def key(self) -> Any:
        """Equal for equal structures."""
        return str(self.spec), tuple(r and (r[0], r[1], r[2].key) for r in self.records)


def take_apart(nested: Any, made: Made | None = None) -> tuple[list[Any], Structure]:
    """Return the leaves of ``nested`` in order, and its structure.

    Args:
        nested: Inputs, or what a forward returns.
        made: Says which objects the forward has made, of what it returns.
    """
    parts, spec = pytree.tree_flatten(nested)
    leaves: list[Any] = []
    records: list[tuple[type, tuple[str, ...], Structure] | None] = []
    for part in parts:
        if _is_record(part) or (made is not None and made.holds_tensors(part)):
            names = tuple(f.name for f in dataclasses.fields(part)) if dataclasses.is_dataclass(part) else tuple(vars(part))
            inner, fields = take_apart([getattr(part, name) for name in names], made)
            leaves += inner
            records.append((type(part), names, fields))
        else:
            leaves.append(part)
            records.append(None)
    return leaves, Structure(spec, tuple(records))


def are_changed(leaves: list[Any], structure: Structure, nested: Any) -> bool:
    """Whether something else was put into a list, dict or object of ``nested``, made of ``leaves``, since it was."""
    now, structure_now = take_apart(nested)
    same = structure_now.key == structure.key and all(a is b for a, b in zip(now, leaves, strict=True))
    return not same or any(holds_data(leaf) for leaf in now if not isinstance(leaf, torch.Tensor))


class Made:
    """Which objects a forward has made: those that it was not given, each met once."""

    def __init__(self, given: list[Any]) -> None:
        self._met = {id(leaf): leaf for leaf in given}

    def holds_tensors(self, value: Any) -> bool:
        """Whether ``value`` is such an object, made of its attributes alone, and tensors are among them."""
        kind = type(value)
        if not isinstance(getattr(value, "__dict__", None), dict) or kind.__module__.partition(".")[0] in FOREIGN:
            return False
        if isinstance(value, (type, types.FunctionType, torch.nn.Module, *_WITH_CONTENT)) or not holds_data(value):
            return False
        new = id(value) not in self._met and not any(vars(base).get("__slots__") for base in kind.__mro__)
        self._met[id(value)] = value  # of two that are one, a copy would be made
        return new


_WITH_CONTENT = (torch.Tensor, dict, list, tuple, set, frozenset, str, bytes, BaseException)


def _is_record(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _new_record(cls: type, names: tuple[str, ...], values: list[Any]) -> Any:
    record = object.__new__(cls) if cls is not types.SimpleNamespace else types.SimpleNamespace()
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)  # a frozen dataclass allows it so
    return record


def constant_key(constant: Any) -> Any:
    """Return a key for a leaf that is no tensor: equal only where the traced step would be the same.

    Raises:
        CaptureError: it holds tensors or arrays that a trace would not see change.
    """
    if type(constant) in SCALARS:
        return value_key(constant)
    refuse_hidden_data(constant, "an input")
    try:
        hash(constant)
    except TypeError:
        return Same(constant)
    return type(constant), constant


def refuse_hidden_data(leaf: Any, what: str) -> None:
    """Raise if ``leaf``, which is no tensor, holds one."""
    if (held := _held_data(leaf, _MAX_DEPTH)) is not None:
        raise CaptureError(
            f"{what} is a {type(leaf).__name__}, which hides a {type(held).__name__}",
            why="only tensors in lists, dicts, tuples, dataclasses and registered pytrees can be told from constants",
            try_="pass its tensors, or register its class with torch.utils._pytree.register_pytree_node",
        )


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree, in order."""
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def holds_data(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor or array, or holds one."""
    return _held_data(leaf, _MAX_DEPTH) is not None


def _held_data(value: Any, depth: int) -> Any | None:
    """Return a tensor or array that ``value`` is or holds, or None."""
    is_array = type(value).__module__.partition(".")[0] == "numpy" and type(value).__hash__ is None
    if isinstance(value, torch.Tensor) or is_array:
        return value
    if depth == 0 or isinstance(value, (type, types.ModuleType, types.FunctionType, torch.nn.Module)):
        return None
    held: list[Any] = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        held += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        held += value
    return next((found for item in held if (found := _held_data(item, depth - 1)) is not None), None)
