"""The smallest budget that a plan is found for, verified by exact simulation."""

from __future__ import annotations

import time
from dataclasses import replace

from actsolve.errors import InfeasibleBudget
from actsolve.plan import Plan
from actsolve.planners.improve import Candidate, candidate
from actsolve.planners.keep_all import keep_all
from actsolve.planners.lifetimes import write_memory_rows
from actsolve.planners.lp import INFINITY, Limits, solve
from actsolve.planners.milp import check_pins
from actsolve.planners.milp_rows import decision_columns, start_from
from actsolve.planners.model import decided, memory_unit
from actsolve.planners.moments import MemoryRows
from actsolve.planners.offload_all import offload_all
from actsolve.planners.offload_boundaries import offload_boundaries
from actsolve.planners.options import PlannerOptions
from actsolve.planners.per_layer import per_layer
from actsolve.planners.slots import Grid
from actsolve.planners.sqrt_l import sqrt_l
from actsolve.planners.windows import Windows, windows
from actsolve.problem import Problem

_NARROWEST, _WIDENING = 12, 4  # backward ops: windows of half a transformer layer find most of what there is
_GRID = Grid(64, whole=0.0)  # a stall costs nothing here
_PEAK_GAP = 0.01
_TIME_LIMIT_S = 10.0


def smallest_budget(problem: Problem, options: PlannerOptions | None = None) -> tuple[int, Plan]:
    """Return the smallest budget found, in bytes, and a plan that meets it.

    It is the least exact peak among those of the baselines and of the MILP that minimises the peak in place of the
    time. Not less: what only a search over exact schedules reaches is a budget at which the MILP can prove nothing.
    The budget of ``problem`` is not looked at. The plan is not minimised for time: hand it to `milp` as a seed, at
    that budget.

    Raises:
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    options = options or PlannerOptions()
    check_pins(problem)
    deadline = time.perf_counter() + min(options.time_limit_s, _TIME_LIMIT_S)
    problem = replace(problem, budget_bytes=0)  # so that what is offloaded leaves at once, and returns at the last moment
    seeds = (*options.seeds, *(b(problem) for b in (keep_all, sqrt_l, per_layer, offload_all, offload_boundaries)))
    plans = [candidate(problem, s.kept, s.early, frozenset(s.offloaded)) for s in seeds if s.found]
    plans = [p for p in plans if _allowed(problem, p)]
    best = min(plans, key=_rank, default=None)
    found = _least_peak(problem, options, best, deadline)
    if found is not None and _allowed(problem, found) and (best is None or _rank(found) < _rank(best)):
        best = found
    if best is None:
        raise InfeasibleBudget("no plan was found at any budget", why="the pinned values leave none")
    return best.peak_bytes, Plan("milp", best.kept, best.early, best.offloaded, note="smallest budget found")


def _allowed(problem: Problem, plan: Candidate) -> bool:
    """Whether a plan honours the pins and the host budget."""
    host = problem.host_budget_bytes
    return not plan.kept & problem.pinned_recompute and (host is None or plan.timeline.host_peak_bytes <= host)


def _rank(plan: Candidate) -> tuple[int, float]:
    return plan.peak_bytes, plan.extra_s


def _least_peak(problem: Problem, options: PlannerOptions, seed: Candidate | None, deadline: float) -> Candidate | None:
    """Solve the MILP for the least peak, over windows that widen until a plan beats the seed.

    Not beyond that: the last per cent of the peak takes minutes, and leaves no room in which to save time.
    """
    n_backward = len(problem.graph.ops) - problem.graph.n_forward
    width = _NARROWEST
    while time.perf_counter() < deadline:
        found = windows(problem, width if width < n_backward else None)
        new = _least_peak_within(problem, options, found, seed, deadline)
        if new is not None and (seed is None or _rank(new) < _rank(seed)):
            return new
        if found.whole:
            break
        width *= _WIDENING
    return None


def _least_peak_within(
    problem: Problem, options: PlannerOptions, found: Windows, seed: Candidate | None, deadline: float
) -> Candidate | None:
    unit = memory_unit(problem)
    columns = decision_columns(problem, found, 0.0, unit, _GRID)
    rows = MemoryRows(columns, None, unit)
    rows.peak = columns.lp.column(cost=1.0, lower=0.0, upper=INFINITY)
    write_memory_rows(problem, columns, rows)
    start = None
    if seed is not None:
        start = start_from(columns, seed.kept, seed.early, seed.offloaded)
        rows.fill(start)
    limits = Limits(_PEAK_GAP, 0.0, max(0.1, deadline - time.perf_counter()), options.threads)
    solution = solve(columns.lp, options.solver, limits, start)
    if solution.x is None:
        return None
    return decided(problem, columns, solution.x)
