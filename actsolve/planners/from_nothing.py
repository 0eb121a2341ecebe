"""What it takes to make values from nothing, whatever runs again: a search backwards, from what is to be live to nothing.

A *need* is a set of values that are to be live at one time; a value is its node here, and a set the bits of an integer. What is
made last of a need, ``u``, takes all of it and what ``u`` reads; before that, the need was the rest and what ``u`` reads. The
least peak of a need is that of the best such ``u``: every schedule that makes it is a way through these steps, so that a search
that has looked at all steps within the budget, and reached no empty need, proves that nothing makes it within the budget. And
who can make each node from nothing can run all of them in any order.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from actsolve.dag import Dag, general_dag

_LIMITS = (1, 10, 100)  # needs that are looked at for one node, then for another, then more
_LONGEST = 20_000  # runs that make a value beside what is live, where only whether it can be made counts
_BEYOND = (math.inf, math.inf)

# Going backwards: a node that runs, or one that is made with all that it is made of beside what is live, as bits.
Steps = list[tuple[int, int | None]]
Trees = dict[int, tuple[float, float]]  # per node, bytes and runs to make it


def is_general(dag: Dag) -> bool:
    """Whether each node makes one value, takes nothing else, and may run again at any time: what this search is for."""
    return replace(dag, names=()) == replace(general_dag(dag.sizes, dag.reads, dag.time, dag.budget_bytes), names=())


def bits(need: int) -> Iterator[int]:
    """Yield the nodes of a need, ascending."""
    while need:
        lowest = need & -need
        yield lowest.bit_length() - 1
        need ^= lowest


@dataclass(frozen=True)
class Made:
    """How a need can be made.

    Attributes:
        left: The lightest need that was found to make it from; empty if it can be made from nothing.
        runs: What makes it from that, in order.
        proven: Whether it cannot be made from nothing.
    """

    left: int
    runs: tuple[int, ...]
    proven: bool = False


@dataclass
class FromNothing:
    """Needs over one graph, within its budget."""

    dag: Dag
    reads: list[int] = field(init=False)  # per node, as a need

    def __post_init__(self) -> None:
        self.reads = [sum(1 << u for u in values) for values in self.dag.reads]
        self._above = [0] * self.dag.n_nodes  # per node, all that it is made of
        for node, values in enumerate(self.dag.reads):
            for u in values:
                self._above[node] |= self._above[u] | 1 << u

    def size(self, need: int) -> int:
        sizes = self.dag.sizes
        return sum(sizes[u] for u in bits(need))

    def made(self, need: int, limit: int, deadline: float, longest: int = _LONGEST) -> Made:
        """Return what makes ``need``: from nothing, or from the lightest need among ``limit`` of them.

        Args:
            need: What is to be live.
            limit: Of needs that are looked at, the lightest first.
            deadline: When to give up, in seconds of `time.perf_counter`.
            longest: Runs of a tree that makes one value beside what is live.
        """
        steps: Steps = []
        first = self._lessened(need, steps, longest)
        came: dict[int, tuple[int, Steps]] = {first: (-1, steps)}  # need -> the need that it came from, and how
        queue = [(self.size(first), first)]
        least = queue[0]
        while queue and limit and time.perf_counter() < deadline:
            looked = bytes_, need = heapq.heappop(queue)
            least = min(least, looked)
            limit -= 1
            if not need:
                break
            for u in self._steps(need, bytes_):
                more = bytes_ + self.size(self.reads[u] & ~need)
                if more > self.dag.budget_bytes or time.perf_counter() > deadline:
                    continue
                steps = [(u, None)]
                before = self._lessened((need | self.reads[u]) & ~(1 << u), steps, longest)
                if before not in came:
                    came[before] = need, steps
                    heapq.heappush(queue, (self.size(before), before))
        left = least[1]
        proven = bool(left) and not queue and time.perf_counter() < deadline
        return Made(left, tuple(self._unwound(came, left)), proven)

    def _unwound(self, came: dict[int, tuple[int, Steps]], need: int) -> Iterator[int]:
        while need >= 0:
            need, steps = came[need]
            for u, live in reversed(steps):
                yield from (u,) if live is None else self._tree_runs(u, live)

    def _steps(self, need: int, bytes_: int) -> list[int]:
        """Return which of ``need`` may be made last: only one, if nothing else is made of it, and it reads no more than it makes.

        For what it reads can then be kept in its place from when it is made.
        """
        above = 0
        for u in bits(need):
            above |= self._above[u]
        for u in bits(need & ~above):
            reads = self.reads[u]
            if self.size(reads) <= self.dag.sizes[u] and bytes_ + self.size(reads & ~need) <= self.dag.budget_bytes:
                return [u]
        return list(bits(need))

    def _lessened(self, need: int, steps: Steps, longest: int) -> int:
        """Return ``need`` without what can be made while the rest is live; add that to ``steps``, backwards.

        What is left can be made if and only if ``need`` can.
        """
        bytes_, again = self.size(need), True
        while again:
            again = False
            # One for all, from the last to the first: no node is made of later ones, be these live or not.
            trees: Trees = {}
            limits = self.dag.budget_bytes - bytes_ + max((self.dag.sizes[u] for u in bits(need)), default=0), longest
            for u in reversed(list(bits(need))):
                rest = need & ~(1 << u)
                peak, _ = self.tree(u, rest, trees, limits)
                if bytes_ - self.dag.sizes[u] + peak <= self.dag.budget_bytes:
                    steps.append((u, rest))
                    need, bytes_, again = rest, bytes_ - self.dag.sizes[u], True
        return need

    def tree(self, node: int, live: int, trees: Trees, limits: tuple[int, float]) -> tuple[float, float]:
        """Return (bytes, runs) to make ``node`` beside what is ``live``, all that it is made of once for each reader.

        Both are infinite if either is beyond its limit.

        Source:
            Sethi and Ullman 1970; Liu 1987: of what a node reads first what takes the most beyond its own size.
        """
        stack = [node]
        while stack:
            u = stack[-1]
            if u in trees:
                stack.pop()
                continue
            missing = self._missing(u, live)
            known = [trees[v] for v in missing if v in trees]
            if _BEYOND in known or self.dag.sizes[u] + sum(self.dag.sizes[v] for v in missing) > limits[0]:
                trees[u] = _BEYOND
            elif len(known) < len(missing):
                stack.append(next(v for v in missing if v not in trees))
            else:
                peak, runs = self._of_its_reads(u, live, trees)
                trees[u] = (peak, runs) if peak <= limits[0] and runs <= limits[1] else _BEYOND
        return trees[node]

    def _of_its_reads(self, node: int, live: int, trees: Trees) -> tuple[float, float]:
        sizes, held, peak, runs = self.dag.sizes, 0, 0.0, 1.0
        for u in self._ordered(node, live, trees):
            own, more = trees[u]
            peak, held, runs = max(peak, held + own), held + sizes[u], runs + more
        return max(peak, held + sizes[node]), runs

    def _missing(self, node: int, live: int) -> list[int]:
        return [u for u in self.dag.reads[node] if not live >> u & 1]

    def _ordered(self, node: int, live: int, trees: Trees) -> list[int]:
        return sorted(self._missing(node, live), key=lambda u: self.dag.sizes[u] - trees[u][0])

    def _tree_runs(self, node: int, live: int) -> list[int]:
        """Return the runs of `tree`."""
        trees: Trees = {}
        self.tree(node, live, trees, (self.dag.budget_bytes, math.inf))
        backwards: list[int] = []
        stack = [node]
        while stack:
            u = stack.pop()
            backwards.append(u)
            stack += self._ordered(u, live, trees)  # the last of them is taken next
        return backwards[::-1]


def cannot_be_made(nothing: FromNothing, deadline: float) -> int | None:
    """Return a node that is proven not to be made within the budget, whatever runs again; None if none was found."""
    trees: Trees = {}
    limits = nothing.dag.budget_bytes, math.inf
    unsure = [u for u in range(nothing.dag.n_nodes) if nothing.tree(u, 0, trees, limits)[0] > nothing.dag.budget_bytes]
    for limit in _LIMITS:
        for node in list(unsure):
            made = nothing.made(1 << node, limit, deadline)
            if made.proven:
                return node
            if not made.left:
                unsure.remove(node)
    return None
