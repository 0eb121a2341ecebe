"""The program over windows against brute force: over its own rows, over exact memory, and against the baselines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import PLAIN, Oddities, budget_range, problems, random_problem

from actsolve.errors import ScheduleError, UsageError
from actsolve.plan import Plan, Status
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PlannerOptions, smallest_budget
from actsolve.planners import plan as any_plan
from actsolve.planners.lp import LinearModel
from actsolve.planners.milp import milp
from actsolve.planners.milp_rows import Columns, start_from
from actsolve.planners.model import build
from actsolve.planners.required import replayed
from actsolve.planners.windows import windows
from actsolve.problem import Problem
from actsolve.schedule import build_schedule
from actsolve.simulate import simulate

BASELINES = ("keep_all", "sqrt_l", "per_layer")  # no problem here has links, nor attention
EXACT = PlannerOptions(gap=0.0, threads=1)
USUAL = Oddities()
NO_COPIES = Oddities(multi_output=0, update=0)


def plan(problem: Problem, name: str, options: PlannerOptions | None = None) -> Plan:
    """The plan of a baseline, or that of the windows alone: users get what `certified` makes of it."""
    return milp(problem, options) if name == "milp" else any_plan(problem, name, options)


def subsets(problem: Problem) -> list[frozenset[int]]:
    """Every set of kept values that has a schedule."""
    decidable = problem.graph.decidable
    found = []
    for bits in itertools.product((False, True), repeat=len(decidable)):
        kept = frozenset(v for v, bit in zip(decidable, bits, strict=True) if bit)
        try:
            build_schedule(problem.graph, kept)
        except ScheduleError:
            continue
        found.append(kept)
    return found


def brute_force(problem: Problem) -> float | None:
    """The least extra time over all sets of kept values that fit, by exact simulation."""
    timelines = (simulate(problem, build_schedule(problem.graph, kept)) for kept in subsets(problem))
    return min((t.recompute_s for t in timelines if t.fits), default=None)


def violated(model: LinearModel, x: np.ndarray) -> bool:
    """Whether ``x`` breaks a row or a bound of ``model``."""
    lower, upper = np.array(model.column_lower), np.array(model.column_upper)
    if (x < lower - 1e-6).any() or (x > upper + 1e-6).any():
        return True
    for row in range(model.n_rows):
        span = slice(model.row_start[row], model.row_start[row + 1])
        value = float(np.dot(x[model.index[span]], model.coefficient[span]))
        if not model.row_lower[row] - 1e-6 <= value <= model.row_upper[row] + 1e-6:
            return True
    return False


def every_early(columns: Columns, kept: frozenset[int]) -> Iterator[dict[int, int]]:
    """Every choice of a position for every op that keeping ``kept`` replays."""
    ops = sorted(replayed(columns.windows.graph, kept))
    for positions in itertools.product(*(columns.windows.demands[f] for f in ops)):
        yield dict(zip(ops, positions, strict=True))


def small(seed: int, odd: Oddities = USUAL, most: int = 7) -> Problem:
    """The first problem from ``seed`` on with something to decide, but not too much."""
    while True:
        problem = random_problem(seed, odd=odd)
        if 1 <= len(problem.graph.decidable) <= most:
            return problem
        seed += 1000


@pytest.mark.parametrize("seed", range(60))
def test_milp_equals_brute_force_over_its_own_rows(seed: int) -> None:
    problem = small(seed)
    columns, rows, time_scale = build(problem, windows(problem), problem.dynamic_budget_bytes)
    costs = []
    for kept in subsets(problem):
        for early in every_early(columns, kept):
            x = start_from(columns, kept, early)
            rows.fill(x)
            if not violated(columns.lp, x) and rows.fixed_peak_bytes <= problem.dynamic_budget_bytes:
                costs.append(float(np.dot(x, columns.lp.cost)) / time_scale)
                break
    found = plan(problem, "milp", EXACT)
    if costs:
        assert found.found
        extra_s = simulate(problem, build_schedule(problem.graph, found.kept)).recompute_s
        assert found.bound_s == pytest.approx(min(min(costs), extra_s))
        assert extra_s <= min(costs) + 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_the_rows_are_exact_without_copies_and_conservative_with_them(seed: int) -> None:
    for odd in (PLAIN, NO_COPIES, Oddities()):
        problem = small(seed, odd)
        columns, rows, _ = build(problem, windows(problem), problem.dynamic_budget_bytes)
        for kept in subsets(problem):
            x = start_from(columns, kept, {})
            rows.fill(x)
            fits_rows = not violated(columns.lp, x) and rows.fixed_peak_bytes <= problem.dynamic_budget_bytes
            fits = simulate(problem, build_schedule(problem.graph, kept)).fits
            assert fits or not fits_rows  # the rows never let through what does not fit


@pytest.mark.parametrize("seed", range(60))
def test_milp_equals_brute_force_over_exact_memory_on_plain_graphs(seed: int) -> None:
    problem = small(seed, PLAIN)
    expected = brute_force(problem)
    found = plan(problem, "milp", EXACT)
    if expected is None:
        assert found.status is Status.INFEASIBLE
    else:
        assert found.status is Status.OPTIMAL
        assert simulate(problem, build_schedule(problem.graph, found.kept)).recompute_s == pytest.approx(expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_never_over_budget_and_never_worse_than_a_baseline(problem: Problem) -> None:
    found = plan(problem, "milp", PlannerOptions(threads=1))
    if not found.found:
        for name in BASELINES:
            assert not simulate(problem, build_schedule(problem.graph, plan(problem, name).kept)).fits
        return
    timeline = simulate(problem, build_schedule(problem.graph, found.kept))
    assert timeline.fits
    assert found.bound_s is None or found.bound_s <= timeline.recompute_s + 1e-9
    for name in BASELINES:
        other = simulate(problem, build_schedule(problem.graph, plan(problem, name).kept))
        assert not other.fits or timeline.step_s <= other.step_s + 1e-9


@pytest.mark.parametrize("seed", range(15))
def test_more_budget_never_costs_time(seed: int) -> None:
    problem = small(seed)
    low, high = budget_range(problem)
    before = float("inf")
    for budget in np.linspace(low, high, 6).astype(int):
        found = plan(replace(problem, budget_bytes=int(budget)), "milp", EXACT)
        if found.found:
            extra_s = simulate(problem, build_schedule(problem.graph, found.kept)).recompute_s
            assert extra_s <= before + 1e-9
            before = extra_s
        else:
            assert before == float("inf")
    assert before == 0.0


@pytest.mark.parametrize("seed", range(12))
def test_cbc_agrees_with_highs(seed: int) -> None:
    problem = small(seed)
    highs, cbc = (plan(problem, "milp", replace(EXACT, solver=solver)) for solver in ("highs", "cbc"))
    assert highs.found == cbc.found
    if highs.found:
        times = [simulate(problem, build_schedule(problem.graph, p.kept)).recompute_s for p in (highs, cbc)]
        assert times[0] == pytest.approx(times[1])
        assert times[1] == 0.0 or cbc.bound_s is None


@pytest.mark.parametrize("seed", range(15))
def test_the_smallest_budget_is_met_and_beats_the_baselines(seed: int) -> None:
    problem = small(seed)
    budget, smallest = smallest_budget(problem, EXACT)
    peak = simulate(problem, schedule_of(problem.graph, smallest)).peak_bytes
    assert peak == budget
    for name in BASELINES:
        assert budget <= simulate(problem, build_schedule(problem.graph, plan(problem, name).kept)).peak_bytes
    found = any_plan(replace(problem, budget_bytes=budget), "milp", replace(EXACT, seeds=(smallest,)))
    assert found.found


def test_the_same_input_gives_the_same_plan() -> None:
    for seed in range(5):
        problem = small(seed)
        assert plan(problem, "milp", EXACT).kept == plan(problem, "milp", EXACT).kept


def test_a_budget_that_fits_keep_all_keeps_all() -> None:
    problem = small(1)
    found = plan(replace(problem, budget_bytes=budget_range(problem)[1]), "milp", EXACT)
    assert (found.status, found.bound_s) == (Status.OPTIMAL, 0.0)
    assert simulate(problem, build_schedule(problem.graph, found.kept)).recompute_s == 0.0


def test_a_budget_below_the_static_bytes_is_proven_infeasible() -> None:
    problem = replace(small(1), budget_bytes=3, static_bytes=5)
    found = plan(problem, "milp", EXACT)
    assert found.status is Status.INFEASIBLE and not found.found


@pytest.mark.parametrize("seed", range(30))
def test_pins_are_honoured(seed: int) -> None:
    problem = small(seed)
    for v in problem.graph.decidable:
        kept = plan(replace(problem, pinned_keep=frozenset({v})), "milp", EXACT)
        assert not kept.found or v in kept.kept
        try:
            dropped = plan(replace(problem, pinned_recompute=frozenset({v})), "milp", EXACT)
        except UsageError as error:
            assert problem.graph.values[v].name in str(error)
            assert not problem.graph.ops[problem.graph.values[v].producer or 0].replayable
        else:
            assert not dropped.found or v not in dropped.kept


def test_a_window_that_is_too_narrow_is_widened() -> None:
    for seed in range(40):
        problem = small(seed, PLAIN)
        wide, narrow = plan(problem, "milp", EXACT), plan(problem, "milp", replace(EXACT, window=1))
        assert wide.found == narrow.found
