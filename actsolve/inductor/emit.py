"""From a schedule of kernels to a forward and a backward graph for Inductor.

The forward is Inductor's, and saves what the schedule keeps; an input that Inductor would copy into another layout, and save so,
is saved as it is. The backward runs its own kernels and replays in the order of the schedule, which `torch_inductor` has Inductor
keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx import Node

from actsolve.errors import ScheduleError
from actsolve.inductor.kernels import base_of, is_inlined, sources_of
from actsolve.inductor.layouts import is_laid_out_anew
from actsolve.inductor.split import Split, outputs_of
from actsolve.inductor.torch_inductor import Modules, has_no_version_check, mark_as_given, mark_planned, saved_desc
from actsolve.schedule import Schedule, Step, StepKind
from actsolve.split import first_backward_step


def emitted(split: Split, schedule: Schedule) -> Modules:
    """Return the forward and the backward that carry out ``schedule``.

    Raises:
        ScheduleError: the backward reads what is neither saved nor replayed.
    """
    split_at = first_backward_step(split.graph, schedule)
    live: set[int] = set()
    for step in schedule.steps[:split_at]:
        live.update(split.graph.ops[step.op].outputs if step.op is not None else ())
        live.discard(-1 if step.value is None else step.value)
    runs = _runs(split, schedule.steps[split_at:], live)
    saved = sorted(_saved(split, runs), key=has_no_version_check)
    return _forward(split, saved), _Backward(split, saved).module(runs)


@dataclass(frozen=True)
class _Run:
    """What one step of the backward does: run some nodes, of which these values stay; or forget a value."""

    nodes: tuple[Node, ...] = ()
    reads: tuple[int, ...] = ()
    stays: frozenset[int] = frozenset()
    forgets: int | None = None
    replays: bool = False


def _runs(split: Split, steps: tuple[Step, ...], live: set[int]) -> list[_Run]:
    """``live``: what is there when the backward begins."""
    runs = []
    for step in steps:
        if step.op is None:
            live.discard(-1 if step.value is None else step.value)
            runs.append(_Run(forgets=step.value))
            continue
        outputs, kernel = split.graph.ops[step.op].outputs, split.kernels[step.op]
        if step.kind is StepKind.REPLAY:
            wanted = [split.nodes[v] for v in outputs if v not in live]
            nodes, reads = _cone(split, step.op, wanted, live)
            stays = frozenset(split.value_of[n] for n in wanted)
            runs.append(_Run(tuple(nodes), tuple(reads), stays, replays=True))
        else:
            made = {split.value_of.get(n) for n in kernel.nodes}
            inputs = dict.fromkeys(split.value_of[n] for m in kernel.nodes for n in sources_of(m) if n in split.value_of)
            runs.append(_Run(tuple(kernel.nodes), tuple(v for v in inputs if v not in made), frozenset(outputs)))
        live.update(outputs)
    return runs


def _saved(split: Split, runs: list[_Run]) -> list[Node]:
    """Return the nodes of the forward that the backward is given: what it reads before it makes it."""
    there: set[int] = set()
    saved: dict[int, None] = {}
    returned = [split.value_of.get(base_of(n)) for n in outputs_of(split.backward) if n is not None]
    for run in (*runs, _Run(reads=tuple(v for v in returned if v is not None))):
        saved.update((v, None) for v in run.reads if v not in there and _is_forward(split, v))
        there |= run.stays
    return [split.nodes[v] for v in saved]


def _is_forward(split: Split, value: int) -> bool:
    return split.nodes[value].graph is split.forward.graph and split.nodes[value].op != "get_attr"


def _cone(split: Split, op: int, wanted: list[Node], live: set[int]) -> tuple[list[Node], list[int]]:
    """Return the nodes of a kernel that have to run for ``wanted``, in order, and the values that they read from outside."""
    kernel = split.kernels[op]
    mine = set(kernel.nodes)
    needed: set[Node] = set()
    reads: dict[int, None] = {}
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        for source in sources_of(node):
            value = split.value_of.get(source)
            if source in mine and (value is None or value not in live):
                pending.append(source)
            elif value is not None:
                reads[value] = None
    return [node for node in kernel.nodes if node in needed], list(reads)


def _forward(split: Split, saved: list[Node]) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[Node, Node] = {}
    for node in split.forward.graph.nodes:
        if node.op == "output":
            outputs = [made[n] if isinstance(n, Node) else n for n in node.args[0][: split.n_outputs]]
            output = graph.output((*outputs, *(made[n] for n in saved)))
            output.meta.update(node.meta)
            mark_as_given(output, [i for i, n in enumerate(saved, start=split.n_outputs) if is_laid_out_anew(n)])
            descs = list(node.meta["desc"][: split.n_outputs])
            output.meta["desc"] = descs + [saved_desc(i, n) for i, n in enumerate(saved)]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    module = fx.GraphModule(split.forward, graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class _Backward:
    """Writes the backward, a step at a time."""

    def __init__(self, split: Split, saved: list[Node]) -> None:
        self._split = split
        self._out = fx.Graph()
        self._made: dict[Node, Node] = {}  # nodes of either of Inductor's graphs that are there
        self._forward_node = {node.name: node for node in split.forward.graph.nodes}
        tangents = [n for n in split.backward.graph.find_nodes(op="placeholder") if n.name not in self._forward_node]
        for node in (*saved, *tangents):
            self._made[node] = self._out.placeholder(node.name)
            self._made[node].meta.update(node.meta)

    def module(self, runs: list[_Run]) -> fx.GraphModule:
        for run in runs:
            for node in run.nodes:
                self._made[node] = self._copy(node)
            for node in run.nodes if run.replays else ():
                if self._split.value_of.get(node) not in run.stays:
                    del self._made[node]
            if run.forgets is not None and self._split.graph.is_forward_value[run.forgets]:
                self._made.pop(self._split.nodes[run.forgets], None)
        (output,) = self._split.backward.graph.find_nodes(op="output")
        results = tuple(self._read(n) if isinstance(n, Node) else n for n in output.args[0])
        made = self._out.output(results)
        made.meta.update(output.meta)
        module = fx.GraphModule(self._split.backward, self._out)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def _copy(self, node: Node) -> Node:
        made = self._out.node_copy(node, self._read)
        made.meta["autograd_backward"] = True
        mark_planned(made)
        return made

    def _read(self, node: Node) -> Node:
        """Return what ``node`` is in the new graph; views, and what is made from nothing, are made here."""
        if node in self._made:
            return self._made[node]
        if node.graph is self._split.backward.graph and node.op == "placeholder":
            return self._read(self._forward_node[node.name])
        if node.op == "get_attr":
            self._made[node] = self._copy(node)
            return self._made[node]
        if not is_inlined(node):
            raise ScheduleError(f"{node.name} is read in the backward, and is neither saved nor replayed", where="lowering")
        return self._copy(node)
