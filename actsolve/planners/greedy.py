"""Evict what costs least per byte and second, whenever memory runs out; replay what is missing, when it is read.

Source:
    Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021 (DTR), with its heuristic h_DTR-eq: the cost of a value and of
    the evicted values around it (by union-find), over its bytes and the time since it was used last. It decides while the
    program runs and knows nothing of what will follow. We let it run once over the simulated step; what it replays
    is the plan. In our schedules no op is replayed during the forward, so there it evicts only what no later forward
    op reads. It sees memory a little larger than it is, so a few limits above the budget are tried too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from actsolve.graph import Graph, Kind
from actsolve.plan import Plan, Status
from actsolve.planners.best import best_of
from actsolve.planners.keep_all import pins_note
from actsolve.planners.options import PlannerOptions
from actsolve.problem import Problem
from actsolve.replays import saved_by

_LIMITS = (1.0, 1.01, 1.03, 1.06, 1.1)  # of the budget above what is static
_THRASHING = 10  # replays per forward op


class _Thrashing(Exception):
    """It replays more than anyone would wait for."""


def greedy(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the fastest of its plans that fits, else the one of lowest peak."""
    plans = []
    for share in _LIMITS:
        run = _Run(problem, int(share * problem.dynamic_budget_bytes))
        try:
            replays = run.whole_step()
        except _Thrashing:
            continue
        plans.append(Plan("greedy", saved_by(problem.graph, replays), replays=replays, note=pins_note(problem)))
    return best_of(problem, plans) or Plan("greedy", status=Status.UNKNOWN, note="it thrashes: too many replays")


@dataclass
class _Evicted:
    """Which evicted values hang together, and what they cost to make again. Taking one out leaves the others joined (DTR-eq)."""

    parent: dict[int, int] = field(default_factory=dict)
    cost: dict[int, float] = field(default_factory=dict)

    def root(self, value: int) -> int:
        while self.parent[value] != value:
            self.parent[value] = self.parent[self.parent[value]]
            value = self.parent[value]
        return value

    def join(self, one: int, other: int) -> None:
        a, b = self.root(one), self.root(other)
        if a != b:
            self.parent[a] = b
            self.cost[b] += self.cost.pop(a)


class _Run:
    """The training step as a program that DTR watches."""

    def __init__(self, problem: Problem, room_bytes: int) -> None:
        self.problem, self.graph, self.room = problem, problem.graph, room_bytes
        self.sizes = [v.size_bytes for v in self.graph.values]
        self.live: set[int] = set()
        self.current = 0
        self.now_s = 0.0
        self.used_s: dict[int, float] = {}
        self.evicted = _Evicted()
        self.missing: set[int] = set()  # made, and evicted since
        self.replays: dict[int, list[int]] = {}
        self.n_replays = 0
        self.position = 0
        self.around = _neighbours(self.graph)
        self.decidable = frozenset(self.graph.decidable)

    def whole_step(self) -> dict[int, tuple[int, ...]]:
        graph = self.graph
        for index, op in enumerate(graph.ops):
            self.position = index
            if index == graph.n_forward:
                self.current += graph.given_bytes(Kind.TANGENT)
            if op.optional and self.decidable.isdisjoint(op.outputs):
                continue
            locks = Counter(op.inputs)
            self._make([v for v in op.inputs if v in self.missing], locks)
            self._run(index, locks)
            self._drop_unread((*op.inputs, *op.outputs))
        return {index: tuple(ops) for index, ops in self.replays.items()}

    def _make(self, values: list[int], locks: Counter[int]) -> None:
        """Replay what it takes for ``values`` to be live together; what is read meanwhile is locked."""
        stack = values[::-1]
        entered: set[int] = set()
        while stack:
            value = stack[-1]
            if value in self.live:
                stack.pop()
                continue
            producer = self.graph.values[value].producer
            assert producer is not None
            op = self.graph.ops[producer]
            reads = [v for v in (*op.inputs, *op.replay_inputs) if self.graph.is_forward_value[v]]
            if value not in entered:
                entered.add(value)
                locks.update(reads)
            absent = [v for v in reads if v not in self.live]
            if absent:
                stack += reversed(absent)
                continue
            self.n_replays += 1
            if self.n_replays > _THRASHING * self.graph.n_forward:
                raise _Thrashing
            self.replays.setdefault(self.position, []).append(producer)
            self._run(producer, locks, replay=True)
            entered.discard(value)
            locks.subtract(reads)
            self._drop_unread([v for v in (*reads, *op.outputs) if locks[v] <= 0])

    def _run(self, index: int, locks: Counter[int], *, replay: bool = False) -> None:
        op, costs = self.graph.ops[index], self.problem.costs
        made = sum(self.sizes[v] for v in op.outputs)
        at_once = 0
        if op.in_place is not None and not replay and not self._read_later(op.in_place[0]):
            at_once = self.sizes[op.in_place[0]]
        self._evict_until(made - at_once + costs.workspace_bytes[index], locks)
        for value in op.outputs:
            if value not in self.live:
                self.live.add(value)
                self.current += self.sizes[value]
            if value in self.missing:
                self.missing.discard(value)
                self.evicted.cost[self.evicted.root(value)] -= self._cost_s(value)
        self.now_s += costs.replay_seconds[index] if replay else costs.seconds[index]
        self.used_s.update((v, self.now_s) for v in (*op.inputs, *op.outputs))

    def _evict_until(self, wanted_bytes: int, locks: Counter[int]) -> None:
        """Evict until ``wanted_bytes`` more fit, or nothing can be evicted: then the budget is exceeded."""
        while self.current + wanted_bytes > self.room:
            candidates = [v for v in self.live if locks[v] <= 0 and self._can_go(v)]
            if not candidates:
                return
            self._evict(min(candidates, key=lambda v: (self._worth(v), v)))

    def _can_go(self, value: int) -> bool:
        graph, producer = self.graph, self.graph.values[value].producer
        if value in graph.held or not graph.is_forward_value[value] or self.sizes[value] == 0 or producer is None:
            return False
        readers = graph.forward_readers[value]
        return graph.ops[producer].replayable and not (readers and readers[-1] > self.position)

    def _worth(self, value: int) -> float:
        """h_DTR-eq."""
        near = {self.evicted.root(v) for v in self.around[value] if v in self.missing}
        cost = self._cost_s(value) + sum(self.evicted.cost[r] for r in near)
        stale = self.now_s - self.used_s[value] + 1e-9
        return cost / (self.sizes[value] * stale)

    def _cost_s(self, value: int) -> float:
        producer = self.graph.values[value].producer
        assert producer is not None
        return self.problem.costs.replay_seconds[producer]

    def _evict(self, value: int) -> None:
        self.live.discard(value)
        self.current -= self.sizes[value]
        if not self.graph.is_forward_value[value]:
            return
        self.missing.add(value)
        self.evicted.parent[value] = value
        self.evicted.cost[value] = self._cost_s(value)
        for v in self.around[value]:
            if v in self.missing:
                self.evicted.join(value, v)

    def _drop_unread(self, values: Sequence[int]) -> None:
        """Drop what no op of the program reads any more, if a replay could make it again."""
        for value in values:
            if value in self.live and value not in self.graph.held and not self._read_later(value):
                producer = self.graph.values[value].producer
                forward = self.graph.is_forward_value[value]
                again = producer is not None and self.graph.ops[producer].replayable
                if not forward or again or value not in self.decidable:
                    self._evict(value)

    def _read_later(self, value: int) -> bool:
        graph = self.graph
        readers = graph.backward_readers[value] or graph.forward_readers[value]
        return value in graph.held or (bool(readers) and readers[-1] > self.position)


def _neighbours(graph: Graph) -> list[list[int]]:
    """Per forward value: what its op reads, and what is made from it."""
    around: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops[: graph.n_forward]:
        for made in op.outputs:
            for read in op.inputs:
                if graph.is_forward_value[read]:
                    around[made].append(read)
                    around[read].append(made)
    return around
