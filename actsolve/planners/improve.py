"""Exact local improvement: keep more, where the simulator says that it still fits.

The rows of the MILP are conservative here and there, and a solver stops within its gap. Both leave memory that a greedy
pass over exact simulations can still use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from actsolve.plan import Copies
from actsolve.planners.required import replayed, required, useful
from actsolve.problem import Problem
from actsolve.schedule import StepKind, build_schedule
from actsolve.simulate import Timeline, simulate


@dataclass(frozen=True)
class Candidate:
    """A set of kept values, ops to be replayed early, and what they do."""

    kept: frozenset[int]
    timeline: Timeline
    early: Mapping[int, int] = field(default_factory=dict)
    offloaded: Mapping[int, Copies] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.timeline.fits

    @property
    def extra_s(self) -> float:
        return self.timeline.extra_s

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes


def candidate(problem: Problem, kept: frozenset[int], early: Mapping[int, int] = MappingProxyType({})) -> Candidate:
    """Return the plan that keeps ``kept`` and what it cannot do without, less what nothing reads, and simulate it.

    Of replays ``early`` and replays on demand, what gives the lower peak.
    """
    graph = problem.graph
    kept = required(graph, (kept - problem.pinned_recompute) | problem.pinned_keep)
    kept = useful(graph, kept) | problem.pinned_keep
    plans = [Candidate(kept, simulate(problem, build_schedule(graph, kept)))]
    if early:
        plans.append(Candidate(kept, simulate(problem, build_schedule(graph, kept, early)), early))
    return min(plans, key=lambda plan: plan.peak_bytes)


def simulations(problem: Problem) -> int:
    """How many plans to simulate in a local search: about a second's worth. A count, so that plans are reproducible."""
    return max(10, min(200, 40_000 // max(1, len(problem.graph.ops))))


def improved(problem: Problem, start: Candidate, good_enough_s: float, deadline: float) -> Candidate:
    """Return ``start``, or a plan that fits too and takes less time.

    Keeps one more value at a time, the one first that saves the most time per byte.

    Args:
        problem: What is planned for.
        start: A plan that fits.
        good_enough_s: Stop at this extra time.
        deadline: Stop at this `time.perf_counter`.
    """
    best, tries = start, simulations(problem)
    graph, costs = problem.graph, problem.costs
    refused: set[int] = set()
    decidable = set(graph.decidable)
    while tries > 0 and best.extra_s > good_enough_s:
        ranked = []
        slack = _Slack(problem, best)
        for f in sorted(replayed(graph, best.kept)):
            for v in graph.ops[f].outputs:
                if v in decidable and v not in best.kept and v not in refused and v not in problem.pinned_recompute:
                    size = graph.values[v].size_bytes
                    if slack.least(v, f) >= size:
                        ranked.append((-costs.replay_seconds[f] / max(size, 1), v))
        accepted = False
        for _, v in sorted(ranked):
            if tries <= 0 or time.perf_counter() > deadline:
                return best
            tries -= 1
            new = candidate(problem, best.kept | {v}, best.early)
            if new.fits and new.extra_s < best.extra_s:
                best, accepted = new, True
                break
            refused.add(v)
        if not accepted:
            return best
    return best


class _Slack:
    """How much room a plan leaves between the forward and a replay."""

    def __init__(self, problem: Problem, plan: Candidate) -> None:
        self.graph = problem.graph
        self.room = problem.budget_bytes - np.array(plan.timeline.memory_bytes, dtype=np.int64)
        self.ran: dict[int, int] = {}
        self.replayed: dict[int, int] = {}
        for index, step in enumerate(plan.timeline.schedule.steps):
            if step.op is not None:
                (self.replayed if step.kind is StepKind.REPLAY else self.ran)[step.op] = index

    def least(self, value: int, f: int) -> int:
        """The least room from the last forward read of ``value`` to the replay of its op."""
        readers = [r for r in self.graph.forward_readers[value] if r in self.ran]
        start = self.ran[readers[-1]] + 1 if readers else self.ran[f] + 1
        end = self.replayed[f]
        return int(self.room[start:end].min()) if end > start else 0
