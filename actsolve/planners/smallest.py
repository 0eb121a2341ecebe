"""The smallest budget that a plan is found for, verified by exact simulation."""

from __future__ import annotations

import time
from dataclasses import replace

from actsolve.errors import InfeasibleBudget
from actsolve.plan import Plan, Status
from actsolve.planners.improve import Candidate, candidate, simulations
from actsolve.planners.keep_all import keep_all
from actsolve.planners.lifetimes import write_memory_rows
from actsolve.planners.lp import INFINITY, Limits, solve
from actsolve.planners.milp import check_pins, memory_unit
from actsolve.planners.milp_rows import decision_columns, decisions_of, early_replays, start_from
from actsolve.planners.moments import MemoryRows
from actsolve.planners.options import PlannerOptions
from actsolve.planners.per_layer import per_layer
from actsolve.planners.sqrt_l import sqrt_l
from actsolve.planners.windows import Windows, windows
from actsolve.problem import Problem

_UNLIMITED = 1 << 62
_NARROWEST, _WIDENING = 12, 2.5  # backward ops: windows of half a transformer layer find most of what there is
_PEAK_GAP = 0.01
_TIME_LIMIT_S = 10.0  # the last per cent takes minutes, and leaves no room to save time in


def smallest_budget(problem: Problem, options: PlannerOptions | None = None) -> tuple[int, Plan]:
    """Return the smallest budget found, in bytes, and a plan that meets it.

    It is the least exact peak among those of the baselines, of the MILP that minimises the peak in place of the time, and
    of what local search makes of the best of these. The budget of ``problem`` is not looked at. The plan is not
    minimised for time: hand its kept values to `milp` as a seed, at that budget.

    Raises:
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    options = options or PlannerOptions()
    check_pins(problem)
    deadline = time.perf_counter() + min(options.time_limit_s, _TIME_LIMIT_S)
    problem = replace(problem, budget_bytes=_UNLIMITED)
    seeds = (*options.seeds, *(b(problem) for b in (keep_all, sqrt_l, per_layer)))
    plans = [candidate(problem, seed.kept, seed.early) for seed in seeds]
    plans = [p for p in plans if not p.kept & problem.pinned_recompute]
    best = min(plans, key=_rank, default=None)
    found = _least_peak(problem, options, best, deadline)
    if found is not None and (best is None or _rank(found) < _rank(best)):
        best = found
    if best is None:
        raise InfeasibleBudget("no plan was found at any budget", why="the pinned values leave none")
    best = _descended(problem, best, deadline)
    return best.peak_bytes, Plan("milp", best.kept, best.early, Status.FEASIBLE, note="smallest budget found")


def _rank(plan: Candidate) -> tuple[int, float]:
    return plan.peak_bytes, plan.extra_s


def _least_peak(problem: Problem, options: PlannerOptions, seed: Candidate | None, deadline: float) -> Candidate | None:
    """Solve the MILP for the least peak over wider and wider windows, each pass from the plan of the one before."""
    n_backward = len(problem.graph.ops) - problem.graph.n_forward
    best, width = seed, _NARROWEST
    while time.perf_counter() < deadline:
        found = windows(problem, width if width < n_backward else None)
        new = _least_peak_within(problem, options, found, best, deadline)
        if new is not None and (best is None or _rank(new) < _rank(best)):
            best = new
        if found.whole:
            break
        width = round(width * _WIDENING)
    return best


def _least_peak_within(
    problem: Problem, options: PlannerOptions, found: Windows, seed: Candidate | None, deadline: float
) -> Candidate | None:
    columns = decision_columns(problem, found, time_scale=0.0)
    rows = MemoryRows(columns, None, memory_unit(problem))
    rows.peak = columns.lp.column(cost=1.0, lower=0.0, upper=INFINITY)
    write_memory_rows(problem, columns, rows)
    start = None
    if seed is not None:
        start = start_from(columns, seed.kept, seed.early, columns.lp.n_columns)
        rows.fill(start)
    limits = Limits(_PEAK_GAP, 0.0, max(0.1, deadline - time.perf_counter()), options.threads)
    solution = solve(columns.lp, options.solver, limits, start)
    if solution.x is None:
        return None
    return candidate(problem, decisions_of(columns, solution.x), early_replays(columns, solution.x))


def _descended(problem: Problem, best: Candidate, deadline: float) -> Candidate:
    """Drop or keep one value at a time while the peak falls; first those that are live at the peak."""
    graph, tries = problem.graph, simulations(problem)
    while tries > 0:
        sizes = {v: graph.values[v].size_bytes for v in graph.decidable}
        moves = sorted(sizes, key=lambda v: (v not in best.kept, -sizes[v], v))
        for v in moves:
            if tries <= 0 or time.perf_counter() > deadline:
                return best
            if v in problem.pinned_keep or v in problem.pinned_recompute or not sizes[v]:
                continue
            tries -= 1
            new = candidate(problem, best.kept ^ {v}, best.early)
            if _rank(new) < _rank(best):
                best = new
                break
        else:
            return best
    return best
