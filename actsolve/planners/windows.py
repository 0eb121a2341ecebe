"""Which forward ops may be replayed, when, and which values are worth a decision: what the rows of the MILP rest on.

All of it is static: it follows from the graph and the width of the windows alone. Positions are op indices of backward
ops. What is removed here is removed without loss, but for what falls outside the windows.
"""

from __future__ import annotations

from dataclasses import dataclass

from actsolve.graph import Graph
from actsolve.problem import Problem


@dataclass(frozen=True)
class Windows:
    """What may be replayed when.

    Attributes:
        graph: The training step.
        demands: Per replayable op that can be needed: the positions, ascending, at which it can first be demanded.
            A demand-driven replay happens at one of these. The last is DESIGN's late_f.
        readers: Per value: the ops in `demands` whose replay reads it, ascending; only for decidable values.
        must_keep: Decidable values without which no plan works.
        never_keep: Decidable values that another one beats at no more memory and no more time.
        whole: Whether no window cut anything off: the rows then admit every plan that replays an op at most once.
    """

    graph: Graph
    demands: dict[int, tuple[int, ...]]
    readers: dict[int, tuple[int, ...]]
    must_keep: frozenset[int]
    never_keep: frozenset[int]
    whole: bool

    @property
    def n_demands(self) -> int:
        """Demands over all ops: how large the model will be."""
        return sum(map(len, self.demands.values()))

    def last_direct(self, value: int) -> int:
        """Position of the last backward op that reads ``value``; -1 if none does."""
        reads = self.graph.backward_readers[value]
        return reads[-1] if reads else -1

    def last_replay(self, value: int) -> int:
        """The last position at which a replay may read ``value``; -1 if none does."""
        return max((self.demands[u][-1] for u in self.readers.get(value, ())), default=-1)


def windows(problem: Problem, width: int | None = None) -> Windows:
    """Return what may be replayed when.

    Args:
        problem: What is planned for; its pins are honoured.
        width: How many backward ops before its latest position an op may be replayed; None for no limit.
    """
    graph = problem.graph
    decidable = set(graph.decidable)
    must_keep = set(problem.pinned_keep)
    demands: dict[int, tuple[int, ...]] = {}
    readers: dict[int, list[int]] = {v: [] for v in decidable}
    whole = True
    for f in range(graph.n_forward - 1, -1, -1):
        op = graph.ops[f]
        wanted: set[int] = set()
        for v in op.outputs:
            if v not in decidable or v in must_keep:
                continue
            direct = graph.backward_readers[v]
            if direct and not op.replayable:
                if v not in problem.offloadable:  # or it may be on the host meanwhile
                    must_keep.add(v)
                continue
            wanted.update(direct[:1])
            for reader in readers[v]:
                wanted.update(demands[reader])
        if not op.replayable or not wanted:
            continue
        positions = sorted(wanted)
        if width is not None and positions[0] < positions[-1] - width:
            positions = [p for p in positions if p >= positions[-1] - width]
            whole = False
        demands[f] = tuple(positions)
        for v in (*op.inputs, *op.replay_inputs):
            if v in decidable:
                readers[v].append(f)
    ordered = {v: tuple(reversed(found)) for v, found in readers.items()}
    never = _never_keep(problem, ordered, must_keep)
    return Windows(graph, demands, ordered, frozenset(must_keep), never, whole)


def _never_keep(problem: Problem, readers: dict[int, tuple[int, ...]], must_keep: set[int]) -> frozenset[int]:
    """Values that serve one replay only, of an op whose one output is no larger: keep that output instead.

    Both are live at the op in the forward and around its replay in the backward, and in between the output takes no
    more room; keeping it saves the replay. Not so if something else reads the value later in the forward: then it is
    live there anyway.
    """
    graph = problem.graph
    decidable = set(graph.decidable)
    updated = {new for new, _ in graph.updates}
    never = set(problem.pinned_recompute)
    for v in graph.decidable:
        if v in must_keep or v in updated or graph.backward_readers[v]:
            continue
        if not readers[v]:
            never.add(v)
            continue
        if len(readers[v]) > 1 or graph.forward_readers[v] != readers[v]:
            continue
        outputs = [w for w in graph.ops[readers[v][0]].outputs if w in decidable]
        if len(outputs) != 1 or outputs[0] in problem.pinned_recompute:
            continue
        if graph.values[outputs[0]].size_bytes <= graph.values[v].size_bytes:
            never.add(v)
    return frozenset(never)
