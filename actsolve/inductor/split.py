"""Inductor's own split of a joint graph, as a `Graph` of kernels.

Inductor's min-cut partitioner decides what its forward saves and what its backward computes again for nothing, within kernels
that run anyway. That is where we start: its forward and backward are ours, an op is one of their kernels, and a value is what
one kernel writes for another. What Inductor keeps within a kernel takes no memory, and is no value. Of all values a plan decides
which are saved, and which of the forward's kernels are replayed for the rest.

Results of reductions (means, variances, maxima) are saved always: they are small, and their bits depend on the order of their
terms, which is that of the kernel that they are part of. So are masks made from random numbers, of a byte per element. Inductor
never computes either again of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.flops import node_flops
from actsolve.capture.replay import is_random, why_not_replayable
from actsolve.capture.tangents import upstream
from actsolve.capture.to_graph import signature, tensors_of
from actsolve.errors import CaptureError
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.inductor.kernels import Kernel, base_of, has_effect, is_item, kernels_of, sources_of
from actsolve.inductor.torch_inductor import draws_seeds, is_random_number, is_reduction

_SMALL = 4  # so many elements of a kernel, or more, for each of a result that is always saved


@dataclass(frozen=True)
class Split:
    """Inductor's forward and backward, and the graph of their kernels.

    Attributes:
        forward: Inductor's forward: its outputs, then what it saves.
        backward: Inductor's backward.
        n_outputs: How many outputs of the forward are the step's.
        graph: What planners see.
        kernels: Per op its kernel.
        value_of: Per node that is a whole storage, its value. What the backward reads is of the forward's nodes here.
        nodes: Per value its node.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    n_outputs: int
    graph: Graph
    kernels: tuple[Kernel, ...]
    value_of: dict[Node, int]
    nodes: tuple[Node, ...]


def outputs_of(module: fx.GraphModule) -> list[Node | None]:
    """Return what a forward or backward returns."""
    (output,) = module.graph.find_nodes(op="output")
    return [n if isinstance(n, Node) else None for n in output.args[0]]


def split_of(forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int, name: str = "") -> Split:
    """Return the graph of a partitioned step.

    Raises:
        CaptureError: its shapes are symbolic, or it saves what is no tensor.
    """
    return _Builder(forward, backward, n_outputs).build(name)


@dataclass
class _Builder:
    forward: fx.GraphModule
    backward: fx.GraphModule
    n_outputs: int
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    value_of: dict[Node, int] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def build(self, name: str) -> Split:
        results = outputs_of(self.forward)
        saved = {base_of(n) for n in results[self.n_outputs :] if n is not None}
        for node in (*self.forward.graph.nodes, *self.backward.graph.nodes):
            _refuse_symbols(node)
        self._given(self.forward.graph.nodes, Kind.INPUT)
        behind = {*saved, *upstream(*saved)}  # what the backward rests on; the rest, such as new statistics, is never replayed
        kernels = kernels_of(self.forward.graph, lambda node: node in behind)
        self._add(kernels, Phase.FORWARD, [*saved, *(base_of(n) for n in results if n is not None)])

        by_name = {node.name: node for node in self.forward.graph.nodes}
        for node in self.backward.graph.find_nodes(op="placeholder"):
            if node.name not in by_name:
                self._given([node], Kind.TANGENT)
            elif (source := base_of(by_name[node.name])) in self.value_of:
                self.value_of[node] = self.value_of[source]
        self._given(self.backward.graph.find_nodes(op="get_attr"), Kind.CONSTANT)
        gradients = [base_of(n) for n in outputs_of(self.backward) if n is not None]
        self._add(_postponed(kernels_of(self.backward.graph), gradients), Phase.BACKWARD, gradients)

        held = dict.fromkeys(self.value_of.get(base_of(n)) for n in results[: self.n_outputs] if n is not None)
        made = dict.fromkeys(self.value_of.get(n) for n in gradients)
        graph = Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            outputs=tuple(v for v in held if v is not None and self.values[v].producer is not None),
            gradients=tuple(v for v in made if v is not None and self.values[v].producer is not None),
            name=name,
        ).verify()
        return Split(
            self.forward,
            self.backward,
            self.n_outputs,
            graph,
            tuple(self.kernels),
            self.value_of,
            tuple(self.nodes),
        )

    def _given(self, nodes: Iterable[Node], kind: Kind) -> None:
        for node in nodes:
            if node.op in ("placeholder", "get_attr") and node not in self.value_of and tensors_of(node):
                self._value(node, kind if node.op == "placeholder" else Kind.CONSTANT, None)

    def _value(self, node: Node, kind: Kind, producer: int | None) -> int:
        tensor = tensors_of(node)[0]
        name = node.name if node.name not in self.names else f"{node.name}.{len(self.values)}"
        self.names.add(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        size_bytes = tensor.untyped_storage().nbytes() if kind is not Kind.ACTIVATION else tensor.numel() * tensor.element_size()
        self.values.append(Value(name, size_bytes, kind, producer, tuple(map(int, tensor.shape)), dtype))
        self.nodes.append(node)
        self.value_of[node] = len(self.values) - 1
        return self.value_of[node]

    def _add(self, kernels: list[Kernel], phase: Phase, returned: Iterable[Node]) -> None:
        home = {node: kernel for kernel in kernels for node in kernel.nodes}
        shown = set(returned)
        for kernel in kernels:
            for node in kernel.nodes:
                shown.update(n for n in sources_of(node) if home.get(n) is not kernel)
        changed = {n for kernel in kernels for n in _changed(kernel)}
        for kernel in kernels:
            why_not = _why_not(kernel, changed) if phase is Phase.FORWARD else "backward"
            halves = _halves(kernel, shown) if phase is Phase.FORWARD and not why_not else ()
            for part in halves or (kernel,):
                first = bool(halves) and part is halves[0]
                outputs = [n for n in part.nodes if (n in _results(kernel, shown) if first else n in shown and tensors_of(n))]
                only_results = bool(outputs) and _results(kernel, shown).issuperset(outputs)
                self._add_op(part, phase, outputs, why_not or ("its results are small" if only_results else ""))

    def _add_op(self, kernel: Kernel, phase: Phase, outputs: list[Node], why_not: str) -> None:
        mine = set(kernel.nodes)
        reads = dict.fromkeys(n for node in kernel.nodes for n in sources_of(node) if n not in mine)
        inputs = tuple(dict.fromkeys(self.value_of[n] for n in reads if n in self.value_of))
        index = len(self.ops)
        values = [self._value(n, Kind.ACTIVATION, index) for n in outputs if n not in self.value_of]
        self.ops.append(
            Op(
                name=f"{phase.value}.{index}.{kernel.name}",
                target="inductor.fused" if kernel.fused else str(kernel.nodes[0].target),
                phase=phase,
                inputs=inputs,
                outputs=tuple(values),
                flops=0 if kernel.fused else node_flops(kernel.nodes[0]),
                replayable=not why_not,
                why_not=why_not if phase is Phase.FORWARD else "",
                signature=" ".join(map(signature, kernel.nodes)),
            )
        )
        self.kernels.append(kernel)


def _postponed(kernels: list[Kernel], gradients: Iterable[Node]) -> list[Kernel]:
    """Return a backward's kernels with those last that make gradients from less than these take.

    Such are the gradients of wide weights from few rows. Inductor moves kernels likewise; once they are planned it does not.
    """
    returned, home = set(gradients), {node: kernel for kernel in kernels for node in kernel.nodes}
    read = {n for kernel in kernels for node in kernel.nodes for n in sources_of(node) if home.get(n) is not kernel}

    def may_wait(kernel: Kernel) -> bool:
        mine = set(kernel.nodes)
        if mine & read or not mine & returned or any(map(has_effect, mine)):
            return False
        reads = {n for node in mine for n in sources_of(node)} - mine
        return sum(map(_size_bytes, reads)) < sum(map(_size_bytes, mine & returned))

    return sorted(kernels, key=may_wait)


def _size_bytes(node: Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(node))


def _results(kernel: Kernel, shown: set[Node]) -> set[Node]:
    """Return what is small and costs much to make again: results of reductions, and masks made from random numbers."""
    found, random = set(), set()
    for node in kernel.nodes if kernel.fused else ():
        if is_random_number(node) or any(n in random for n in sources_of(node)):
            random.add(node)
            if node in shown and tensors_of(node)[0].dtype is torch.bool:
                found.add(node)
        if _is_of_reduction(node) and len(tensors_of(node)) == 1 and tensors_of(node)[0].numel() <= kernel.elements / _SMALL:
            found.add(node)
    return found


def _halves(kernel: Kernel, shown: set[Node]) -> tuple[Kernel, ...]:
    """Return those of a kernel's nodes that make its small results, and what follows them: that may be replayed without them.

    What both compute from the kernel's inputs is part of both. Empty where there are no two halves.
    """
    mine, results = set(kernel.nodes), _results(kernel, shown)
    ends = [n for n in kernel.nodes if n in shown and n not in results]
    if not kernel.fused or not results or not ends:
        return ()
    halves = []
    parts: tuple[tuple[Iterable[Node], set[Node]], ...] = ((results, set()), (ends, results))
    for wanted, stop in parts:
        nodes: set[Node] = set()
        pending = list(wanted)
        while pending:
            node = pending.pop()
            if node in mine and node not in nodes and node not in stop:
                nodes.add(node)
                pending += sources_of(node)
        halves.append(replace(kernel, nodes=[n for n in kernel.nodes if n in nodes]))
    return tuple(halves)


def _is_of_reduction(node: Node) -> bool:
    """Whether ``node`` is a reduction's result, or one of several."""
    return is_reduction(node.all_input_nodes[0] if is_item(node) else node)


def _changed(kernel: Kernel) -> list[Node]:
    """Given tensors that ``kernel`` writes into."""
    return [base_of(n.all_input_nodes[0]) for n in kernel.nodes if _writes(n) and n.all_input_nodes]


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _why_not(kernel: Kernel, changed: set[Node]) -> str:
    """Return why a kernel must not run a second time, or an empty text."""
    if any(n in changed for node in kernel.nodes for n in sources_of(node)):
        return "it reads what the step changes"
    if any(draws_seeds(node) or is_random(node) for node in kernel.nodes):  # a compiled backward sets no generator back
        return "it draws from the random generator"
    return next((reason for node in kernel.nodes if not is_item(node) and (reason := why_not_replayable(node, ()))), "")


def _refuse_symbols(node: Node) -> None:
    value = node.meta.get("val")
    symbolic = any(not isinstance(n, int) for t in tensors_of(node) for n in t.shape)
    if symbolic or type(value).__name__.startswith("Sym"):
        raise symbolic_shapes(node.name)


def symbolic_shapes(where: str | None = None) -> CaptureError:
    """The error that a graph is not of one shape."""
    return CaptureError(
        "the step's shapes are symbolic",
        where=where,
        why="bytes and times of a plan are those of one shape",
        try_="torch.compile(..., dynamic=False): each shape is then compiled and planned for",
    )
