"""Dropout as eager PyTorch computes it on a CPU, where torch's trace of it differs in the last bit.

Traced, ``dropout`` becomes ``native_dropout``, which multiplies by ``1 / (1 - p)`` rounded once; eager divides a mask of ones by
``1 - p`` in the tensor's own precision. For most p both give the same number, and ``native_dropout`` is kept, for its mask takes
one byte an element. For the rest (0.15 in float32) this writes the eager form back into the graph.
"""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch.fx import GraphModule, Node

from actsolve.capture.torch_internals import annotation, real_tensors
from actsolve.errors import CaptureError

aten = torch.ops.aten


def make_dropout_exact(joint: GraphModule) -> int:
    """Rewrite in ``joint`` each CPU dropout whose traced form would not be bitwise that of eager; return how many."""
    rewritten = 0
    for node in list(joint.graph.find_nodes(op="call_function", target=aten.native_dropout.default)):
        value = node.args[0].meta["val"]
        probability, train = float(node.args[1]), node.args[2]
        if value.device.type == "cpu" and train and 0 < probability < 1 and not same_scale(probability, value.dtype):
            _refuse_other_layouts(node, value)
            _write_eager_form(joint, node, probability)
            rewritten += 1
    for node in joint.graph.find_nodes(op="call_function", target=aten.bernoulli.p):  # what `dropout_` becomes
        _refuse_other_layouts(node, node.args[0].meta["val"])
    return rewritten


def _refuse_other_layouts(node: Node, value: torch.Tensor) -> None:
    """Refuse a mask for a tensor that is not contiguous: torch's trace lays it out in another way than eager does."""
    if not value.is_contiguous():
        origin = annotation(node)
        raise CaptureError(
            "cannot trace a dropout bitwise as eager computes it",
            where=origin.source if origin is not None else None,
            why=f"its input is not contiguous (strides {tuple(value.stride())}), and it works in place or its p is not exact",
            try_='contiguous inputs, a p such as 0.1 or 0.5 without inplace=True, or on_error="original"',
        )


@cache
def same_scale(probability: float, dtype: torch.dtype) -> bool:
    """Whether multiplying by eager's mask, one divided by ``1 - p`` in ``dtype``, gives what ``native_dropout`` gives.

    In half precisions the product is what is rounded, so a full binade of mantissas is tried.
    """
    with real_tensors():
        scale = torch.ones(1, dtype=dtype).div_(1 - probability)
        mantissas = torch.linspace(1, 2, 257, dtype=torch.float32).to(dtype)
        return torch.equal(mantissas * scale, mantissas.mul(1 / (1 - probability)))


def _write_eager_form(joint: GraphModule, node: Node, probability: float) -> None:
    """Multiply by the mask of ``node`` divided by ``1 - p``, forward and backward.

    The mask is drawn as before: one drawn by ``bernoulli`` would follow another order where the input is not contiguous.
    """
    source = node.args[0]
    assert isinstance(source, Node)
    graph, value = joint.graph, source.meta["val"]
    items: dict[object, Node] = {item.args[1]: item for item in node.users if item.target is operator.getitem}
    mask = items.get(1)

    def call(target: object, *args: object, **kwargs: object) -> Node:
        new = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return new

    with graph.inserting_after(node), value.fake_mode:
        if mask is None:
            mask = call(operator.getitem, node, 1)
            mask.meta["val"] = node.meta["val"][1]
    with graph.inserting_after(mask), value.fake_mode:
        noise = call(aten._to_copy.default, mask, dtype=value.dtype)
        noise.meta["val"] = torch.empty_like(mask.meta["val"], dtype=value.dtype)
    with graph.inserting_after(noise), value.fake_mode:
        scaled = call(aten.div.Tensor, noise, 1 - probability)
        scaled.meta["val"] = torch.empty_like(noise.meta["val"])
    with graph.inserting_after(scaled), value.fake_mode:
        output = call(aten.mul.Tensor, source, scaled)
        output.meta["val"] = value * scaled.meta["val"]
    _rewrite_backward(joint, mask, noise, scaled)
    if (traced := items.get(0)) is not None:
        traced.replace_all_uses_with(output)
        graph.erase_node(traced)


def _rewrite_backward(joint: GraphModule, mask: Node, noise: Node, scaled: Node) -> None:
    """Gradients are multiplied by the scaled mask, as eager does."""
    for user in [u for u in mask.users if u is not noise]:
        if user.target is not aten.native_dropout_backward.default:
            raise NotImplementedError(f"a dropout mask read by {user.target}")
        with joint.graph.inserting_before(user):
            product = joint.graph.call_function(aten.mul.Tensor, (user.args[0], scaled))
        product.meta = dict(user.meta)
        user.replace_all_uses_with(product)
        joint.graph.erase_node(user)
