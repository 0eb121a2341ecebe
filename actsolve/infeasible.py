"""Why nothing fits, and what would: the message of exit code 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actsolve.errors import InfeasibleBudget
from actsolve.peak import peak_of
from actsolve.peak_text import kinds_of, largest_of, place_of
from actsolve.plan import Plan, Status
from actsolve.planned import Attempt
from actsolve.problem import Problem
from actsolve.remedies import Shortage, remedies
from actsolve.remedy import Remedy
from actsolve.settings import Settings
from actsolve.simulate import Timeline, timeline_of
from actsolve.static_memory import Reserve, StaticMemory
from actsolve.units import format_bytes


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
    return with_remedies(attempt, remedies(shortage) if helps else (), time_limit_s=shortage.settings.time_limit_s)


def with_remedies(attempt: Attempt, helps: Sequence[Remedy], *, time_limit_s: float) -> InfeasibleBudget:
    """Return the error of an attempt that found nothing, with these remedies."""
    problem, peak, smallest_bytes = attempt.problem, attempt.peak, attempt.smallest_bytes
    assert peak is not None and smallest_bytes is not None
    budget = f"{format_bytes(problem.budget_bytes)} ({problem.budget_bytes} bytes)"
    proven = attempt.plan.status is Status.INFEASIBLE or problem.budget_bytes < problem.static_bytes
    what = f"no plan fits {budget}" if proven else f"no plan was found for {budget} in {time_limit_s:g} s"
    smallest = f"--mem-budget {smallest_bytes} ({format_bytes(smallest_bytes)}), the smallest found to work"
    error = InfeasibleBudget(
        what,
        where=place_of(peak),
        why="\n".join([f"the smallest peak found is {format_bytes(peak.size_bytes)}: {kinds_of(peak)}", *largest_of(peak)]),
        try_="\n".join([smallest, *(f"or {remedy}" for remedy in helps)]),
        smallest_bytes=smallest_bytes,
    )
    error.attempt = replace(attempt, remedies=tuple(helps))
    return error


def baseline_too_large(timeline: Timeline, static: StaticMemory, name: str) -> InfeasibleBudget:
    """Return the error for a baseline, which looks at no budget, whose plan does not fit."""
    problem, peak = timeline.problem, peak_of(timeline, static)
    budget = f"{format_bytes(problem.budget_bytes)} ({problem.budget_bytes} bytes)"
    return InfeasibleBudget(
        f"the plan of {name} does not fit {budget}",
        where=place_of(peak),
        why=f"its peak is {format_bytes(peak.size_bytes)}: {kinds_of(peak)}",
        try_="--planner milp, which looks for one that does",
    )


def loaded_too_large(timeline: Timeline, static: StaticMemory) -> InfeasibleBudget:
    """Return the error for a loaded plan that needs more than its budget, with the figures of here."""
    problem = timeline.problem
    host = problem.host_budget_bytes
    if host is not None and timeline.host_peak_bytes > host:
        return InfeasibleBudget(
            f"the loaded plan does not fit {format_bytes(host)} ({host} bytes) of host memory here",
            why=f"it offloads {format_bytes(timeline.host_peak_bytes)}",
            try_=f"--host-budget {timeline.host_peak_bytes} if that much can be had, or plan again here",
        )
    peak = peak_of(timeline, static)
    budget = f"{format_bytes(problem.budget_bytes)} ({problem.budget_bytes} bytes)"
    return InfeasibleBudget(
        f"the loaded plan does not fit {budget} here",
        where=place_of(peak),
        why=f"its peak is {format_bytes(peak.size_bytes)}: {kinds_of(peak)}",
        try_="plan again here, or with the optimizer and options that the plan was made with",
    )
