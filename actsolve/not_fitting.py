"""The errors of exit code 3: what does not fit, what holds its peak, and what to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actsolve.errors import InfeasibleBudget
from actsolve.peak import LiveValue, Peak, peak_of
from actsolve.plan import Status
from actsolve.planned import Attempt
from actsolve.remedy import Remedy
from actsolve.simulate import Timeline
from actsolve.static_memory import StaticMemory
from actsolve.units import format_bytes

_VISIBLE = 0.001  # of the peak: kinds and values below it are left to the JSON
_MOST_VALUES = 3


def nothing_fits(attempt: Attempt, helps: Sequence[Remedy], *, time_limit_s: float) -> InfeasibleBudget:
    """Return the error of an attempt that found nothing, but the smallest budget that works, with these remedies."""
    problem, peak, smallest_bytes = attempt.problem, attempt.peak, attempt.smallest_bytes
    assert peak is not None and smallest_bytes is not None
    budget = _in_bytes(problem.budget_bytes)
    proven = attempt.plan.status is Status.INFEASIBLE or problem.budget_bytes < problem.static_bytes
    what = f"no plan fits {budget}" if proven else f"no plan was found for {budget} in {time_limit_s:g} s"
    smallest = f"--mem-budget {smallest_bytes} ({format_bytes(smallest_bytes)}), the smallest found to work"
    error = InfeasibleBudget(
        what,
        where=_place_of(peak),
        why="\n".join([f"the smallest peak found is {format_bytes(peak.size_bytes)}: {_kinds_of(peak)}", *_largest_of(peak)]),
        try_="\n".join([smallest, *(f"or {remedy}" for remedy in helps)]),
        smallest_bytes=smallest_bytes,
    )
    error.attempt = replace(attempt, remedies=tuple(helps))
    return error


def baseline_too_large(timeline: Timeline, static: StaticMemory, name: str) -> InfeasibleBudget:
    """Return the error for a baseline, which looks at no budget, whose plan does not fit."""
    what = f"the plan of {name} does not fit {_in_bytes(timeline.problem.budget_bytes)}"
    return _too_large(what, peak_of(timeline, static), "--planner milp, which looks for one that does")


def loaded_too_large(timeline: Timeline, static: StaticMemory) -> InfeasibleBudget:
    """Return the error for a loaded plan that needs more than its budget, with the figures of here."""
    problem = timeline.problem
    host = problem.host_budget_bytes
    if host is not None and timeline.host_peak_bytes > host:
        return InfeasibleBudget(
            f"the loaded plan does not fit {_in_bytes(host)} of host memory here",
            why=f"it offloads {format_bytes(timeline.host_peak_bytes)}",
            try_=f"--host-budget {timeline.host_peak_bytes} if that much can be had, or plan again here",
        )
    try_ = "plan again here, or with the optimizer and options that the plan was made with"
    return _too_large(f"the loaded plan does not fit {_in_bytes(problem.budget_bytes)} here", peak_of(timeline, static), try_)


def _too_large(what: str, peak: Peak, try_: str) -> InfeasibleBudget:
    why = f"its peak is {format_bytes(peak.size_bytes)}: {_kinds_of(peak)}"
    return InfeasibleBudget(what, where=_place_of(peak), why=why, try_=try_)


def _in_bytes(size_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} ({size_bytes} bytes)"


def _place_of(peak: Peak) -> str:
    """The op at the peak, with its source line."""
    if not peak.op:
        return peak.target
    return f"{peak.target}{_at(peak.source)} ({'replayed' if peak.phase == 'replay' else peak.phase})"


def _at(source: str) -> str:
    return f" at {source}" if source else ""


def _kinds_of(peak: Peak) -> str:
    """The bytes in use at the peak, by kind."""
    kinds = {kind.replace("_", " "): size for kind, size in peak.static.items() if size}
    inside = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1]))
    total = sum(kinds.values())
    parts = [f"static {format_bytes(total)}" + (f" ({inside})" if inside != f"given {format_bytes(total)}" else "")]
    parts += [f"{kind} {format_bytes(size)}" for kind, size in peak.live.items() if size >= _VISIBLE * peak.size_bytes]
    return " + ".join(parts)


def _largest_of(peak: Peak) -> list[str]:
    """The largest values at the peak, a line each."""
    largest = [v for v in peak.largest[:_MOST_VALUES] if v.size_bytes >= _VISIBLE * peak.size_bytes]
    return [f"{'largest:' if i == 0 else '':<8} {_named(v)}" for i, v in enumerate(largest)]


def _named(value: LiveValue) -> str:
    """A value with its size, kind, shape and source line."""
    made = f", made by {value.op}{_at(value.source)}" if value.op else ""
    return f"{value.name} {format_bytes(value.size_bytes)} ({value.kind}), {value.dtype}{list(value.shape)}{made}"
