"""Why nothing fits, and what would: the message of exit code 3."""

from __future__ import annotations

from dataclasses import replace

from actsolve.errors import InfeasibleBudget
from actsolve.not_fitting import nothing_fits
from actsolve.peak import peak_of
from actsolve.plan import Plan
from actsolve.planned import Attempt
from actsolve.problem import Problem
from actsolve.remedies import Shortage, remedies
from actsolve.settings import Settings
from actsolve.simulate import timeline_of
from actsolve.static_memory import Reserve, StaticMemory


def shortage_of(
    problem: Problem, static: StaticMemory, reserve: Reserve, smallest: tuple[int, Plan], settings: Settings
) -> Shortage:
    """Return how a budget falls short of the smallest one that something fits.

    Args:
        problem: What was planned for.
        static: The static memory by kind.
        reserve: What must stay free; more of it in a larger budget, if it is a share.
        smallest: What `smallest_budget` found without the reserve.
        settings: How it was planned.
    """
    needed_bytes, found = smallest
    smallest_bytes = reserve.budget_for(needed_bytes)
    at_smallest = replace(static, reserve=reserve.of(smallest_bytes))
    there = replace(problem, budget_bytes=smallest_bytes, static_bytes=at_smallest.total_bytes)
    return Shortage(problem, static, reserve, settings, found, timeline_of(there, found))


def infeasible_budget(shortage: Shortage, attempt: Attempt, *, helps: bool = True) -> InfeasibleBudget:
    """Return the error for a budget that no plan was found for.

    It names the smallest budget that a plan was found for, verified by simulation, what holds the peak there, and what would
    lower it.

    Args:
        shortage: How it falls short.
        attempt: All that is known of the step; its plan is what the planner returned.
        helps: Whether to look for what would lower it, which takes some seconds.
    """
    smallest_bytes = shortage.smallest_bytes
    static = replace(shortage.static, reserve=shortage.reserve.of(smallest_bytes))
    peak = peak_of(shortage.timeline, static)
    attempt = replace(attempt, smallest_bytes=smallest_bytes, smallest_plan=shortage.plan, peak=peak)
    return nothing_fits(attempt, remedies(shortage) if helps else (), time_limit_s=shortage.settings.time_limit_s)
