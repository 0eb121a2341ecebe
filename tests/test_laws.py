"""What must hold for every planner on every graph (STYLE.md, Tests, Laws), on random training graphs without torch."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from strategies import PLAIN, Oddities, budget_range, random_problem
from symbolic import outcome

from actsolve.check import check
from actsolve.errors import ScheduleError
from actsolve.plan import Plan, Status
from actsolve.plan_file import load_plan, plan_file
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PLANNERS, QUICK, PlannerOptions, plan
from actsolve.problem import Problem
from actsolve.schedule import StepKind, build_schedule
from actsolve.simulate import Timeline, simulate

N_GRAPHS = 500
UNLIMITED = 2**50
OPTIONS = PlannerOptions(gap=0.0, time_limit_s=20.0, threads=1)
KINDS = (Oddities(), PLAIN, Oddities(multi_output=0.4, in_place=0.5, random_op=0.4, update=0.2, not_replayable=0.2))


def problem_of(seed: int) -> Problem:
    return random_problem(seed, odd=KINDS[seed % len(KINDS)])


@cache
def planned(name: str, seed: int) -> Plan:
    return plan(problem_of(seed), name, OPTIONS)


def timeline(problem: Problem, found: Plan) -> Timeline:
    return simulate(problem, schedule_of(problem.graph, found))


def fitting_baselines(problem: Problem, seed: int) -> list[Timeline]:
    timelines = [timeline(problem, p) for name in QUICK if (p := planned(name, seed)).found]
    return [t for t in timelines if t.fits]


# Those that offload: see test_laws_offload; the others that are left out have nothing to do on these graphs.
@pytest.mark.parametrize("name", [n for n in PLANNERS if not n.startswith("offload") and n not in ("selective", "torch_budget")])
def test_the_checker_accepts_every_schedule_and_agrees_on_the_peak(name: str) -> None:
    n_found = n_replays = 0
    for seed in range(N_GRAPHS):
        problem = problem_of(seed)
        found = planned(name, seed)
        if not found.found:
            assert not found.kept
            continue
        n_found += 1
        simulated = timeline(problem, found)
        peak = check(replace(problem, budget_bytes=UNLIMITED), simulated.schedule)
        assert peak == simulated.peak_bytes, seed
        n_replays += sum(step.kind is StepKind.REPLAY for step in simulated.schedule.steps)
        keep_everything = build_schedule(problem.graph, frozenset(problem.graph.decidable))
        assert outcome(problem.graph, simulated.schedule) == outcome(problem.graph, keep_everything), seed
    assert n_found > N_GRAPHS // 3
    assert name == "keep_all" or n_replays > 50


def test_milp_is_never_over_budget() -> None:
    statuses = dict.fromkeys(Status, 0)
    for seed in range(N_GRAPHS):
        problem, found = problem_of(seed), planned("milp", seed)
        statuses[found.status] += 1
        if found.found:
            assert check(problem, schedule_of(problem.graph, found)) <= problem.budget_bytes, seed
    assert statuses[Status.OPTIMAL] > N_GRAPHS // 2
    assert statuses[Status.INFEASIBLE] > 10  # tight budgets are tried, too
    assert statuses[Status.UNKNOWN] == 0


def test_milp_is_never_worse_than_a_baseline_that_fits() -> None:
    compared = beaten = 0
    for seed in range(N_GRAPHS):
        problem, found = problem_of(seed), planned("milp", seed)
        for baseline in fitting_baselines(problem, seed):
            assert found.found, seed
            mine = timeline(problem, found)
            assert mine.step_s <= baseline.step_s + 1e-12, seed
            compared += 1
            beaten += mine.step_s < baseline.step_s - 1e-12
    assert compared > 100
    assert beaten > 10


def test_the_bound_is_below_what_was_found() -> None:
    """And an optimal plan is within its gap of the bound."""
    for seed in range(N_GRAPHS):
        problem, found = problem_of(seed), planned("milp", seed)
        if not found.found:
            continue
        extra = timeline(problem, found).recompute_s
        if found.bound_s is not None:
            assert 0 <= found.bound_s <= extra + 1e-9, seed
        if found.status is Status.OPTIMAL:
            assert found.bound_s is not None
            assert extra - found.bound_s <= max(1e-9, 0.01 * extra, 0.0005 * (problem.base_time_s + extra)), seed


def test_milp_equals_brute_force() -> None:
    """Over every set of kept values: none fits where milp says so, and else none is faster by more than the step gap."""
    n_tried = n_none = 0
    for seed in range(200):
        problem, found = problem_of(seed), planned("milp", seed)
        decidable = problem.graph.decidable
        if len(decidable) > 6:
            continue
        n_tried += 1
        least_s = least_step_s(problem)
        n_none += least_s is None
        assert found.found or least_s is None, seed
        if least_s is not None:
            assert timeline(problem, found).step_s <= least_s * 1.0005 + 1e-12, seed
    assert n_tried > 100 and n_none > 10


def least_step_s(problem: Problem) -> float | None:
    """The least step time over all sets of kept values, or None if none fits."""
    decidable = problem.graph.decidable
    least: float | None = None
    for n_kept in range(len(decidable) + 1):
        for kept in combinations(decidable, n_kept):
            try:
                simulated = simulate(problem, build_schedule(problem.graph, frozenset(kept)))
            except ScheduleError:  # a value that cannot be replayed is not kept
                continue
            if simulated.fits and (least is None or simulated.step_s < least):
                least = simulated.step_s
    return least


def test_an_unlimited_budget_keeps_everything() -> None:
    for seed in range(N_GRAPHS):
        problem = replace(problem_of(seed), budget_bytes=UNLIMITED)
        found = plan(problem, "milp", OPTIONS)
        assert found.status is Status.OPTIMAL
        simulated = timeline(problem, found)
        assert simulated.recompute_s == 0
        assert all(step.kind is not StepKind.REPLAY for step in simulated.schedule.steps)
        assert simulated.step_s == pytest.approx(problem.base_time_s, abs=1e-12)


def test_the_budget_of_keep_all_is_enough_to_replay_nothing() -> None:
    for seed in range(N_GRAPHS):
        problem = problem_of(seed)
        peak = timeline(problem, planned("keep_all", seed)).peak_bytes
        found = plan(replace(problem, budget_bytes=peak), "milp", OPTIONS)
        assert timeline(problem, found).recompute_s == 0


def test_more_budget_never_costs_time() -> None:
    """Within the step gap at which a plan counts as optimal."""
    n_budgets = 0
    for seed in range(200):
        problem = problem_of(seed)
        low, high = budget_range(problem)
        best: float | None = None
        for budget in sorted(random.Random(seed).sample(range(low, high + 1), k=min(5, high + 1 - low))):
            with_budget = replace(problem, budget_bytes=budget)
            found = plan(with_budget, "milp", OPTIONS)
            if not found.found:
                assert best is None, (seed, budget)
                continue
            step_s = timeline(with_budget, found).step_s
            assert best is None or step_s <= best * 1.0005 + 1e-12, (seed, budget)
            best = step_s if best is None else min(best, step_s)
            n_budgets += 1
    assert n_budgets > 120


def test_an_impossible_budget_is_refused() -> None:
    """One byte less than the widest op needs, or than what is static."""
    for seed in range(100):
        problem = problem_of(seed)
        low, _ = budget_range(problem)
        for budget in (low - 1, problem.static_bytes - 1, 0):
            found = plan(replace(problem, budget_bytes=budget), "milp", OPTIONS)
            assert not found.found and not found.kept, (seed, budget)


@pytest.mark.parametrize("name", PLANNERS)
def test_the_same_input_gives_the_same_plan(name: str) -> None:
    for seed in range(0, N_GRAPHS, 5):
        again = plan(problem_of(seed), name, OPTIONS)
        assert replace(again, solve_s=0.0) == replace(planned(name, seed), solve_s=0.0), seed


def test_plans_round_trip_through_their_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for seed in range(0, N_GRAPHS, 10):
        problem, found = problem_of(seed), planned("milp", seed)
        schedule = schedule_of(problem.graph, found) if found.found else None
        file = plan_file(problem, found, schedule, target=str(seed))
        file.save(path)
        assert load_plan(path) == file
        if schedule is not None:
            assert load_plan(path).decode(problem.graph) == (schedule, found.kept)
