"""From a joint fx graph to our storage-level `Graph`.

A node whose tensors all live in storages of its inputs is a view: it rides on its storage and is no op. Every other call is an
op. Storages are told apart by the fake tensors of the trace.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from actsolve.capture import replay
from actsolve.capture.eager_regions import call_of, taken_by
from actsolve.capture.flops import node_flops
from actsolve.capture.in_place import InPlaceCall, in_place_call
from actsolve.capture.joint import Joint
from actsolve.capture.layers import LayerNumbers
from actsolve.capture.layouts import describe_call
from actsolve.capture.provenance import Origin
from actsolve.capture.structure import tensors_in
from actsolve.capture.torch_internals import annotation, mutated_input, storage_key
from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op, Phase, Value


@dataclass
class GraphOfJoint:
    """A graph, and which fx nodes its ops and values came from.

    Attributes:
        graph: What planners see.
        op_nodes: Per op its node; None for an RNG state, which no node computes.
        value_nodes: Per value the node that holds its whole storage; None for an RNG state.
        value_of: The value that each tensor node rides on.
        in_place: Per op index, how it runs in place.
        n_forward_outputs: How many of the joint outputs are the forward's.
    """

    graph: Graph
    op_nodes: list[Node | None]
    value_nodes: list[Node | None]
    value_of: dict[Node, int]
    in_place: dict[int, InPlaceCall]
    n_forward_outputs: int


@dataclass
class _Builder:
    values: list[Value] = field(default_factory=list)
    value_nodes: list[Node | None] = field(default_factory=list)
    value_of: dict[Node, int] = field(default_factory=dict)
    by_storage: dict[int, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    ops: list[Op] = field(default_factory=list)
    op_nodes: list[Node | None] = field(default_factory=list)
    in_place: dict[int, InPlaceCall] = field(default_factory=dict)
    layers: LayerNumbers = field(default_factory=LayerNumbers)

    def new_value(self, name: str, size_bytes: int, kind: Kind, node: Node | None, tensor: torch.Tensor | None = None) -> int:
        shape = tuple(int(n) for n in tensor.shape) if tensor is not None else ()
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
        producer = len(self.ops) if kind is Kind.ACTIVATION else None
        if name in self.names:  # such as a buffer called like a node
            name = f"{name}.{len(self.values)}"
        self.names.add(name)
        self.values.append(Value(name, size_bytes, kind, producer, shape, dtype))
        self.value_nodes.append(node)
        return len(self.values) - 1

    def inputs_of(self, node: Node) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value_of[n] for n in node.all_input_nodes if n in self.value_of))


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Return the tensors that ``node`` evaluates to."""
    return tensors_in(node.meta.get("val"))


def graph_of(joint: Joint, name: str = "") -> GraphOfJoint:
    """Return the `Graph` of a joint fx graph; ``name`` says what was captured."""
    build = _Builder()
    nodes = list(joint.module.graph.nodes)
    for node in nodes:
        if node.op == "placeholder" and node.name not in joint.undefined:
            _add_given(build, joint, node)
        elif node.op == "get_attr":
            _add_constant(build, joint, node)
    n_forward_outputs, output_descs = joint.n_forward_outputs, joint.output_descs
    mutated = _mutated_values(build, nodes, output_descs)
    phases = _phases(nodes)
    needed = _needed(nodes)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for node in nodes:
            if node.op == "call_function" and phases[node] is phase and node in needed:
                _add_call(build, node, phase, mutated)

    (output,) = (n for n in nodes if n.op == "output")
    results = list(output.args[0])
    outputs, updates = _outputs_and_updates(build, results[:n_forward_outputs], output_descs, nodes)
    gradients = dict.fromkeys(build.value_of[n] for n in results[n_forward_outputs:] if isinstance(n, Node))
    graph = Graph(
        ops=tuple(build.ops),
        values=tuple(build.values),
        outputs=tuple(outputs),
        gradients=tuple(gradients),
        updates=tuple(updates),
        name=name,
    ).verify()
    return GraphOfJoint(graph, build.op_nodes, build.value_nodes, build.value_of, build.in_place, n_forward_outputs)


def _add_given(build: _Builder, joint: Joint, node: Node) -> None:
    kind, name = joint.given(node)
    for tensor in tensors_of(node):
        key = storage_key(tensor)
        if key not in build.by_storage:
            build.by_storage[key] = build.new_value(name, tensor.untyped_storage().nbytes(), kind, node, tensor)
        build.value_of[node] = build.by_storage[key]


def _add_constant(build: _Builder, joint: Joint, node: Node) -> None:
    constant: Any = joint.module
    for part in str(node.target).split("."):
        constant = getattr(constant, part)
    if isinstance(constant, torch.Tensor):
        fake = node.meta["val"] = joint.export.fake_mode.from_tensor(constant)
        key = storage_key(fake)
        if key not in build.by_storage:
            size_bytes = constant.untyped_storage().nbytes()
            build.by_storage[key] = build.new_value(node.name, size_bytes, Kind.CONSTANT, node, constant)
        build.value_of[node] = build.by_storage[key]


def _mutated_values(build: _Builder, nodes: list[Node], output_descs: list[Any]) -> frozenset[int]:
    """Given values that the step changes: a replay of an op that reads one would see the new content."""
    by_desc = {node.meta.get("desc"): node for node in nodes if node.op == "placeholder"}
    mutated = (mutated_input(desc) for desc in output_descs)
    return frozenset(build.value_of[by_desc[desc]] for desc in mutated if desc is not None)


def _phases(nodes: list[Node]) -> dict[Node, Phase]:
    """Backward is what torch tagged so, and whatever reads it."""
    phases: dict[Node, Phase] = {}
    for node in nodes:
        reads_backward = any(phases.get(n) is Phase.BACKWARD for n in node.all_input_nodes)
        phases[node] = Phase.BACKWARD if is_backward(node) or reads_backward else Phase.FORWARD
    return phases


def is_backward(node: Node) -> bool:
    """Whether torch traced ``node`` in the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _needed(nodes: list[Node]) -> set[Node]:
    """Nodes that an output depends on, and those that draw random numbers or have another effect, with what they depend on."""
    needed: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or node in needed or replay.has_effect(node):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return needed


def _add_call(build: _Builder, node: Node, phase: Phase, mutated: frozenset[int]) -> None:
    """Add ``node`` as a view of what it reads, or as an op with the storages that it makes."""
    if node.target is operator.getitem and node.args[0] not in build.value_of and tensors_of(node):
        # An output of a multi-output op: its storage was made a value when the op was added.
        key = storage_key(tensors_of(node)[0])
        value = build.by_storage[key]
        build.value_of[node] = value
        if build.value_nodes[value] is None:
            build.value_nodes[value] = node
        return
    tensors = tensors_of(node)
    keys = list(dict.fromkeys(map(storage_key, tensors)))
    fresh = [key for key in keys if key not in build.by_storage]
    if tensors and not fresh and not replay.has_effect(node):
        if len(keys) == 1:
            build.value_of[node] = build.by_storage[keys[0]]
        return
    _add_op(build, node, phase, mutated, fresh)


def _add_op(build: _Builder, node: Node, phase: Phase, mutated: frozenset[int], fresh: list[int]) -> None:
    inputs = build.inputs_of(node)
    forward = phase is Phase.FORWARD
    why_not = replay.why_not_replayable(node, [v for v in inputs if v in mutated]) if forward else ""
    random = replay.is_random(node)
    replay_inputs = (_add_rng_state(build, node),) if random and forward and not why_not else ()

    tensors = tensors_of(node)
    single = isinstance(node.meta.get("val"), torch.Tensor)
    outputs = []
    for position, key in enumerate(fresh):
        tensor = next(t for t in tensors if storage_key(t) == key)
        label = node.name if single else f"{node.name}.{position}"
        value = build.new_value(label, tensor.untyped_storage().nbytes(), Kind.ACTIVATION, node if single else None, tensor)
        build.by_storage[key] = value
        outputs.append(value)
    if single and tensors:
        build.value_of[node] = build.by_storage[storage_key(tensors[0])]

    taken = taken_by(node)
    call = in_place_call(node)
    place = None
    if call is not None and outputs and call.overwritten in build.value_of:
        source = build.value_of[call.overwritten]
        if build.values[source].kind is Kind.ACTIVATION:
            place = (source, outputs[0])
            build.in_place[len(build.ops)] = call
    origin = annotation(node) or Origin("", "")
    build.ops.append(
        Op(
            name=node.name,
            target=str(node.target),
            phase=phase,
            inputs=inputs,
            outputs=tuple(outputs),
            flops=node_flops(node) if taken is None else taken.flops,
            replayable=forward and not why_not,
            why_not=why_not,
            replay_inputs=replay_inputs,
            random=random,
            in_place=place,
            module=origin.module,
            layer=build.layers.of(origin.module),
            source=origin.source,
            signature=signature(node),
        )
    )
    build.op_nodes.append(node)


def _add_rng_state(build: _Builder, node: Node) -> int:
    """Add the optional op that saves the state of the generator that ``node`` draws from; return its value."""
    value = build.new_value(f"{node.name}.rng_state", replay.rng_state_bytes(node), Kind.ACTIVATION, None)
    op = Op(
        name=f"{node.name}.rng_state",
        target=RNG_STATE_TARGET,
        phase=Phase.FORWARD,
        inputs=(),
        outputs=(value,),
        replayable=False,
        why_not="the state is there only once",
        optional=True,
        signature=RNG_STATE_TARGET,
    )
    build.ops.append(op)
    build.op_nodes.append(None)
    return value


def _outputs_and_updates(
    build: _Builder, results: list[Any], output_descs: list[Any], nodes: list[Node]
) -> tuple[list[int], list[tuple[int, int]]]:
    by_desc = {node.meta.get("desc"): node for node in nodes if node.op == "placeholder"}
    outputs: dict[int, None] = {}
    updates: list[tuple[int, int]] = []
    for result, desc in zip(results, output_descs, strict=False):
        if not isinstance(result, Node):
            continue
        value, target = build.value_of[result], mutated_input(desc)
        produced = build.values[value].kind is Kind.ACTIVATION
        if target is not None and produced:
            updates.append((value, build.value_of[by_desc[target]]))
        elif produced:
            outputs[value] = None
    return [v for v in outputs], updates


def signature(node: Node) -> str:
    """Return a text that is equal for calls that cost the same: kernel, shapes, strides, dtypes, devices and constants."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if (call := call_of(node)) is None:
        return describe_call(node.target, args, kwargs)
    kind = type(call.module)
    return f"{call.path}: {kind.__module__}.{kind.__qualname__}: {describe_call(node.target, args[:-1], kwargs)}"
