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

from actsolve.capture.torch_internals import real_tensors

aten = torch.ops.aten


def make_dropout_exact(joint: GraphModule) -> int:
    """Rewrite in ``joint`` each CPU dropout whose traced form would not be bitwise that of eager; return how many."""
    rewritten = 0
    for node in list(joint.graph.find_nodes(op="call_function", target=aten.native_dropout.default)):
        value = node.args[0].meta["val"]
        probability, train = float(node.args[1]), node.args[2]
        if value.device.type == "cpu" and train and 0 < probability < 1 and not same_scale(probability, value.dtype):
            _write_eager_form(joint, node, probability)
            rewritten += 1
    return rewritten


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
    source = node.args[0]
    assert isinstance(source, Node)
    graph, value = joint.graph, source.meta["val"]

    def call(target: object, *args: object) -> Node:
        new = graph.call_function(target, args)  # type: ignore[arg-type]
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        new.meta["val"] = torch.empty_like(value)
        return new

    with graph.inserting_before(node), value.fake_mode:
        empty = call(aten.empty_like.default, source)
        noise = call(aten.bernoulli.p, empty, 1 - probability)
        scaled = call(aten.div.Tensor, noise, 1 - probability)
        output = call(aten.mul.Tensor, source, scaled)
    for item in [u for u in node.users if u.target is operator.getitem]:
        if item.args[1] == 0:
            item.replace_all_uses_with(output)
        else:
            _rewrite_backward(joint, item, scaled)
        graph.erase_node(item)
    graph.erase_node(node)


def _rewrite_backward(joint: GraphModule, mask: Node, scaled: Node) -> None:
    """Gradients are multiplied by the scaled mask, as eager does."""
    for user in list(mask.users):
        if user.target is not aten.native_dropout_backward.default:
            raise NotImplementedError(f"a dropout mask read by {user.target}")
        with joint.graph.inserting_before(user):
            product = joint.graph.call_function(aten.mul.Tensor, (user.args[0], scaled))
        product.meta = dict(user.meta)
        user.replace_all_uses_with(product)
        joint.graph.erase_node(user)
