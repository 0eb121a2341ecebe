"""One cast of a weight for all its uses in an autocast region, as in eager.

Eager keeps the low-precision copy of a weight until the outermost autocast region ends, so that the gradients of its uses are
added in low precision and then converted once. A trace casts for each use, and adds what was converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.eager_regions import call_of
from actsolve.capture.joint import Joint
from actsolve.capture.provenance import Origin
from actsolve.capture.region_call import CALLS
from actsolve.capture.torch_internals import annotation
from actsolve.errors import CaptureError

aten = torch.ops.aten


def share_casts(joint: Joint) -> None:
    """Let the casts of one tensor in one autocast region be one, in the joint graph itself.

    Raises:
        CaptureError: the gradients of its uses cannot be told apart well enough to add them in eager's order.
    """
    _refuse_casts_of_regions(joint)
    found: dict[Node, list[Node]] = {}
    for cast in joint.module.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        source = cast.args[0]
        if source in joint.leaves and _lowers(source, cast):
            found.setdefault(source, []).append(cast)
    for source, casts in found.items():
        groups: dict[Any, list[Node]] = {}
        for cast in casts:
            region = _region(cast)
            groups.setdefault(cast if region is None else (region, cast.meta["val"].dtype), []).append(cast)
        if len(groups) < len(casts):
            _add_in_low_precision(joint, source, len(groups))
            for first, *others in groups.values():
                for cast in others:
                    cast.replace_all_uses_with(first)
                    joint.module.graph.erase_node(cast)


def _refuse_casts_of_regions(joint: Joint) -> None:
    """Raise if a weight is used in a region that is left in eager, and elsewhere: eager has one cast for both."""
    uses: dict[int, list[Node]] = {}
    for node in joint.module.graph.nodes:
        if (call := call_of(node)) is not None:
            uses.setdefault(call.key, []).append(node)
    for key, nodes in uses.items():
        call = CALLS[key]
        if not call.keeps_casts or not any(enabled for _, enabled, _ in call.autocast):
            continue
        for weight in nodes[0].args[0][: call.n_state]:  # type: ignore[index,union-attr]
            if weight in joint.leaves and not set(nodes).issuperset(weight.users):  # type: ignore[union-attr]
                raise _unknown_order(joint, weight)  # type: ignore[arg-type]


def _region(cast: Node) -> int | None:
    """Return the autocast region in which eager would keep a cast; None for one that was written out."""
    origin = annotation(cast)
    return origin.autocast_region if isinstance(origin, Origin) else None


def _lowers(source: Node, cast: Node) -> bool:
    return source.meta["val"].dtype is torch.float32 and cast.meta["val"].dtype in (torch.bfloat16, torch.float16)


def _add_in_low_precision(joint: Joint, source: Node, n_groups: int) -> None:
    """Convert the gradient of ``source`` once, after what its one cast adds up to."""
    total = joint.gradient_of(source)
    if total is None:
        return
    sums, terms = _terms(total)
    converted = [t for t in terms if t.target is aten._to_copy.default and _lowers(t, t.all_input_nodes[0])]
    others = [t for t in terms if t not in converted]
    if len(converted) < 2:
        return
    # Eager converts when the last use has sent its gradient: when that is among others, the graph does not tell.
    if n_groups > 1 or len(others) > 1 or any(len(t.users) > 1 for t in converted):
        raise _unknown_order(joint, source)
    graph, like = joint.module.graph, converted[0]
    with graph.inserting_before(total), like.meta["val"].fake_mode:
        low: Node = like.args[0]  # type: ignore[assignment]
        for term in converted[1:]:
            low = _call(graph, aten.add.Tensor, (low, term.args[0]), {}, like)
        high = _call(graph, aten._to_copy.default, (low,), dict(like.kwargs), like)
        for other in others:
            high = _call(graph, aten.add.Tensor, (high, other), {}, total)
    total.replace_all_uses_with(high)
    for node in [*sums, *converted]:
        graph.erase_node(node)


def _terms(total: Node) -> tuple[list[Node], list[Node]]:
    """Return the additions that make up a gradient, the last one first, and what they add, in order."""
    sums: list[Node] = []
    terms: list[Node] = []
    pending = [total]
    while pending:
        node = pending.pop()
        if node.target is aten.add.Tensor and not node.kwargs and (node is total or len(node.users) == 1):
            sums.append(node)
            pending += reversed(node.args)  # type: ignore[arg-type]
        else:
            terms.append(node)
    return sums, terms


def _unknown_order(joint: Joint, source: Node) -> CaptureError:
    _, name = joint.given(source)
    return CaptureError(
        f"cannot add the gradients of {name} bitwise as eager does",
        why="autocast lowers it for several uses, and it is also used in full precision or in another autocast region",
        try_='one autocast region with no other use than an embedding, or on_error="original"',
    )


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Node) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k != "val"}
    node.meta["val"] = target(*(a.meta["val"] for a in args), **kwargs)
    return node
