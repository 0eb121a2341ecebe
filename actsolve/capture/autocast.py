"""One cast of a weight for all its uses in an autocast region, as in eager.

Eager keeps the low-precision copy of a weight until the outermost autocast region ends, so that the gradients of its uses are
added in low precision and then converted once. A trace casts for each use, and adds what was converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.joint import Joint
from actsolve.capture.provenance import Origin
from actsolve.capture.torch_internals import annotation

aten = torch.ops.aten


def share_casts(joint: Joint) -> None:
    """Let the casts of one tensor in one autocast region be one, in the joint graph itself."""
    groups: dict[tuple[Node, int, torch.dtype], list[Node]] = {}
    for cast in joint.module.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        origin, source = annotation(cast), cast.args[0]
        if isinstance(origin, Origin) and origin.autocast_region is not None and source in joint.leaves and _lowers(source, cast):
            groups.setdefault((source, origin.autocast_region, cast.meta["val"].dtype), []).append(cast)
    for (source, *_), casts in groups.items():
        if len(casts) > 1:
            _add_in_low_precision(joint, source, len(casts))
            for cast in casts[1:]:
                cast.replace_all_uses_with(casts[0])
                joint.module.graph.erase_node(cast)


def _lowers(source: Node, cast: Node) -> bool:
    return source.meta["val"].dtype is torch.float32 and cast.meta["val"].dtype in (torch.bfloat16, torch.float16)


def _add_in_low_precision(joint: Joint, source: Node, n_casts: int) -> None:
    """Convert the gradient of ``source`` once, after it is added up, if it is the sum of ``n_casts`` conversions."""
    total = joint.gradient_of(source)
    terms: list[Node] = []
    sums: list[Node] = []
    pending = [total]
    while pending:
        node = pending.pop()
        if not isinstance(node, Node):
            return
        if node.target is aten.add.Tensor and not node.kwargs and (node is total or len(node.users) == 1):
            sums.append(node)
            pending += reversed(node.args)  # type: ignore[arg-type]
        else:
            terms.append(node)
    if len(terms) != n_casts or not all(t.target is aten._to_copy.default and len(t.users) == 1 for t in terms):
        return
    graph, like = joint.module.graph, terms[0]
    assert total is not None
    with graph.inserting_before(total), like.meta["val"].fake_mode:
        low: Node = like.args[0]  # type: ignore[assignment]
        for term in terms[1:]:
            low = _call(graph, aten.add.Tensor, (low, term.args[0]), {}, like)
        high = _call(graph, aten._to_copy.default, (low,), dict(like.kwargs), like)
    total.replace_all_uses_with(high)
    for node in [*sums, *terms]:
        graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Node) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k != "val"}
    node.meta["val"] = target(*(a.meta["val"] for a in args), **kwargs)
    return node
