"""Nodes in a fixed order, of which any may run again, any number of times: what the planner with a global bound works on.

A node reads values and makes values. The first runs come in the given order. A copy of a value is live from the run that makes it
to the last run that reads that copy; a run reads the latest. Memory during a run is what is resident anyway, what is live, the
outputs of the run and its workspace. A general graph (`dag_file`) is such nodes with one value each. A training graph is one in
which only forward ops run again: after the forward, or anywhere (`dag_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actsolve.graph import Kind
from actsolve.problem import Problem


@dataclass(frozen=True)
class Dag:
    """Nodes in execution order, and a budget.

    Attributes:
        sizes: Bytes per value.
        reads: Per node, the values that its first run reads, each made by an earlier node.
        makes: Per node, the values that it makes.
        time: Per node, what one more run takes, in any unit.
        budget_bytes: Hard cap on the memory during every run.
        replayable: Per node, whether it may run again.
        replay_from: No node runs again before this one is next to run first.
        n_forward: How many nodes are the forward's: what they leave, made first or again, is not overwritten later.
        replay_reads: Per node, the values that a later run of it reads.
        workspace: Per node, bytes that it takes beyond its outputs; less than 0 if these do not count while it runs.
        resident: Per node, bytes that are there anyway during its first run, and while others run again just before it.
        held: Values that stay from their first making to the end.
        stays: Values that stay from their first making to the end of the forward.
        in_place: Per node, an input and an output of equal size that can share their memory where the input ends there.
        names: Per node, for messages.
    """

    sizes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    time: tuple[float, ...]
    budget_bytes: int
    replayable: tuple[bool, ...]
    replay_from: int
    n_forward: int
    replay_reads: tuple[tuple[int, ...], ...]
    workspace: tuple[int, ...]
    resident: tuple[int, ...]
    held: frozenset[int]
    stays: frozenset[int]
    in_place: tuple[tuple[int, int] | None, ...]
    names: tuple[str, ...]

    @property
    def n_nodes(self) -> int:
        return len(self.makes)

    @property
    def replays_in_forward(self) -> bool:
        """Whether nodes of the forward may run again before it ends."""
        return self.replay_from < self.n_forward

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """Per value, the node that makes it."""
        makers = [0] * len(self.sizes)
        for node, values in enumerate(self.makes):
            for value in values:
                makers[value] = node
        return tuple(makers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per value, the nodes whose first run reads it, ascending."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for node, values in enumerate(self.reads):
            for value in values:
                found[value].append(node)
        return tuple(map(tuple, found))

    def needs(self, node: int) -> int:
        """Bytes that the first run of ``node`` takes whatever else is live."""
        reads = self.reads[node]
        held = sum(self.sizes[v] for v in self.held if self.maker[v] < node and v not in reads) if self.held else 0
        outputs = sum(self.sizes[v] for v in self.makes[node])
        shared = self.in_place[node]
        saved = self.sizes[shared[1]] if shared is not None else 0
        return self.resident[node] + sum(self.sizes[v] for v in reads) + held + outputs + self.workspace[node] - saved


def general_dag(sizes: tuple[int, ...], reads: tuple[tuple[int, ...], ...], time: tuple[float, ...], budget_bytes: int) -> Dag:
    """Return nodes that make one value each; all may run again at any time."""
    n = len(sizes)
    return Dag(
        sizes=sizes,
        reads=reads,
        makes=tuple((i,) for i in range(n)),
        time=time,
        budget_bytes=budget_bytes,
        replayable=(True,) * n,
        replay_from=0,
        n_forward=0,
        replay_reads=reads,
        workspace=(0,) * n,
        resident=(0,) * n,
        held=frozenset(),
        stays=frozenset(),
        in_place=(None,) * n,
        names=tuple(f"node {i}" for i in range(n)),
    )


def dag_of(problem: Problem, *, anywhere: bool = False) -> Dag:
    """Return a training step as nodes. Values are numbered as in its graph; given ones are nobody's to make, and never read.

    What is copied into a buffer is read by the last forward op, so that it is there until then. An RNG state is made where a plan
    may not want it; that takes no time, and its bytes count only if it is read, from the next run on.

    Args:
        problem: The step.
        anywhere: Whether forward ops run again in the forward, too. That makes the program over segments about twice as large.
    """
    graph, n_forward = problem.graph, problem.graph.n_forward
    made = {v for op in graph.ops for v in op.outputs}
    reads = [tuple(v for v in op.inputs if v in made) for op in graph.ops]
    updated = frozenset(new for new, _ in graph.updates if new in made)
    if n_forward:
        late = updated.difference(graph.ops[n_forward - 1].outputs)
        reads[n_forward - 1] = tuple(dict.fromkeys((*reads[n_forward - 1], *sorted(late))))
    tangents = graph.given_bytes(Kind.TANGENT)
    return Dag(
        sizes=tuple(v.size_bytes for v in graph.values),
        reads=tuple(reads),
        makes=tuple(op.outputs for op in graph.ops),
        time=problem.costs.replay_seconds,
        budget_bytes=problem.budget_bytes,
        replayable=tuple(op.replayable for op in graph.ops),
        replay_from=0 if anywhere else n_forward,
        n_forward=n_forward,
        replay_reads=tuple(tuple(v for v in (*op.inputs, *op.replay_inputs) if v in made) for op in graph.ops),
        workspace=tuple(
            -sum(graph.values[v].size_bytes for v in op.outputs) if op.optional else bytes_
            for op, bytes_ in zip(graph.ops, problem.costs.workspace_bytes, strict=True)
        ),
        resident=tuple(problem.static_bytes + (tangents if i >= n_forward else 0) for i in range(len(graph.ops))),
        held=frozenset(v for v in graph.held if v in made),
        stays=updated,
        in_place=tuple(op.in_place for op in graph.ops),
        names=tuple(op.name for op in graph.ops),
    )
