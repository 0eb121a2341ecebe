"""Which ops may run twice, and what a second run needs to give bit for bit the same result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from actsolve.capture.answers import is_asked

aten = torch.ops.aten

_COLLECTIVE_NAMESPACES = ("_c10d_functional", "c10d", "_c10d_functional_autograd", "fsdp", "symm_mem")
_BATCH_NORM = aten._native_batch_norm_legit_functional.default


def is_random(node: Node) -> bool:
    """Whether ``node`` draws from a random number generator."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and draws(target, node.args, node.kwargs)


def draws(kernel: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``kernel`` draws: those of dropout do only in training mode, attention only with a positive probability."""
    if torch.Tag.nondeterministic_seeded not in kernel.tags:
        return False
    arguments = _arguments(kernel, args, kwargs)
    if "dropout_p" in arguments:
        return bool(arguments["dropout_p"])
    return arguments.get("train", True) is not False


def _named_arguments(node: Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    return _arguments(node.target, node.args, node.kwargs)


def _arguments(kernel: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [a.name for a in kernel._schema.arguments]
    defaults = {a.name: a.default_value for a in kernel._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def has_effect(node: Node) -> bool:
    """Whether leaving ``node`` out would change more than its result: it draws, writes, communicates, asserts or is asked."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    asserts = "assert" in target._schema.name or is_asked(node)
    return is_random(node) or target._schema.is_mutable or target.namespace in _COLLECTIVE_NAMESPACES or asserts


def why_not_replayable(node: Node, mutated_inputs: Sequence[int]) -> str:
    """Return why a forward op must not run a second time, or an empty text if it may."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "a call that torch does not describe"
    if target._schema.is_mutable:
        return "it writes to its inputs"
    if target.namespace in _COLLECTIVE_NAMESPACES:
        return "a collective"
    if target.namespace not in ("aten", "prims"):
        return "a custom op, which may have state"
    if is_random(node) and _named_arguments(node).get("generator") is not None:
        return "it draws from a generator of its own"
    if mutated_inputs and not _statistics_only(node):
        return "it reads a buffer that the step changes"
    if _statistics_only(node) and _new_statistics_are_read(node):
        return "its new statistics are read"
    return ""


def _statistics_only(node: Node) -> bool:
    """Whether the buffers that ``node`` reads only serve to make their next content, as in training-mode batch norm."""
    return node.target is _BATCH_NORM and bool(_named_arguments(node)["training"])


def _new_statistics_are_read(node: Node) -> bool:
    """Whether more is done with batch norm's new statistics than to copy them into its buffers: a replay makes none."""
    items = [user for user in node.users if user.target is operator.getitem and user.args[1] in (3, 4)]
    return any(reader.op != "output" for item in items for reader in item.users)


def rng_state_bytes(node: Node) -> int:
    """Return the bytes of the state of the generator that ``node`` draws from."""
    return 16 if device_of(node).type == "cuda" else torch.get_rng_state().nbytes


def device_of(node: Node) -> torch.device:
    """Return the device of what ``node`` evaluates to."""
    value = node.meta["val"]
    tensor = value if isinstance(value, torch.Tensor) else value[0]
    return torch.device(tensor.device)


def replayed_call(node: Node) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return target, args and kwargs of a replay of ``node``.

    Batch norm is replayed without its running statistics, which by then have changed and which its result in training
    mode does not depend on.
    """
    assert callable(node.target)
    if node.target is _BATCH_NORM:
        a = _named_arguments(node)
        target = aten._native_batch_norm_legit.no_stats
        return target, (a["input"], a["weight"], a["bias"], a["training"], a["momentum"], a["eps"]), {}
    return node.target, tuple(node.args), dict(node.kwargs)
