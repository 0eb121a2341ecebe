"""Which of several plans to return."""

from __future__ import annotations

from collections.abc import Iterable

from actsolve.plan import Plan
from actsolve.problem import Problem
from actsolve.simulate import Timeline, timeline_of

Rank = tuple[bool, float, float]


def best_of(problem: Problem, plans: Iterable[Plan]) -> Plan | None:
    """Return the fastest of the plans that fit; if none does, the one of the lowest peak; None if there is none at all."""
    ranked: list[tuple[Rank, int, Plan]] = [(rank(timeline_of(problem, plan)), k, plan) for k, plan in enumerate(plans)]
    return min(ranked, key=lambda r: r[:2])[2] if ranked else None


def rank(timeline: Timeline) -> Rank:
    """Return a key by which the better of two plans comes first."""
    if timeline.fits:
        return False, timeline.step_s, float(timeline.peak_bytes)
    return True, float(timeline.peak_bytes), timeline.step_s
