"""Which kernels can write their result over an input, bit for bit the same as into fresh memory.

Only elementwise kernels: each output element depends on the input element at the same place, so that reading and
writing the same storage is safe. Eager PyTorch does this where the user wrote ``relu_`` and where autograd adds up gradients;
functionalisation undoes it, and this brings it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}

# Backward kernels whose gradient input can be the place of the result, through their out variant.
_GRAD_INPUT: dict[Any, tuple[Any, str]] = {
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input"),
    aten.hardswish_backward.default: (aten.hardswish_backward.out, "out"),
    aten.hardsigmoid_backward.default: (aten.hardsigmoid_backward.grad_input, "grad_input"),
    aten.softplus_backward.default: (aten.softplus_backward.grad_input, "grad_input"),
}


@dataclass(frozen=True)
class InPlaceCall:
    """How to run a node over one of its inputs.

    Attributes:
        overwritten: The argument node whose storage the result takes.
        target: The kernel to call instead.
        swap: Exchange the first two arguments (the kernel commutes, and the second is overwritten).
        out: Name of the keyword that receives the overwritten argument, for out variants.
    """

    overwritten: Node
    target: Callable[..., Any]
    swap: bool = False
    out: str | None = None


def in_place_call(node: Node) -> InPlaceCall | None:
    """Return how ``node`` can write its result over an input, or None. Whether that input may die is the schedule's question."""
    target, out = node.target, node.meta.get("val")
    if not isinstance(out, torch.Tensor) or not isinstance(target, torch._ops.OpOverload):
        return None
    if target in _GRAD_INPUT:
        grad = node.args[0]
        variant, keyword = _GRAD_INPUT[target]
        return InPlaceCall(grad, variant, out=keyword) if isinstance(grad, Node) and _same_place(node, grad, out) else None
    if torch.Tag.pointwise not in target.tags:
        return None
    variant = _in_place_overload(target)
    if variant is None or not node.args or not isinstance(node.args[0], Node):
        return None
    if _same_place(node, node.args[0], out):
        return InPlaceCall(node.args[0], variant)
    if target in _COMMUTATIVE and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
        second = node.args[1]
        if isinstance(second, Node) and _same_place(node, second, out):
            return InPlaceCall(second, variant, swap=True)
    return None


def _in_place_overload(target: torch._ops.OpOverload) -> Any | None:
    """Return ``aten.relu_.default`` for ``aten.relu.default``: same arguments, first one overwritten; None if there is none."""
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    variant = getattr(packet, target._overloadname, None) if packet is not None else None
    if variant is None or name.endswith("_"):
        return None
    here, there = target._schema.arguments, variant._schema.arguments
    same = [(a.name, str(a.type)) for a in here] == [(a.name, str(a.type)) for a in there]
    overwritten = there[0].alias_info
    return variant if same and overwritten is not None and overwritten.is_write else None


def _same_place(node: Node, argument: Node, out: torch.Tensor) -> bool:
    """Whether ``argument`` covers its whole storage exactly as ``out`` would cover its own, and is read once."""
    tensor = argument.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or node.all_input_nodes.count(argument) != 1:
        return False
    aliases = [a for a in node.all_input_nodes if a is not argument and _shares_storage(a, tensor)]
    return (
        not aliases
        and list(node.args).count(argument) == 1
        and tensor.dtype == out.dtype
        and tensor.device == out.device
        and tensor.shape == out.shape
        and tensor.stride() == out.stride()
        and tensor.storage_offset() == 0
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        and tensor.untyped_storage().nbytes() == out.untyped_storage().nbytes()
        and tensor.numel() > 0
    )


def _shares_storage(node: Node, tensor: torch.Tensor) -> bool:
    other = node.meta.get("val")
    return isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == tensor.untyped_storage()._cdata
