"""From which outputs the backward starts.

Torch traces a backward that starts from every output. Its users mostly call ``backward()`` on a loss that comes with logits or
hidden states, of which nothing is derived. Where an output has no gradient, eager runs nothing for it and leaves None where
no gradient arrives; zeros in its place would cost memory and time, and an optimizer treats them differently. So a step is
planned for the outputs that a gradient is expected for, and a backward for others is made when it is asked for.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.eager_regions import call_of
from actsolve.capture.joint import Joint
from actsolve.capture.structure import tensors_in
from actsolve.capture.torch_internals import input_role, mutated_input, output_index, storage_key
from actsolve.graph import Kind

aten = torch.ops.aten


def expected(joint: Joint, *, loss_inside: bool) -> frozenset[str]:
    """Return the names of the tangents of ``joint`` that its user will give, as far as one can tell.

    With a loss function, that of the loss. Else those of what the module returns, without what it assigns
    to its attributes, and without what a 0-d output is computed from: the logits beside their loss. Inputs
    that it edits in place count as returned.
    """
    n_writes = len(joint.layout.writes)
    index = {t: input_role(t).index - n_writes for t in joint.tangents}
    if loss_inside and 0 in index.values():
        return frozenset(t.name for t, i in index.items() if i == 0)
    returned = [t for t, i in index.items() if i >= 0 or _is_edited_input(joint, t)]
    inner = _storages_upstream([_output(joint, t) for t in returned if t.meta["val"].dim() == 0])
    ends = [t for t in returned if t.meta["val"].dim() == 0 or storage_key(_output(joint, t).meta["val"]) not in inner]
    return frozenset(t.name for t in ends or returned or joint.tangents)


def computed_from(joint: Joint) -> dict[int, frozenset[str]]:
    """Return per flat output that others are computed from the tangents of those."""
    (output,) = joint.module.graph.find_nodes(op="output")
    returned = {output_index(desc): n for n, desc in zip(output.args[0], joint.output_descs, strict=True)}
    sources = {t.name: upstream(_output(joint, t)) for t in joint.tangents}
    found = {i: frozenset(t for t, nodes in sources.items() if n in nodes) for i, n in returned.items() if i is not None}
    return {index: names for index, names in found.items() if names}


def upstream(*nodes: Node) -> set[Node]:
    """Return what ``nodes`` are computed from; of themselves those that another is computed from."""
    seen: set[Node] = set()
    pending = [source for node in nodes for source in node.all_input_nodes]
    while pending:
        source = pending.pop()
        if source not in seen:
            seen.add(source)
            pending += source.all_input_nodes
    return seen


def _output(joint: Joint, tangent: Node) -> Node:
    """Return the node of the output that ``tangent`` is the gradient of."""
    (output,) = joint.module.graph.find_nodes(op="output")
    role = input_role(tangent)
    nodes: list[Node] = [n for n, desc in zip(output.args[0], joint.output_descs, strict=True) if desc == role.output]
    return nodes[0]


def _is_edited_input(joint: Joint, tangent: Node) -> bool:
    edited = mutated_input(input_role(tangent).output)
    nodes = joint.module.graph.find_nodes(op="placeholder")
    return any(n.meta.get("desc") == edited and joint.given(n)[0] is Kind.INPUT for n in nodes) if edited is not None else False


def _storages_upstream(nodes: list[Node]) -> set[int]:
    """Return the storages of what ``nodes`` are computed from, not of themselves."""
    vals = [node.meta.get("val") for node in upstream(*nodes)]
    return {storage_key(t) for t in tensors_in(vals)}


def without(joint: Joint, undefined: frozenset[str]) -> Joint:
    """Return ``joint`` with a backward for the case that the tangents named in ``undefined`` are not given.

    As autograd has it: what depends on undefined gradients alone is undefined; a sum with one of them is the other;
    any other op gets zeros for it. Gradients that come out undefined are None.
    """
    if not undefined:
        return joint
    module = _copy(joint.module)
    missing: set[Node] = {n for n in module.graph.find_nodes(op="placeholder") if n.name in undefined}
    depends: set[Node] = {n for n in module.graph.find_nodes(op="placeholder") if input_role(n).is_tangent}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or depends.isdisjoint(node.all_input_nodes):
            continue
        depends.add(node)
        gradients = [n for n in node.all_input_nodes if n in depends]
        if missing.issuperset(gradients):
            missing.add(node)
        elif not missing.isdisjoint(gradients):
            _replace_missing(node, missing, depends)
    (output,) = module.graph.find_nodes(op="output")
    output.args = (fx.node.map_arg(tuple(output.args[0]), lambda n: None if n in missing else n),)
    return dataclasses.replace(joint, module=module, undefined=undefined)


def undefined_gradients(joint: Joint, undefined: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Return which inputs of a step get no gradient, by position: all that theirs would be made of is undefined.

    Args:
        joint: The step, as its backward starts.
        undefined: Which gradients of the regions that are left in eager autograd has None for (`UNDEFINED`).
    """
    carry: set[Node] = set(joint.tangents)
    missing: set[Node] = set()
    for node in joint.module.graph.nodes:
        gradients = [n for n in node.all_input_nodes if n in carry]
        if node.op != "call_function" or not gradients:
            continue
        carry.add(node)
        source = node.args[0]
        if missing.issuperset(gradients):
            missing.add(node)
        elif node.target is operator.getitem and isinstance(source, Node) and (call := call_of(source)) is not None:
            (_, number) = node.args
            if call.positions[number] in undefined.get(call.key, ()):
                missing.add(node)
    (output,) = joint.module.graph.find_nodes(op="output")
    results = output.args[0][joint.n_forward_outputs :]
    return frozenset(i for i, node in enumerate(results) if node in missing)


def _replace_missing(node: Node, missing: set[Node], depends: set[Node]) -> None:
    """Give ``node``, some of whose gradients are missing, what autograd would compute with."""
    if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
        (other,) = (n for n in node.args if n not in missing)
        if isinstance(other, Node) and _same_meta(other, node):
            node.replace_all_uses_with(other)
            _see_again(node, other, depends)
            return
    if call_of(node) is not None:  # what is left in eager takes None
        tensors, token, gradients, key = node.args
        node.args = (tensors, token, [None if n in missing else n for n in gradients], key)  # type: ignore[union-attr]
        return
    for gradient in [n for n in node.all_input_nodes if n in missing]:
        with node.graph.inserting_before(node):
            zeros = _zeros(node.graph, gradient)
        depends.add(zeros)
        node.replace_input_with(gradient, zeros)


def _see_again(replaced: Node, other: Node, depends: set[Node]) -> None:
    """Let what read ``replaced`` look as it does now that ``other`` stands in its place.

    What was a view of it, such as the parts of a ``cat``'s gradient, is one of ``other``; and where that is laid out otherwise,
    so may be what is computed from it. Autograd reshapes where the trace says ``view``: what is laid out for none is copied.
    """
    key = storage_key(replaced.meta["val"])
    changed = set() if _layouts(replaced.meta["val"]) == _layouts(other.meta["val"]) else {other}
    for node in replaced.graph.nodes:
        before = node.meta.get("val")
        is_view = any(storage_key(t) == key for t in tensors_in(before))
        if node is replaced or node.op != "call_function" or not (is_view or not changed.isdisjoint(node.all_input_nodes)):
            continue
        if node.target in (aten.view.default, aten._unsafe_view.default):
            _copy_unless_viewed(node, depends)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with other.meta["val"].fake_mode:
            seen = node.target(*args, **kwargs)
        read = {storage_key(t) for t in tensors_in((args, kwargs))}
        if _layouts(seen) != _layouts(before) or any(storage_key(t) in read for t in tensors_in(seen)):
            changed.add(node)
        if is_view or node in changed:
            node.meta["val"] = seen


def _layouts(value: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.storage_offset()) for t in tensors_in(value)]


def _copy_unless_viewed(view: Node, depends: set[Node]) -> None:
    """Put a copy before ``view`` if what it looks at is not laid out for it."""
    (base,) = view.all_input_nodes
    value = base.meta["val"]
    with value.fake_mode:
        if storage_key(value.reshape(view.args[1])) == storage_key(value):
            return
        copied = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    with view.graph.inserting_before(view):
        copy = view.graph.call_function(aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
    copy.meta = {**view.meta, "val": copied}
    depends.add(copy)
    view.replace_input_with(base, copy)


def _zeros(graph: fx.Graph, like: Node) -> Node:
    value: torch.Tensor = like.meta["val"]
    kwargs: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    zeros = graph.call_function(aten.full.default, (list(value.shape), 0), kwargs)
    zeros.meta = {k: v for k, v in like.meta.items() if k != "val"}
    zeros.meta["partitioner_tag"] = "is_backward"
    with value.fake_mode:  # type: ignore[attr-defined]
        zeros.meta["val"] = torch.full(value.shape, 0, **kwargs)
    return zeros


def _same_meta(a: Node, b: Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose nodes have the same names."""
    graph = fx.Graph()
    copies: dict[Node, Node] = {}
    result: Any = graph.graph_copy(module.graph, copies)
    (output,) = module.graph.find_nodes(op="output")
    graph.output(result).meta = dict(output.meta)
    for original, copy in copies.items():
        copy.meta = dict(original.meta)
        if copy.name != original.name:
            raise AssertionError(f"{original.name} became {copy.name} in a copy")
    return fx.GraphModule(module, graph)
