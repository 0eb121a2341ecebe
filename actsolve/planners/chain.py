"""The forward as a chain of stages, for the planners that know only chains.

A stage ends where at most one value is still to be read in the forward. What is read much later (masks, rotary tables, skip
connections) would leave no such place: it is kept throughout, and so is what must not be replayed. How late is too late is
chosen so that what is kept, and the largest stage, take the least memory together.

The backward of a stage begins at the first backward op that reads what that stage, or none after it, has made. What comes in at
the border of two stages belongs to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from actsolve.graph import Graph
from actsolve.problem import Problem

MAX_STAGES = 150
Event = tuple[bool, int]  # (forward, stage): a stage is run forward, or its backward begins


@dataclass(frozen=True)
class Chain:
    """Stages of the forward.

    Attributes:
        graph: One training step.
        cuts: Where stages begin, and the number of forward ops.
        kept: Forward values that no stage has to make again.
    """

    graph: Graph
    cuts: tuple[int, ...]
    kept: frozenset[int]

    @property
    def n_stages(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The forward ops of each stage."""
        return tuple(range(begin, end) for begin, end in zip(self.cuts, self.cuts[1:], strict=False))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Per forward op: its stage."""
        return tuple(k for k, stage in enumerate(self.stages) for _ in stage)

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Per stage: the values that it makes and that are not kept throughout."""
        ops = self.graph.ops
        return tuple(tuple(v for op in stage for v in ops[op].outputs if v not in self.kept) for stage in self.stages)

    def leaves(self, value: int) -> bool:
        """Whether a value is read in the forward of a later stage than the one that makes it."""
        producer, readers = self.graph.values[value].producer, self.graph.forward_readers[value]
        assert producer is not None
        return bool(readers) and self.stage_of[readers[-1]] > self.stage_of[producer]

    @cached_property
    def backward_stage(self) -> tuple[int, ...]:
        """Per backward op: the stage whose backward it is part of; never rises."""
        found = []
        current = self.n_stages - 1
        for op in self.graph.ops[self.graph.n_forward :]:
            for value in op.inputs:
                producer = self.graph.values[value].producer
                if self.graph.is_forward_value[value] and value not in self.kept and producer is not None:
                    current = min(current, self.stage_of[producer] + self.leaves(value))
            found.append(current)
        return tuple(found)

    def replays(self, events: Sequence[Event]) -> dict[int, tuple[int, ...]]:
        """Return what is replayed before which backward op: the runs of stages but their first, as far as they are read."""
        starts: dict[int, int] = {}
        for position, stage in enumerate(self.backward_stage):
            starts.setdefault(stage, self.graph.n_forward + position)
        wanted: dict[int, list[int]] = {}
        waiting: list[int] = []
        seen: set[int] = set()
        for forward, stage in events:
            if forward and stage in seen:
                waiting += [op for op in self.stages[stage] if self.graph.ops[op].replayable]
            elif forward:
                seen.add(stage)
            elif stage in starts:
                wanted[starts[stage]] = waiting
                waiting = []
        return read_replays(self.graph, wanted, self.kept)


def read_replays(graph: Graph, wanted: dict[int, list[int]], kept: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Return ``wanted`` (per backward op, forward ops to replay before it) without the replays of which nothing is read."""
    read: set[int] = set()
    found: dict[int, tuple[int, ...]] = {}
    for index in range(len(graph.ops) - 1, graph.n_forward - 1, -1):
        read.update(graph.ops[index].inputs)
        ops = []
        for replayed in reversed(wanted.get(index, ())):
            op = graph.ops[replayed]
            if any(v in read and v not in kept for v in op.outputs):
                read.difference_update(op.outputs)
                read.update(op.inputs, op.replay_inputs)
                ops.append(replayed)
        if ops:
            found[index] = tuple(reversed(ops))
    return dict(reversed(found.items()))


def chain_of(problem: Problem, *, last_apart: bool = True) -> Chain:
    """Return the forward cut into at most `MAX_STAGES` stages; a single one where it is no chain.

    Args:
        problem: What is planned for.
        last_apart: Whether the last ops are a stage even where the backward reads nothing that they make: what comes into it can
            then be dropped during its backward. Who counts stages, and not what they take, is better off without.
    """
    found = _saving(min(_chains(problem.graph), key=_least_bytes), last_apart=last_apart)
    return _merged(found, problem.costs.replay_seconds)


def _chains(graph: Graph) -> Iterator[Chain]:
    """The chains that come of each idea of what is read too late."""
    fixed = frozenset(v for op in graph.ops[: graph.n_forward] for v in op.outputs if v in graph.held or not op.replayable)
    late = {}
    for value, readers in enumerate(graph.forward_readers):
        producer = graph.values[value].producer
        if producer is not None and readers and value not in fixed:
            late[value] = readers[-1] - producer
    longest = graph.n_forward
    while longest > 1:
        kept = fixed | {v for v, length in late.items() if length > longest}
        yield Chain(graph, _cuts(graph, kept), kept)
        longest //= 2
    yield Chain(graph, (0, graph.n_forward), fixed)


def _cuts(graph: Graph, kept: frozenset[int]) -> tuple[int, ...]:
    """Where at most one value that is not kept is still to be read."""
    crossing = [0] * (graph.n_forward + 1)  # differences
    for value, readers in enumerate(graph.forward_readers):
        producer = graph.values[value].producer
        if producer is not None and readers and value not in kept:
            crossing[producer + 1] += 1
            crossing[readers[-1] + 1] -= 1
    cuts, current = [0], crossing[0]
    for op in range(1, graph.n_forward):
        current += crossing[op]
        if current <= 1 and not graph.ops[op - 1].optional:  # an RNG state stays with its op
            cuts.append(op)
    return (*cuts, graph.n_forward)


def _least_bytes(chain: Chain) -> int:
    graph, decidable = chain.graph, set(chain.graph.decidable)
    kept = sum(graph.values[v].size_bytes for v in chain.kept if v in decidable)
    stages = (sum(graph.values[v].size_bytes for v in made if graph.backward_readers[v]) for made in chain.made)
    return kept + max(stages, default=0)


def _saving(chain: Chain, *, last_apart: bool) -> Chain:
    """Join each stage of which the backward reads nothing to the next one: between the two there is nothing to be gained."""
    readers, ops = chain.graph.backward_readers, chain.graph.ops
    cuts = [0]
    for stage, end in zip(chain.stages, chain.cuts[1:], strict=True):
        if any(readers[v] for op in stage for v in ops[op].outputs):
            cuts.append(end)
    if cuts[-1] < chain.graph.n_forward:
        cuts = [*(cuts if last_apart or len(cuts) == 1 else cuts[:-1]), chain.graph.n_forward]
    return Chain(chain.graph, tuple(cuts), chain.kept)


def _merged(chain: Chain, seconds: tuple[float, ...]) -> Chain:
    """Leave out cuts between short stages until there are few enough."""
    cuts = list(chain.cuts)
    while (excess := len(cuts) - 1 - MAX_STAGES) > 0:
        lengths = {cut: sum(seconds[before:after]) for before, cut, after in zip(cuts, cuts[1:], cuts[2:], strict=False)}
        index = {cut: k for k, cut in enumerate(cuts)}
        dropped: set[int] = set()  # no two neighbours at once, so that lengths stay true
        for cut in sorted(lengths, key=lambda cut: lengths[cut])[:excess]:
            if not {cuts[index[cut] - 1], cuts[index[cut] + 1]} & dropped:
                dropped.add(cut)
        cuts = [cut for cut in cuts if cut not in dropped]
    return Chain(chain.graph, tuple(cuts), chain.kept)
