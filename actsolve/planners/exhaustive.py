"""The best schedule of a small general graph, and its proof: every need before every first run, the cheapest first.

Going backwards (`backwards`), what is needed before a run follows from what is needed after it. So a state is which node runs
first next, and the need before it; only which values are made again is to be chosen. Dijkstra's algorithm over these states
ends with the least time of all schedules, or with the proof that there is none. Until then no schedule takes less than the
state that is looked at.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from actsolve.planners.from_nothing import FromNothing, bits

State = tuple[int, int]  # how many nodes have run first, and the need after them


@dataclass(frozen=True)
class Searched:
    """What was found.

    Attributes:
        runs: The best schedule; None if there is none, or it was not reached.
        bound: No schedule takes less time of replays.
        proven: Whether the search has ended: then ``runs`` is the best, or there is none.
    """

    runs: tuple[int, ...] | None
    bound: float
    proven: bool


def exhaustive(nothing: FromNothing, limit: int, deadline: float) -> Searched:
    """Search all schedules, the cheapest first.

    Args:
        nothing: The graph, within its budget.
        limit: Of states that are looked at.
        deadline: When to give up, in seconds of `time.perf_counter`.
    """
    end: State = (nothing.dag.n_nodes, 0)
    cost: dict[State, float] = {end: 0.0}
    came: dict[State, tuple[int, State]] = {}  # state -> the next run, and the state after that
    queue: list[tuple[float, State]] = [(0.0, end)]
    bound = 0.0
    while queue and limit and time.perf_counter() < deadline:
        bound, state = heapq.heappop(queue)
        if bound > cost[state]:
            continue
        limit -= 1
        if state[0] == 0:
            return Searched(_runs(came, state), bound, proven=True)
        for longer, u, before in _moves(nothing, *state):
            if bound + longer < cost.get(before, math.inf):
                cost[before] = bound + longer
                came[before] = u, state
                heapq.heappush(queue, (bound + longer, before))
    return Searched(None, bound, proven=not queue)


def _moves(nothing: FromNothing, firsts: int, need: int) -> Iterator[tuple[float, int, State]]:
    """Yield (time, run, state before it) for what may run last of all that makes ``need``."""
    for u in (firsts - 1, *bits(need)):
        there = need | 1 << u | nothing.reads[u]
        if nothing.size(there) > nothing.dag.budget_bytes:
            continue
        if u == firsts - 1:
            yield 0.0, u, (u, there & ~(1 << u))
        if need >> u & 1:
            yield nothing.dag.time[u], u, (firsts, there & ~(1 << u))


def _runs(came: dict[State, tuple[int, State]], state: State) -> tuple[int, ...]:
    runs = []
    while state in came:
        u, state = came[state]
        runs.append(u)
    return tuple(runs)
