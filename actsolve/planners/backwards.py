"""Schedules found from their end: what is needed before the last run, before the run before that, and so on, down to nothing.

A *need* is what has to be live at some time for all that comes later (`from_nothing`). Before the first run of a node it is what
is needed after it, without its value, with what it reads. Before a replay likewise; so going backwards, to run a node again means
not to keep its value since its last use. Of the needs before each first run the most promising are followed. Promising: those
that cost little so far, and that leave little over the budget, summed over the earlier first runs, if nothing more is run again.

Where none of them leads on, the budget may still be enough: a run that reads nearly all that fits wants most of its inputs made
again one after another, and on the way to that nothing is promising. There needs are followed that are only lighter.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actsolve.planners.from_nothing import FromNothing, bits
from actsolve.planners.lp import INFINITY, Array

_POPPED = 20  # times the width: as many needs are looked at before one first run
_LIGHTENED = 3  # needs that lighter ones are looked for where none leads on,
_LOOKED = 30  # each by a search among as many,
_PLACES = 10  # before the first runs of no more nodes than that in one sweep
_WIDTHS = (30, 100, 300, 1000, 3000)
_PRICES = (2.0, 8.0, 32.0)  # each was best for some graph and budget


class Sweep(NamedTuple):
    """How to search once.

    Attributes:
        width: Needs that are followed before each first run.
        price: Of a byte over the budget during all runs of the plain order, as a share of the time of all.
        longest: Where no need leads on, lighter ones are looked for: runs that may make one value for that; 0 to give up there.
        light: And the share of the budget that they may take.
    """

    width: int
    price: float
    longest: int = 0
    light: float = 1.0


_SWEEPS = [Sweep(w, p) for w in _WIDTHS for p in _PRICES]
_NARROW = 9  # of them: what they find at first is better than what is forced and then improved
FORCED = [Sweep(_WIDTHS[0], p, x, light) for p in (32.0, 2.0) for light in (0.9, 1.0, 0.8) for x in (30, 300)]


@dataclass(frozen=True, eq=False)
class Need:
    """What has to be live before the first run of some node, and what comes after.

    Attributes:
        score: Less is more promising.
        number: Of two with that score, the one that was found first is taken.
        cost: Time of the replays that come after.
        values: As bits.
        load: Bytes at each earlier first run, if nothing more runs again.
        then: The next run and the need after it; None before the last run.
    """

    score: float
    number: int
    cost: float
    values: int
    load: Array
    then: tuple[int, Need] | None

    def __lt__(self, other: Need) -> bool:
        return (self.score, self.number) < (other.score, other.number)

    def runs(self) -> Iterator[int]:
        at = self.then
        while at is not None:
            node, need = at
            yield node
            at = need.then


class Backwards:
    """Searches over one graph; each starts from the best schedule of those before."""

    def __init__(self, nothing: FromNothing) -> None:
        self.nothing, self.dag = nothing, nothing.dag
        n = self.dag.n_nodes
        self._last: list[list[int]] = []  # per node k and value: its last reader before k, or its maker
        last = list(range(n))
        for node in range(n):
            self._last.append(list(last))
            for u in self.dag.reads[node]:
                last[u] = node
        self._last.append(last)
        self._plain = np.zeros(n)  # bytes at each run of the plain order
        for value in range(n):
            self._plain[value : last[value] + 1] += self.dag.sizes[value]
        self._at = 0  # which sweep is next
        self._number = 0
        self._elite: dict[int, list[tuple[Need, int]]] = {}
        self._from: list[int] = []
        self._price = 0.0
        self._deadline = 0.0
        self.best: list[int] = []  # the best schedule that fits; none while its cost is infinite
        self.best_cost = INFINITY

    @property
    def exhausted(self) -> bool:
        return self._at >= len(_SWEEPS)

    @property
    def wide(self) -> bool:
        """Whether the next sweeps are so wide that a first schedule is better forced."""
        return self._at >= _NARROW

    def improve(self, deadline: float) -> bool:
        """Do the next sweep; return whether it gave a better schedule. Around a first one, narrow sweeps are worth it again."""
        is_first = not self.best
        better = self.sweep(_SWEEPS[self._at], deadline)
        if better and is_first:
            self._at = 1
        elif time.perf_counter() < deadline:
            self._at += 1
        return better

    def sweep(self, sweep: Sweep, deadline: float) -> bool:
        """Search once, from the end to the beginning; return whether that gave a better schedule: `best`."""
        n, self._deadline = self.dag.n_nodes, deadline
        self._price = sweep.price * sum(self.dag.time) / max(1, self.dag.budget_bytes * n)
        cost_before = self.best_cost
        self._from, self._elite = self.best, self._needs_of(self.best)
        before = {n: [Need(0.0, 0, 0.0, 0, self._plain, None)]}
        lightened: set[int] = set()
        node = n
        while node > 0 and time.perf_counter() < deadline:
            found = self._stage(before[node], node, sweep.width)
            while not found and sweep.longest and node < n and len(lightened) < _PLACES:
                if node not in lightened:
                    lightened.add(node)
                    found = self._lightened(before[node], node, sweep)
                node += not found
            if not found:
                break
            node -= 1
            before[node] = found
        if node == 0:
            self._take(before[0][0], [])
        return self.best_cost < cost_before

    def _stage(self, needs: list[Need], node: int, width: int) -> list[Need]:
        """Return the needs before the first run of the node before ``node``, given those before that of ``node``."""
        elite = self._elite.get(node, [])
        queue = [*needs, *(need for need, _ in elite)]
        found: dict[int, Need] = {}
        seen: dict[int, float] = {}
        heapq.heapify(queue)
        n_popped = n_passed = 0
        while queue and n_passed < width and n_popped < _POPPED * width:
            need = heapq.heappop(queue)
            if seen.get(need.values, INFINITY) <= need.cost:
                continue
            seen[need.values] = need.cost
            n_popped += 1
            n_passed += self._pass(need, node - 1, found)
            for new in self._replays(need, node):
                if seen.get(new.values, INFINITY) > new.cost:
                    heapq.heappush(queue, new)
        for need, _ in self._elite.get(node - 1, [])[:1]:
            found.setdefault(need.values, need)
        after = sorted(found.values())
        self._join(after, node - 1)
        return after

    def _pass(self, need: Need, node: int, found: dict[int, Need]) -> bool:
        """Add to ``found`` what is needed before the first run of ``node``, if that fits."""
        values = need.values | 1 << node | self.nothing.reads[node]
        if self.nothing.size(values) > self.dag.budget_bytes:
            return False
        values ^= 1 << node
        if values not in found or found[values].cost > need.cost:
            found[values] = self._need(need.cost, values, need.load, node, (node, need))
        return True

    def _replays(self, need: Need, node: int) -> Iterator[Need]:
        """Yield what is needed before a replay for the first run of ``node``, of what is kept over a time that is too full."""
        over = need.load[:node] > self.dag.budget_bytes
        if not over.any():
            return
        bytes_, last = self.nothing.size(need.values), self._last[node]
        for u in bits(need.values):
            if last[u] < node - 1 and over[last[u] + 1 :].any():
                more = self.nothing.size(self.nothing.reads[u] & ~need.values)
                if bytes_ + more <= self.dag.budget_bytes:
                    yield self._replay(need, u, node)

    def _replay(self, need: Need, u: int, node: int) -> Need:
        last, load, sizes = self._last[node], need.load.copy(), self.dag.sizes
        load[last[u] + 1 : node] -= sizes[u]
        for v in bits(self.nothing.reads[u] & ~need.values):
            load[last[v] + 1 : node] += sizes[v]
        values = (need.values | self.nothing.reads[u]) & ~(1 << u)
        return self._need(need.cost + self.dag.time[u], values, load, node, (u, need))

    def _need(self, cost: float, values: int, load: Array, node: int, then: tuple[int, Need]) -> Need:
        over = load[:node] - self.dag.budget_bytes
        self._number += 1
        return Need(cost + self._price * float(over[over > 0].sum()), self._number, cost, values, load, then)

    def _lightened(self, needs: list[Need], node: int, sweep: Sweep) -> list[Need]:
        """Return needs before the first run of the node before ``node``, whatever it costs to come from them to ``needs``."""
        found: dict[int, Need] = {}
        for need in needs[:_LIGHTENED]:
            for u in reversed(self.nothing.made(need.values, _LOOKED, self._deadline, sweep.longest).runs):
                if need.values >> u & 1:
                    need = self._replay(need, u, node)
                    self._pass(need, node - 1, found)
        light = [n for n in found.values() if self.nothing.size(n.values) <= sweep.light * self.dag.budget_bytes]
        return sorted(light or found.values())

    # -- the best so far ----------------------------------------------------------------------------------------------

    def start(self, runs: list[int]) -> None:
        """Start from a schedule that fits."""
        if not self.best:
            self._at = 0
        need, _ = self._needs_of(runs)[0][-1]
        self._take(need, [])

    def _take(self, need: Need, before: list[int]) -> None:
        runs = [*before, *need.runs()]
        cost = sum(self.dag.time[u] for u in runs) - sum(self.dag.time)
        if cost < self.best_cost:
            self.best, self.best_cost = runs, cost

    def _needs_of(self, runs: list[int]) -> dict[int, list[tuple[Need, int]]]:
        """Return, per node, the needs before its first run and before the replays for it, each with how many runs come before."""
        first_at: dict[int, int] = {}
        for place, node in enumerate(runs):
            first_at.setdefault(node, place)
        at = self.dag.n_nodes
        need = Need(0.0, 0, 0.0, 0, self._plain, None)
        found: dict[int, list[tuple[Need, int]]] = {}
        for place in reversed(range(len(runs))):
            u = runs[place]
            if first_at[u] == place:
                at = u
                values = (need.values | self.nothing.reads[u]) & ~(1 << u)
                need = self._need(need.cost, values, need.load, u, (u, need))
            elif need.values >> u & 1:
                need = self._replay(need, u, at)
            else:
                continue
            found.setdefault(at, []).append((need, place))
        return found

    def _join(self, needs: list[Need], node: int) -> None:
        """Take what comes before the first run of ``node`` in the best schedule, and then what is needed no more than there."""
        for elite, place in self._elite.get(node, [])[:1]:
            for need in needs:
                if not need.values & ~elite.values and need.cost < elite.cost:
                    self._take(need, self._from[:place])
