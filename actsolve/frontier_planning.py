"""From a captured and costed step to its memory/time curve: one solve per budget, each begun from its neighbours' plans.

The budgets are planned for from the smallest on, each seeded with the plan of the one before, which fits it too. Time that is
left in the end goes to those of which too little was proven, seeded with the plans of both neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from actsolve.check import check
from actsolve.errors import InfeasibleBudget, UsageError
from actsolve.frontier import BaselinePoint, Frontier, Point, baseline_point, consistent, is_refuted, no_slower, spaced
from actsolve.plan import Plan, Status
from actsolve.planned import Attempt, Planned
from actsolve.planners import BASELINES
from actsolve.planning import Listener, Prepared, planned_by, with_budget
from actsolve.settings import Settings
from actsolve.simulate import timeline_of

DEFAULT_POINTS = 12
MAX_POINTS = 1000
_SMALLEST = 0.1  # of the time limit, for the search for the smallest budget
_ZERO_S = 1e-9
_LEAST_S = 0.1  # for a solve, when there is no time left
_FREE = 0.03  # of the time limit, where a plan without extra time is known: what is left to find is one that copies less
_SOLVES = 0.93  # of the time limit: each solve overruns its share a little
_ONCE = 0.7  # of the time limit: later no budget is planned for again; to close the last gaps is not worth all of it
_WORTH_S = 2.0  # less is not worth another solve


def frontier(
    prepared: Prepared,
    settings: Settings,
    n_points: int = DEFAULT_POINTS,
    *,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Frontier:
    """Return the best plans for budgets from the smallest that works to what keeping everything needs, both included.

    Args:
        prepared: A step, captured and costed once; its budget is not looked at.
        settings: How to plan, by a planner that looks at the budget; the time limit is for all budgets together.
        n_points: How many budgets, at equal steps between the two; fewer where these are less than so many bytes apart.
        listener: Told how it goes.
        stop: Asked between solves whether to leave out the rest.

    Raises:
        UsageError: too few or too many points; the planner is a fixed rule; or a pin cannot be honoured.
        InfeasibleBudget: the pinned values leave no plan at any budget.
    """
    require_points(n_points)
    if settings.planner in BASELINES:
        raise UsageError(f"cannot draw the curve of {settings.planner}", why="it is a fixed rule: one point of it", try_="milp")
    return _Curve(prepared, settings, n_points, listener or Listener(), stop).frontier()


def require_points(n_points: int) -> None:
    """Raise UsageError unless a curve can have so many points."""
    if not 2 <= n_points <= MAX_POINTS:
        raise UsageError(
            f"cannot draw a curve of {n_points} points",
            where="--points",
            why=f"it goes from the smallest budget to the largest, by at most {MAX_POINTS}",
            try_="--points 12",
        )


class _Curve:
    """The points so far, and the time that is left."""

    def __init__(
        self, prepared: Prepared, settings: Settings, n_points: int, listener: Listener, stop: Callable[[], bool]
    ) -> None:
        self.begin = time.perf_counter()
        self.deadline = self.begin + _SOLVES * settings.time_limit_s
        self.settings, self.listener, self.stop = settings, listener, stop
        brief = replace(settings, time_limit_s=_SMALLEST * settings.time_limit_s)
        smallest = with_budget(prepared, "min", brief, listener=listener)
        highest = with_budget(prepared, "100%", settings).problem.budget_bytes
        budgets = spaced(smallest.problem.budget_bytes, highest, n_points)
        self.prepared = [smallest, *(with_budget(prepared, size_bytes, settings) for size_bytes in budgets[1:])]
        self.points: list[Point] = []
        self.interrupted = False

    def frontier(self) -> Frontier:
        """Plan for every budget, and return the curve."""
        try:
            self._plan_each()
            self._plan_again()
        except KeyboardInterrupt:  # between two solves; within one it is the end of that solve
            self.interrupted = True
            if not self.points:
                raise
        points = consistent(self.points, self.settings.gap)
        notes = self.prepared[0].notes
        if len(points) < len(self.prepared):
            notes = (*notes, f"Interrupted: of {len(self.prepared)} budgets only the smallest {len(points)} were planned for.")
        elif self.interrupted:
            notes = (*notes, "Interrupted: with more time the gaps may become smaller.")
        if before := sum(point.planned.plan.earlier_s is not None for point in points):
            notes = (*notes, f"The plans of {before} budgets were found before; ACTSOLVE_PLAN_CACHE=off searches anew.")
        result = Frontier(
            points=points,
            baselines=self._baselines(),
            complete=len(points) == len(self.prepared),
            solve_s=time.perf_counter() - self.begin,
            time_limit_s=self.settings.time_limit_s,
            notes=notes,
        )
        return result.verify()

    def _plan_each(self) -> None:
        """Plan for the budgets, ascending, each from the plan for the one before; what a quick one leaves is for the others."""
        seeds = self.prepared[0].seeds
        for index, prepared in enumerate(self.prepared):
            if self._stopped():
                return
            left = max(1, len(self.prepared) - 1 - index)  # the last one keeps everything, which takes no time
            share_s = _LEAST_S if self.stop() else (self.deadline - time.perf_counter()) / left
            smaller = self.points[-1].planned if self.points else None
            if smaller is not None and smaller.objective_s < _ZERO_S:
                share_s = min(share_s, _FREE * self.settings.time_limit_s)
            point = self._point(prepared, seeds, share_s, index + 1)
            self.points.append(replace(point, planned=no_slower(point.planned, smaller)))
            seeds = (self.points[-1].planned.plan,)

    def _plan_again(self) -> None:
        """Spend most of the time that is left on budgets of which too little was proven."""
        deadline = self.begin + _ONCE * self.settings.time_limit_s
        self.points = list(consistent(self.points, self.settings.gap))
        open_ = [i for i, p in enumerate(self.points) if p.planned.plan.status is not Status.OPTIMAL]
        for position, index in enumerate(open_):
            share_s = (deadline - time.perf_counter()) / (len(open_) - position)
            if self._stopped():
                return
            before = self.points[index]
            if share_s < max(_WORTH_S, before.solve_s):
                continue  # the same once more would be all
            near = self.points[max(0, index - 1) : index + 2]
            again = self._point(self.prepared[index], [p.planned.plan for p in near], share_s, index + 1, ", again")
            self.points[index] = self._better(before, again)

    def _better(self, before: Point, again: Point) -> Point:
        """Return the better plan of two solves for one budget, and a bound that this plan does not refute: the later one's.

        It had more time and so mostly wider windows. The larger of the two may be true of narrow ones only: at 73% on gpt-small
        it was 1% above the plan of a third solve.
        """
        planned = no_slower(again.planned, before.planned)
        bounds = [b for b in (again.own_bound_s, before.own_bound_s) if not is_refuted(b, planned, self.settings.gap)]
        bound_s = next((b for b in bounds if b is not None), None)
        return Point(planned, own_bound_s=bound_s, solve_s=before.solve_s + again.solve_s)

    def _stopped(self) -> bool:
        self.interrupted = self.interrupted or (bool(self.points) and self.stop())
        return self.interrupted

    def _point(self, prepared: Prepared, seeds: Sequence[Plan], time_limit_s: float, number: int, more: str = "") -> Point:
        """Return the best plan for one budget; at worst that of the smaller one, which is among the seeds."""
        stage = f"point {number} of {len(self.prepared)}{more}"
        listener = replace(self.listener, stage=lambda what: self.listener.stage(f"{stage}: {what}"))
        settings = replace(self.settings, time_limit_s=max(_LEAST_S, time_limit_s))
        start = time.perf_counter()
        try:
            planned = planned_by(replace(prepared, seeds=tuple(seeds)), settings, listener=listener)
        except InfeasibleBudget as error:  # of a seed the planner takes only what it decides: copies it places anew
            planned = _as_it_is(prepared, seeds, error)
        solve_s = time.perf_counter() - start
        return Point(planned, own_bound_s=planned.bound_s, solve_s=solve_s)

    def _baselines(self) -> dict[str, BaselinePoint]:
        found = {}
        for name in self.points[0].planned.baselines:
            results = ((p.planned.baselines[name], p.planned.static.reserve) for p in self.points)
            found[name] = baseline_point(results, self.prepared[0].reserve)
        return {name: point for name, point in found.items() if point is not None}


def _as_it_is(prepared: Prepared, seeds: Sequence[Plan], error: InfeasibleBudget) -> Planned:
    """Return the fastest of the plans that fits just as it is."""
    timelines = [(plan, timeline_of(prepared.problem, plan)) for plan in seeds]
    fitting = [(plan, timeline) for plan, timeline in timelines if timeline.fits]
    if not fitting:
        raise error
    plan, timeline = min(fitting, key=lambda found: found[1].step_s)
    check(prepared.problem, timeline.schedule)
    attempt: Attempt = error.attempt
    return replace(attempt, plan=plan).with_timeline(timeline)
