"""One pass of the MILP: its model over given windows, solved, and its plan made exact."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial

from actsolve.plan import Status
from actsolve.planners.as_needed import Relaxed, solve_as_needed
from actsolve.planners.improve import Candidate
from actsolve.planners.lp import Limits, Outcome, Solution, solve
from actsolve.planners.milp_rows import start_from
from actsolve.planners.model import build, decided
from actsolve.planners.options import PlannerOptions, Progress
from actsolve.planners.slots import Grid
from actsolve.planners.windows import Windows
from actsolve.problem import Problem

STEP_GAP = 0.0005  # a plan within this share of the step time is optimal, whatever its gap
_SMALL_STEP = 0.1  # of the step gap: at that the solver stops at once
_EPSILON_S = 1e-9
_LARGE = 2000  # step columns
_NEAR = 0.7  # of the gap
_ROUGH = 0.03  # a gap that is enough for the first of several passes that offload


@dataclass(frozen=True)
class Patience:
    """When a pass ends before its gap is closed, as `time.perf_counter` tells it.

    Attributes:
        content: From then on the step gap is enough.
        hope: From then on it goes on only if it has found a better plan.
        rough: From then on a few per cent of the incumbent are enough.
    """

    content: float
    hope: float
    rough: float

    def ends(self, enough: float, seed: float, incumbent: float | None, bound: float | None) -> bool:
        """Whether to stop now: figures of the solver, the objective of the seed, and how near the bound is enough."""
        now = time.perf_counter()
        if now > self.hope and (incumbent is None or incumbent >= seed * (1 - _EPSILON_S)):
            return True
        if now > self.rough and incumbent is not None and bound is not None:
            enough = max(enough, _ROUGH * incumbent)
            return incumbent - bound <= enough
        return now > self.content and incumbent is not None and bound is not None and incumbent - bound <= enough


@dataclass(frozen=True)
class PassOutcome:
    """What a pass found.

    Attributes:
        solution: What the solver said.
        best: The plan, made exact; None if it does not fit, or there is none.
        bound_s: What is proven of the plans that these windows admit.
        hopeless: Whether no windows help: what is live whatever is decided is over the budget.
    """

    solution: Solution
    best: Candidate | None = None
    bound_s: float | None = None
    hopeless: bool = False


def solve_windows(
    problem: Problem,
    options: PlannerOptions,
    found: Windows,
    grid: Grid,
    seed: Candidate | None,
    deadline: float,
    patience: Patience,
) -> PassOutcome:
    """Solve the MILP over these windows: where it is large with the rows that it needs; if that leaves a gap, with all.

    Not where values can be offloaded: of what crosses the link, what is whole in the relaxation makes poor plans.
    """
    if found.n_demands < _LARGE or problem.offloadable or options.solver.lower() != "highs":
        return _solve_whole(problem, options, found, grid, seed, deadline, patience)
    relaxed = solve_as_needed(problem, options, found, grid, deadline)
    if relaxed.infeasible:
        return PassOutcome(Solution(Outcome.INFEASIBLE), hopeless=relaxed.hopeless)
    closed = _is_closed(problem, options, relaxed)
    if closed or relaxed.interrupted or time.perf_counter() > deadline:
        said = Outcome.OPTIMAL if closed else Outcome.UNKNOWN if relaxed.best is None else Outcome.FEASIBLE
        return PassOutcome(Solution(said, interrupted=relaxed.interrupted), relaxed.best, relaxed.bound_s)
    plans = [p for p in (seed, relaxed.best) if p is not None]
    outcome = _solve_whole(problem, options, found, grid, min(plans, key=_extra_s, default=None), deadline, patience)
    plans = [p for p in (outcome.best, relaxed.best) if p is not None]
    bounds = [b for b in (outcome.bound_s, relaxed.bound_s) if b is not None]
    return replace(outcome, best=min(plans, key=_extra_s, default=None), bound_s=max(bounds, default=None))


def _is_closed(problem: Problem, options: PlannerOptions, relaxed: Relaxed) -> bool:
    """Whether a plan is as near to its bound as the solver mostly brings it, which stops well within the gap."""
    if relaxed.best is None or relaxed.bound_s is None:
        return False
    allowed_s = max(_NEAR * options.gap * relaxed.best.extra_s, _SMALL_STEP * _step_gap(options) * problem.base_time_s)
    return relaxed.best.extra_s - relaxed.bound_s <= allowed_s


def _extra_s(plan: Candidate) -> float:
    return plan.extra_s


def _solve_whole(
    problem: Problem,
    options: PlannerOptions,
    found: Windows,
    grid: Grid,
    seed: Candidate | None,
    deadline: float,
    patience: Patience,
) -> PassOutcome:
    """Solve the MILP over these windows, and again while the exact schedule of its plan does not fit.

    That happens where q is fractional: an output that dies at once, or workspace, then counts in part at several
    moments. So these q become binary. What is left after that is rounding, and a little less room cures it.
    """
    is_highs = options.solver.lower() == "highs"  # no other asks whether to go on
    stepwise: set[int] = set()
    tightened_bytes = 0
    bound_s: float | None = None
    while True:
        columns, rows, time_scale = build(problem, found, problem.dynamic_budget_bytes - tightened_bytes, grid)
        if rows.fixed_peak_bytes > problem.dynamic_budget_bytes:
            return PassOutcome(Solution(Outcome.INFEASIBLE), hopeless=True)
        columns.make_stepwise(stepwise)
        start = None
        if seed is not None:
            start = start_from(columns, seed.kept, seed.early, seed.offloaded)
            rows.fill(start)
        enough = _step_gap(options) * problem.base_time_s * time_scale
        seed_s = math.inf if seed is None else seed.extra_s
        limits = Limits(
            relative_gap=options.gap,
            absolute_gap=_SMALL_STEP * enough,
            time_limit_s=max(0.1, (deadline if is_highs else min(deadline, patience.hope)) - time.perf_counter()),
            threads=options.threads,
            sub_mips=columns.slots is not None,
            ends=partial(patience.ends, enough, seed_s * time_scale),
        )
        solution = solve(columns.lp, options.solver, limits, start, _in_seconds(options.progress, time_scale))
        if tightened_bytes and solution.outcome is Outcome.INFEASIBLE:
            return PassOutcome(Solution(Outcome.UNKNOWN), bound_s=bound_s)
        if not tightened_bytes:
            bound_s = None if solution.bound is None else max(0.0, solution.bound / time_scale)
        if solution.x is None:
            return PassOutcome(solution, bound_s=bound_s)
        best = decided(problem, columns, solution.x)
        if best.fits:
            return PassOutcome(solution, best, bound_s)
        fractional = columns.fractional_steps(solution.x) - stepwise
        stepwise |= fractional
        if not fractional:
            if tightened_bytes:
                return PassOutcome(solution, bound_s=bound_s)
            tightened_bytes = best.peak_bytes - problem.budget_bytes
        if time.perf_counter() > deadline or solution.interrupted:
            return PassOutcome(solution, bound_s=bound_s)


def _in_seconds(progress: Progress | None, time_scale: float) -> Progress | None:
    """Translate what the solver reports."""
    if progress is None:
        return None
    return lambda elapsed_s, incumbent, bound: progress(
        elapsed_s, None if incumbent is None else incumbent / time_scale, None if bound is None else bound / time_scale
    )


def _step_gap(options: PlannerOptions) -> float:
    """The step gap to stop at: smaller where the caller asks for a smaller gap than usual."""
    return STEP_GAP * min(1.0, options.gap / 0.01)


def status_of(problem: Problem, options: PlannerOptions, extra_s: float, bound_s: float | None) -> Status:
    """Return what a bound proves of a plan."""
    if bound_s is None:
        return Status.FEASIBLE
    missing = extra_s - bound_s
    small = extra_s < _EPSILON_S or missing <= options.gap * extra_s + _EPSILON_S
    return Status.OPTIMAL if small or missing <= STEP_GAP * (problem.base_time_s + extra_s) else Status.FEASIBLE
