"""Brute force: of *all* schedules of a training step with its order of first runs, the cheapest that fits.

Dijkstra over what there is between two runs: which first run is next, what is live, and which of that the forward has left to
the backward, for that is not overwritten. Before a run any live copies can be dropped, which costs nothing; a replay costs its
seconds. Only graphs of a dozen ops or so can be looked at like this.

Nothing is shared with the planners, with what makes schedules of plans, or with the simulator: only the data of `Graph` and
`Problem` are read. Two things keep the search small, and neither leaves out what could be better:

- a copy that nothing can read any more is dropped at once; one that the next run remakes, just before it;
- other copies are dropped only where a run would not fit, and no more of them than it takes: they can still be dropped later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from actsolve.graph import Graph, Kind
from actsolve.problem import Problem


@dataclass(frozen=True)
class Rules:
    """Which schedules are looked at.

    Attributes:
        forward_replays: Forward ops are replayed in the forward, too.
        once: No op is replayed twice between two first runs.
        ordered: Nor does one come after a later one there.
        in_place: Ops work in place where they can.
    """

    forward_replays: bool = False
    once: bool = False
    ordered: bool = False
    in_place: bool = True


BACKWARD_ONLY = Rules()
ANYWHERE = Rules(forward_replays=True)  # what the checker admits


@dataclass(frozen=True, slots=True)
class Action:
    """One thing done: a first run or a replay of an op, or the end of a value's copy.

    Attributes:
        op: What runs; None where a copy ends.
        value: Whose copy ends; None where an op runs.
        again: The run is a replay.
        in_place: It overwrites its input.
    """

    op: int | None = None
    value: int | None = None
    again: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Cheapest:
    """A schedule that costs least.

    Attributes:
        extra_s: What its replays take.
        peak_bytes: The most memory that it takes at any moment.
        actions: What it does.
        forward_replays: How many of its replays come before the end of the forward.
    """

    extra_s: float
    peak_bytes: int
    actions: tuple[Action, ...]
    forward_replays: int


def cheapest(problem: Problem, rules: Rules = BACKWARD_ONLY) -> Cheapest | None:
    """Return a schedule of least extra time within the budget of ``problem``, or None if none fits."""
    return _Search(problem, rules).run()


def least_budget(problem: Problem, rules: Rules = BACKWARD_ONLY) -> int:
    """Return the least budget that a schedule fits."""
    low, high = 0, problem.static_bytes + problem.optimizer_bytes + _all_bytes(problem)
    while low < high:
        middle = (low + high) // 2
        if _Search(replace(problem, budget_bytes=middle), rules, free=True).run() is None:
            low = middle + 1
        else:
            high = middle
    return low


def _all_bytes(problem: Problem) -> int:
    """More than any moment takes, static bytes aside."""
    return 2 * sum(v.size_bytes for v in problem.graph.values) + sum(problem.costs.workspace_bytes)


State = tuple[int, int, int, int]  # next first run, live values, those that the forward left, replays since the last first run
Came = dict[State, tuple[State, tuple[Action, ...], int]]  # where from, what is done on the way, the memory meanwhile


class _Search:
    """Sets of values are bit masks."""

    def __init__(self, problem: Problem, rules: Rules, *, free: bool = False) -> None:
        """``free``: replays cost nothing, for it is only asked whether anything fits."""
        graph = problem.graph
        self.graph, self.rules, self.budget = graph, rules, problem.budget_bytes
        self.ops = graph.ops
        self.n_forward = sum(op.phase.value == "forward" for op in graph.ops)
        self.sizes = [v.size_bytes for v in graph.values]
        self.workspace = problem.costs.workspace_bytes
        self.seconds = (0.0,) * len(graph.ops) if free else problem.costs.replay_seconds
        self.static, self.optimizer = problem.static_bytes, problem.optimizer_bytes
        self.tangents = sum(v.size_bytes for v in graph.values if v.kind is Kind.TANGENT)
        made = _mask(i for i, v in enumerate(graph.values) if v.kind is Kind.ACTIVATION)
        self.held = _mask((*graph.outputs, *graph.gradients)) & made
        self.new = _mask(new for new, _ in graph.updates) & made  # until the end of the forward
        self.reads = [_mask(op.inputs) & made for op in graph.ops]
        self.rereads = [_mask((*op.inputs, *op.replay_inputs)) & made for op in graph.ops]
        self.makes = [_mask(op.outputs) for op in graph.ops]
        self.useful = [self._useful(k) for k in range(len(graph.ops) + 1)]
        self.overwritable = self._overwritable(graph)
        self._bytes: dict[int, int] = {}

    def _useful(self, k: int) -> int:
        """Values that can be read when op ``k`` is the next to run first, by first runs and by the replays that these need."""
        found = self.new if k < self.n_forward else 0
        for reads in self.reads[k:]:
            found |= reads
        for index in range(self.n_forward - 1, -1, -1):
            if self.ops[index].replayable and self.makes[index] & found:
                found |= self.rereads[index]
        return found

    def _overwritable(self, graph: Graph) -> int:
        """Values that a run in the backward could overwrite: of others it is of no account who made them."""
        runs = (op for i, op in enumerate(graph.ops) if i >= self.n_forward or op.replayable)
        return _mask(op.in_place[0] for op in runs if op.in_place is not None)

    def bytes_of(self, values: int) -> int:
        if values not in self._bytes:
            self._bytes[values] = sum(self.sizes[v] for v in _members(values))
        return self._bytes[values]

    def run(self) -> Cheapest | None:
        """Return the cheapest schedule that fits."""
        end = len(self.ops)
        at_end = self.static + self.bytes_of(self.held) + self.optimizer
        if max(self.static, at_end) > self.budget:
            return None
        start: State = (0, 0, 0, 0)
        cost: dict[State, float] = {start: 0.0}
        came: Came = {}
        number = count()
        queue: list[tuple[float, int, int, State]] = [(0.0, 0, 0, start)]
        done: set[State] = set()
        while queue:
            spent, _, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state[0] == end:
                return self._result(spent, state, came, max(self.static, at_end))
            for new, seconds, actions, bytes_ in self._runs(state):
                if new not in done and spent + seconds < cost.get(new, float("inf")):
                    cost[new] = spent + seconds
                    came[new] = state, actions, bytes_
                    heapq.heappush(queue, (cost[new], -new[0], next(number), new))
        return None

    def _result(self, spent: float, state: State, came: Came, peak: int) -> Cheapest:
        actions: list[tuple[Action, ...]] = [_drops(state[1] & ~self.held)]
        forward_replays = 0
        while state in came:
            state, done, bytes_ = came[state]
            forward_replays += state[0] < self.n_forward and any(a.again for a in done)
            actions.append(done)
            peak = max(peak, bytes_)
        return Cheapest(spent, peak, tuple(a for done in reversed(actions) for a in done), forward_replays)

    def _runs(self, state: State) -> Iterator[tuple[State, float, tuple[Action, ...], int]]:
        """Yield, for each run that can be next: the state after it, what it costs, what is done, the memory meanwhile."""
        k, live, left, before = state
        if self.ops[k].optional:
            yield self._after(k + 1, live, left, before), 0.0, self._ended(live, k + 1), 0
        for drops, new, in_place, bytes_ in self._ways(state, k, again=False):
            told = (*_drops(drops), Action(op=k, in_place=in_place), *self._ended(new, k + 1))
            yield self._done(state, k, new, again=False), 0.0, told, bytes_
        if k < self.n_forward and not self.rules.forward_replays:
            return
        for index in range(min(k, self.n_forward)):
            makes = self.makes[index]
            if not self.ops[index].replayable or not makes & self.useful[k] or not self._allowed(index, before):
                continue
            if not makes & ~live and not makes & left:  # all there, and no better remade
                continue
            for drops, new, in_place, bytes_ in self._ways(state, index, again=True):
                told = (*_drops(drops), Action(op=index, again=True, in_place=in_place), *self._ended(new, k))
                yield self._done(state, index, new, again=True), self.seconds[index], told, bytes_

    def _allowed(self, index: int, before: int) -> bool:
        if self.rules.ordered:
            return index >= before
        return not (self.rules.once and before >> index & 1)

    def _ways(self, state: State, index: int, *, again: bool) -> Iterator[tuple[int, int, bool, int]]:
        """Yield (dropped before, live after, in place, memory meanwhile) for each way to run op ``index`` next."""
        k, live, left, _ = state
        op, makes = self.ops[index], self.makes[index]
        reads = self.rereads[index] if again else self.reads[index]
        if reads & ~live:
            return
        backward = k >= self.n_forward
        stays = self.held | (0 if backward else self.new)
        remade = live & makes & ~stays
        live &= ~remade
        taken = self.static + (self.tangents if backward else 0) + self.bytes_of(makes) + self.workspace[index]
        droppable = live & ~reads & ~stays
        for drops, bytes_ in self._fitting(taken, live, droppable):
            yield drops | remade, live & ~drops | makes, False, bytes_
        if op.in_place is None or not self.rules.in_place:
            return
        source, target = (1 << v for v in op.in_place)
        if source & stays or not source & live or target & live or (backward and source & left):
            return
        live &= ~source
        for drops, bytes_ in self._fitting(taken, live, droppable & ~source):
            yield drops | remade, live & ~drops | makes, True, bytes_

    def _fitting(self, taken: int, live: int, droppable: int) -> Iterator[tuple[int, int]]:
        """Yield the least sets to be dropped such that what is left of ``live`` fits beside ``taken``; and the memory then."""
        memory = taken + self.bytes_of(live)
        over = memory - self.budget
        if over <= 0:
            yield 0, memory
            return
        largest_first = sorted((v for v in _members(droppable) if self.sizes[v]), key=lambda v: -self.sizes[v])

        def sets(start: int, chosen: int, freed: int) -> Iterator[tuple[int, int]]:
            if freed >= over:  # without the last one, the smallest, it was not
                yield chosen, memory - freed
                return
            for place in range(start, len(largest_first)):
                v = largest_first[place]
                yield from sets(place + 1, chosen | 1 << v, freed + self.sizes[v])

        yield from sets(0, 0, 0)

    def _done(self, state: State, index: int, live: int, *, again: bool) -> State:
        """The state after a run, after which ``live`` is there."""
        k, _, left, before = state
        left &= ~self.makes[index]
        if k < self.n_forward:
            left |= self.makes[index]
        if not again:
            return self._after(k + 1, live, left, 0)
        if self.rules.ordered:
            before = index + 1
        elif self.rules.once:
            before |= 1 << index
        return self._after(k, live, left, before)

    def _after(self, k: int, live: int, left: int, before: int) -> State:
        live &= self.held | self.useful[k]
        return k, live, left & live & self.overwritable, before

    def _ended(self, live: int, k: int) -> tuple[Action, ...]:
        """The ends of copies that nothing reads any more when op ``k`` is the next to run first."""
        return _drops(live & ~(self.held | self.useful[k]))


def _drops(values: int) -> tuple[Action, ...]:
    return tuple(Action(value=v) for v in _members(values))


def _mask(values: Iterable[int]) -> int:
    found = 0
    for v in values:
        found |= 1 << v
    return found


def _members(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low
