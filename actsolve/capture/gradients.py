"""Each gradient has memory of its own.

Autograd may give one tensor to two parameters, as the gradients of both terms of a sum are one, and adds later gradients in
place: it clones all but the last. Two views of one storage it does not tell apart. So what it would clone is cloned in the
graph, where the planner sees it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.torch_internals import storage_key

aten = torch.ops.aten


def separate(module: fx.GraphModule, n_forward_outputs: int) -> None:
    """Clone in a joint graph each gradient that shares elements with another one before it."""
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    taken: list[torch.Tensor] = []
    for position in range(n_forward_outputs, len(results)):
        node = results[position]
        if not isinstance(node, Node):
            continue
        if any(_overlap(node.meta["val"], other) for other in taken):
            node = results[position] = _clone(module.graph, node, output)
        taken.append(node.meta["val"])
    output.args = (tuple(results),)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if storage_key(a) != storage_key(b) or a.numel() == 0 or b.numel() == 0:
        return False
    (first_a, last_a), (first_b, last_b) = _range(a), _range(b)
    return first_a <= last_b and first_b <= last_a


def _range(t: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last element of its storage that ``t`` has."""
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset()), int(t.storage_offset() + extent)


def _clone(graph: fx.Graph, node: Node, before: Node) -> Node:
    with graph.inserting_before(before):
        clone = graph.call_function(aten.clone.default, (node,))
    clone.meta = {k: v for k, v in node.meta.items() if k != "val"}
    clone.meta["partitioner_tag"] = "is_backward"
    value = node.meta["val"]
    with value.fake_mode:
        clone.meta["val"] = value.clone()
    return clone
