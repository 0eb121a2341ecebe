"""Exact local improvement: keep or offload more, where the simulator says that it still fits and takes less time.

The rows of the MILP are conservative here and there, and a solver stops within its gap. Both leave memory that a greedy
pass over exact simulations can still use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from actsolve.plan import Copies
from actsolve.planners.placement import place
from actsolve.planners.required import replayed, required, useful
from actsolve.problem import Problem
from actsolve.schedule import NOT_EARLY, StepKind, build_schedule
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


def candidate(
    problem: Problem, kept: frozenset[int], early: Mapping[int, int] = NOT_EARLY, offloaded: frozenset[int] = frozenset()
) -> Candidate:
    """Return the plan that keeps ``kept``, offloads ``offloaded``, and keeps what it cannot do without; less what nothing reads.

    Of replays ``early`` and replays on demand, what fits; if both do, what takes less time, else what has the lower peak.
    """
    graph = problem.graph
    offloaded = (offloaded & problem.offloadable) - kept
    there = required(graph, ((kept | offloaded) - problem.pinned_recompute) | problem.pinned_keep)
    there = useful(graph, there) | problem.pinned_keep
    offloaded &= there
    plans = [_placed(problem, there - offloaded, {}, offloaded)]
    if early:
        plans.append(_placed(problem, there - offloaded, early, offloaded))
    return min(plans, key=lambda plan: (not plan.fits, plan.extra_s if plan.fits else 0.0, plan.peak_bytes))


def _placed(problem: Problem, kept: frozenset[int], early: Mapping[int, int], offloaded: frozenset[int]) -> Candidate:
    """Return the plan with its copies where they cost least; what would leave only as it must return is kept."""
    copies = place(problem, kept, offloaded, early) if offloaded else {}
    idle = frozenset(v for v, c in copies.items() if c.free_at >= c.back_at)
    if idle:
        kept |= idle
        copies = place(problem, kept, offloaded - idle, early)
    return Candidate(kept, simulate(problem, build_schedule(problem.graph, kept, early, copies)), early, copies)


def simulations(problem: Problem) -> int:
    """How many plans to simulate in a local search: about a second's worth. A count, so that plans are reproducible."""
    return max(10, min(200, 40_000 // max(1, len(problem.graph.ops))))


def improved(problem: Problem, start: Candidate, good_enough_s: float, deadline: float) -> Candidate:
    """Return ``start``, or a plan that fits too and takes less time.

    Keeps one more value at a time, the one first that saves the most time per byte; where nothing more can be kept, offloads one
    more that is recomputed.

    Args:
        problem: What is planned for.
        start: A plan that fits.
        good_enough_s: Stop at this extra time.
        deadline: Stop at this `time.perf_counter`.
    """
    best, tries = start, simulations(problem)
    refused: set[tuple[int, bool]] = set()
    while best.extra_s > good_enough_s:
        accepted = False
        for v, keep in _moves(problem, best):
            if (v, keep) in refused:
                continue
            if tries <= 0 or time.perf_counter() > deadline:
                return best
            tries -= 1
            there = frozenset(best.offloaded)
            new = candidate(problem, best.kept | {v} if keep else best.kept, best.early, there - {v} if keep else there | {v})
            if new.fits and new.extra_s < best.extra_s:
                best, accepted = new, True
                break
            refused.add((v, keep))
        if not accepted:
            return best
    return best


def _moves(problem: Problem, best: Candidate) -> list[tuple[int, bool]]:
    """Return values to keep (True) or to offload (False) in place of recomputing them, the most promising first."""
    graph, costs = problem.graph, problem.costs
    ranked = []
    slack = _Slack(problem, best)
    decidable = set(graph.decidable) - best.kept - best.offloaded.keys() - problem.pinned_recompute
    for f in sorted(replayed(graph, best.kept | best.offloaded.keys())):
        for v in decidable.intersection(graph.ops[f].outputs):
            size = graph.values[v].size_bytes
            gain = -costs.replay_seconds[f] / max(size, 1)
            if slack.least(v, f) >= size:
                ranked.append((False, gain, v))
            if v in problem.offloadable:
                ranked.append((True, gain, v))
    return [(v, not offload) for offload, _, v in sorted(ranked)]


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
