"""The memory/time curve of a training step: the best plan found for each of several budgets, and what is proven there.

A larger budget holds every plan of a smaller one. So a plan is carried on to larger budgets where those found for them are no
faster, and what is proven of a larger budget, that no plan takes less, is carried back to smaller ones. `verify` holds
`Frontier` to both.

Where what is proven holds for every schedule with these first runs, or for those of them that replay in the backward, it does so
at each smaller budget too. Otherwise it is the plan-class bound: over plans that replay an op once, within the windows that
were solved for. The windows of one budget may be narrower than those of another, so each bound names the budget that it was
proven at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from actsolve.check import check
from actsolve.plan import Status
from actsolve.planned import BaselineResult, Planned
from actsolve.planners.one_pass import STEP_GAP
from actsolve.simulate import simulate
from actsolve.static_memory import Reserve

_ZERO_S = 1e-9
_OF_THE_STEP = ("target", "optimizer_bytes", "host_budget_bytes", "links", "links_source")
_OF_THE_COSTS = ("capture_s", "cost_s", "costs", "unknown_costs")
_PREDICTED = ("peak_bytes", "step_s", "recompute_s", "stall_s", "d2h_bytes", "h2d_bytes", "host_peak_bytes")
_PROVEN = ("objective_s", "bound_s", "gap", "step_gap")


@dataclass(frozen=True)
class Point:
    """The best plan found for one budget.

    Attributes:
        planned: The plan. Its bound is the best that is known: its own, or one carried back from a larger budget.
        own_bound_s: What was proven by solving for this very budget, on extra seconds over keep-all; None if nothing was.
        proven_at_bytes: The budget that the plan's bound was proven at; None where it has no bound.
        solve_s: Wall seconds of solving for this budget.
    """

    planned: Planned
    own_bound_s: float | None = None
    proven_at_bytes: int | None = None
    solve_s: float = 0.0

    @property
    def budget_bytes(self) -> int:
        return self.planned.problem.budget_bytes

    @property
    def step_s(self) -> float:
        return self.planned.timeline.step_s

    @property
    def overhead(self) -> float | None:
        """The extra time as a share of the step that keeps everything."""
        return self._share_of_keep_all(self.planned.objective_s)

    @property
    def least_overhead(self) -> float | None:
        """The bound likewise."""
        return self._share_of_keep_all(self.planned.bound_s)

    @property
    def bound_over(self) -> str | None:
        """What the bound is over: ``global``, ``backward`` (`Planned.global_bound_over`), ``plan-class``; None without one."""
        planned = self.planned
        if planned.bound_s is None:
            return None
        whole_s = planned.global_bound_s
        return planned.global_bound_over if whole_s is not None and planned.bound_s <= whole_s + _ZERO_S else "plan-class"

    @property
    def share(self) -> float | None:
        """The budget as a share of what keeping everything needs above static."""
        problem = self.planned.problem
        needed = self.planned.keep_all.peak_bytes - problem.static_bytes
        return problem.dynamic_budget_bytes / needed if needed > 0 else None

    def _share_of_keep_all(self, seconds: float | None) -> float | None:
        base_s = self.planned.keep_all.step_s
        return None if seconds is None or base_s <= 0 else seconds / base_s

    def as_json(self) -> dict[str, Any]:
        """Return an element of ``points`` in ``frontier --json``."""
        planned = self.planned
        return {
            "budget_bytes": self.budget_bytes,
            "share": self.share,
            "static_bytes": planned.static.total_bytes,
            "reserve_bytes": planned.static.reserve,
            **{key: getattr(planned.timeline, key) for key in _PREDICTED},
            "overhead": self.overhead,
            **{key: getattr(planned, key) for key in _PROVEN},
            "bound_over": self.bound_over,
            "own_bound_s": self.own_bound_s,
            "bound_from_budget_bytes": self.proven_at_bytes,
            "status": planned.plan.status.value,
            "solve_s": self.solve_s,
            "decisions": planned.decision_totals(),
        }


@dataclass(frozen=True)
class BaselinePoint:
    """A fixed rule on the same axes.

    Attributes:
        peak_bytes: The smallest budget that holds it, the reserve included.
        step_s: Its simulated step.
        fits: Whether a budget of the curve holds it.
        note: What it says of itself.
    """

    peak_bytes: int
    step_s: float
    fits: bool
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return an entry of ``baselines`` in ``frontier --json``."""
        return {"peak_bytes": self.peak_bytes, "step_s": self.step_s, "fits": self.fits, "note": self.note}


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The curve, by ascending budgets.

    Attributes:
        points: One per budget.
        baselines: The fixed rules that apply, by name.
        complete: Whether every budget was planned for: not where the user has stopped it.
        solve_s: Wall seconds of all, the search for the smallest budget included.
        time_limit_s: What was allowed for it.
        notes: What a report has to say.
    """

    points: tuple[Point, ...]
    baselines: dict[str, BaselinePoint]
    complete: bool = True
    solve_s: float = 0.0
    time_limit_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> Planned:
        """The plan for the largest budget; all that does not depend on the budget can be read from any."""
        return self.points[-1].planned

    @cached_property
    def target(self) -> str:
        return self.last.target

    def verify(self) -> Frontier:
        """Return it; AssertionError if a larger budget takes more time or has the larger bound, or a bound is above a plan."""
        assert self.points
        for point in self.points:
            bound_s = point.planned.bound_s
            assert point.planned.fits
            assert bound_s is None or bound_s <= point.planned.objective_s
            assert (bound_s is None) == (point.proven_at_bytes is None)
        for smaller, larger in zip(self.points, self.points[1:], strict=False):
            assert smaller.budget_bytes < larger.budget_bytes
            assert smaller.step_s >= larger.step_s
            assert (larger.planned.bound_s or 0.0) <= (smaller.planned.bound_s or 0.0)
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``frontier --json``."""
        last = self.last.as_json()
        static = {kind: size for kind, size in last["static"].items() if kind != "reserve"}
        return {
            **{key: last[key] for key in _OF_THE_STEP},
            "static": static,
            "keep_all": {"peak_bytes": self.last.keep_all.peak_bytes, "step_s": self.last.keep_all.step_s},
            "smallest_budget_bytes": self.points[0].budget_bytes,
            "points": [point.as_json() for point in self.points],
            "baselines": {name: baseline.as_json() for name, baseline in self.baselines.items()},
            "complete": self.complete,
            "solve_s": self.solve_s,
            "time_limit_s": self.time_limit_s,
            **{key: last[key] for key in _OF_THE_COSTS},
            "notes": list(self.notes),
        }


def spaced(lowest_bytes: int, highest_bytes: int, n_points: int) -> tuple[int, ...]:
    """Return ``n_points`` budgets at equal distances, both ends included; fewer where they lie less than a byte apart.

    At equal distances they are at equal steps of the share of what is above static, too: a reserve is linear in the budget.
    """
    if lowest_bytes >= highest_bytes:
        return (lowest_bytes,)
    span = highest_bytes - lowest_bytes
    return tuple(sorted({lowest_bytes + span * i // (n_points - 1) for i in range(n_points)}))


def no_slower(planned: Planned, smaller: Planned | None) -> Planned:
    """Return the plan for a budget, or that for a smaller one where it takes less time; the bound stays."""
    if smaller is None or planned.timeline.step_s <= smaller.timeline.step_s:
        return planned
    ours = planned.plan
    plan = replace(smaller.plan, bound_s=ours.bound_s, status=ours.status, solve_s=ours.solve_s)
    plan = replace(plan, global_bound_s=ours.global_bound_s, bounds_forward=ours.bounds_forward)
    check(planned.problem, smaller.schedule)
    return replace(planned, plan=plan, timeline=simulate(planned.problem, smaller.schedule))


def consistent(points: Iterable[Point], gap: float) -> tuple[Point, ...]:
    """Return the points with each plan carried on to larger budgets, and each bound back to smaller ones, where they are better.

    Args:
        points: By ascending budgets.
        gap: The gap at which a plan is called optimal.
    """
    carried: list[Point] = []
    for point in points:
        smaller = carried[-1].planned if carried else None
        carried.append(replace(point, planned=no_slower(point.planned, smaller)))
    back: list[Point] = []
    for point in reversed(carried):
        larger = back[-1] if back else None
        plan, bound_s = point.planned.plan, point.own_bound_s
        in_forward = point.planned.forward_replays > 0  # then what is proven of replays in the backward says nothing of it
        if in_forward and not plan.bounds_forward:
            plan, bound_s = replace(plan, global_bound_s=None), None
        elif is_refuted(bound_s, point.planned, gap):
            bound_s = None
        if _above(plan.global_bound_s, bound_s):
            bound_s = point.planned.global_bound_s
        at_bytes = None if bound_s is None else point.budget_bytes
        if larger is not None and (larger.planned.plan.bounds_forward or not in_forward):
            if _above(larger.planned.bound_s, bound_s):
                bound_s, at_bytes = larger.planned.bound_s, larger.proven_at_bytes
            whole = larger.planned.plan
            if _above(whole.global_bound_s, plan.global_bound_s):
                plan = replace(plan, global_bound_s=whole.global_bound_s, bounds_forward=whole.bounds_forward)
        planned = _with_bound(replace(point.planned, plan=plan), bound_s, gap)
        back.append(replace(point, planned=planned, proven_at_bytes=at_bytes))
    return tuple(reversed(back))


def _above(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one > other)


def _with_bound(planned: Planned, bound_s: float | None, gap: float) -> Planned:
    planned = replace(planned, plan=replace(planned.plan, bound_s=bound_s))
    close = False
    if planned.gap is not None and planned.step_gap is not None:
        close = planned.gap <= gap + _ZERO_S or planned.step_gap <= STEP_GAP
    return replace(planned, plan=replace(planned.plan, status=Status.OPTIMAL if close else Status.FEASIBLE))


def is_refuted(bound_s: float | None, planned: Planned, gap: float) -> bool:
    """Whether a plan takes less than a bound says, by more than rounding and what a local improvement finds outside of the rows.

    Windows, and the slots of a link, limit what a bound is true of.
    """
    return bound_s is not None and planned.objective_s < bound_s * (1 - gap) - _ZERO_S


def baseline_point(results: Iterable[tuple[BaselineResult, int]], reserve: Reserve) -> BaselinePoint | None:
    """Return a fixed rule at the smallest budget that holds it, or at the largest; None if it does not apply.

    Args:
        results: What it gives for each budget, ascending, and the reserve there: those that offload look at the budget.
        reserve: What is to be left free within any budget.
    """
    found = None
    for result, reserved_bytes in results:
        timeline = result.timeline
        if timeline is None:
            continue
        needed = reserve.budget_for(timeline.peak_bytes - reserved_bytes)
        found = BaselinePoint(needed, timeline.step_s, timeline.fits, result.note)
        if timeline.fits:
            break
    return found
