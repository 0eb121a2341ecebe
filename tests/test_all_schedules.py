"""Brute force over all schedules: it is right, and the planner that users get is never below it and seldom above it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from all_schedules import ANYWHERE, BACKWARD_ONLY, Cheapest, Rules, cheapest, least_budget
from hypothesis import given, settings
from replayed_often import random_replays
from strategies import problems, random_problem

from actsolve.check import check
from actsolve.dag import dag_of
from actsolve.errors import ScheduleError
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PlannerOptions, plan
from actsolve.planners.dag_search import DagSearch
from actsolve.problem import Costs, Problem
from actsolve.replays import replaying_schedule
from actsolve.schedule import Schedule, Step, StepKind, build_schedule
from actsolve.simulate import simulate

MOST_OPS = 14
EXACT = PlannerOptions(gap=0.0, threads=1)


def small_problems(n: int, most_ops: int = MOST_OPS) -> Iterator[tuple[int, Problem]]:
    """The first ``n`` random problems of at most so many ops, with their seeds."""
    drawn = ((seed, random_problem(seed)) for seed in itertools.count(1))
    return itertools.islice(((seed, p) for seed, p in drawn if len(p.graph.ops) <= most_ops), n)


def budgets(problem: Problem, n: int, rules: Rules) -> list[int]:
    """The least budget that a schedule fits, and others up to where keeping everything fits; the last is left out."""
    low, high = least_budget(problem, rules), keep_all_peak(problem)
    return sorted({low + (high - low) * i // n for i in range(n)})


def keep_all_peak(problem: Problem) -> int:
    return simulate(problem, build_schedule(problem.graph, frozenset(problem.graph.decidable))).peak_bytes


def as_schedule(found: Cheapest) -> Schedule:
    """What brute force does, in the terms of the checker."""
    steps = []
    for action in found.actions:
        if action.op is None:
            steps.append(Step(StepKind.FREE, value=action.value))
        else:
            kind = StepKind.REPLAY if action.again else StepKind.COMPUTE
            steps.append(Step(kind, op=action.op, in_place=action.in_place))
    return Schedule(tuple(steps))


@pytest.mark.parametrize(("rules", "n"), [(BACKWARD_ONLY, 60), (ANYWHERE, 100)])
def test_the_checker_finds_the_peak_and_the_cost_that_brute_force_says(rules: Rules, n: int) -> None:
    for seed, problem in small_problems(n):
        for budget in budgets(problem, 3, rules):
            within = replace(problem, budget_bytes=budget)
            found = cheapest(within, rules)
            assert found is not None
            schedule = as_schedule(found)
            assert check(within, schedule) == found.peak_bytes <= budget, seed
            timeline = simulate(within, schedule)
            assert timeline.peak_bytes == found.peak_bytes, seed
            assert timeline.recompute_s == pytest.approx(found.extra_s), seed
        assert cheapest(replace(problem, budget_bytes=least_budget(problem, rules) - 1), rules) is None


def test_no_set_of_kept_values_is_better_and_mostly_one_is_as_good() -> None:
    n = n_equal = 0
    for seed, problem in small_problems(90):
        if len(problem.graph.decidable) > 6:
            continue
        known = list(demanded(problem))
        assert least_budget(problem) <= min(peak for peak, _ in known), seed
        for budget in {peak for peak, _ in known}:
            found = cheapest(replace(problem, budget_bytes=budget))
            best = min(extra_s for peak, extra_s in known if peak <= budget)
            assert found is not None and found.extra_s <= best + 1e-9, seed
            n += best > 0
            n_equal += best > 0 and found.extra_s > best - 1e-9
    assert n >= 40 and n_equal >= 0.9 * n


def demanded(problem: Problem) -> Iterator[tuple[int, float]]:
    """The peak and the extra time of every set of kept values, replayed on demand."""
    decidable = problem.graph.decidable
    for bits in itertools.product((True, False), repeat=len(decidable)):
        try:
            schedule = build_schedule(problem.graph, frozenset(v for v, bit in zip(decidable, bits, strict=True) if bit))
        except ScheduleError:
            continue
        timeline = simulate(problem, schedule)
        yield timeline.peak_bytes, timeline.recompute_s


def test_no_schedule_that_replays_at_random_is_better() -> None:
    n_equal = 0
    for seed, problem in small_problems(150):
        for drop in (0.1, 0.3, 0.6):
            schedule = replaying_schedule(problem.graph, random_replays(problem.graph, seed, drop))
            timeline = simulate(problem, schedule)
            found = cheapest(replace(problem, budget_bytes=timeline.peak_bytes))
            assert found is not None and found.extra_s <= timeline.recompute_s + 1e-9, seed
            n_equal += found.extra_s > timeline.recompute_s - 1e-9
    assert n_equal > 20


def test_fewer_rules_are_never_dearer() -> None:
    tighter = [Rules(in_place=False), Rules(ordered=True), Rules(once=True), BACKWARD_ONLY, ANYWHERE]
    n_less = dict.fromkeys(tighter, 0)
    for seed, problem in small_problems(120, 12):
        within = replace(problem, budget_bytes=least_budget(problem, ANYWHERE))
        extra = [float("inf") if (found := cheapest(within, rules)) is None else found.extra_s for rules in tighter]
        assert extra[0] >= extra[3] - 1e-9 and extra[1] >= extra[2] - 1e-9 and sorted(extra[2:], reverse=True) == extra[2:], seed
        for rules, value in zip(tighter, extra, strict=True):
            n_less[rules] += value > extra[-1] + 1e-9
    assert n_less[BACKWARD_ONLY] > 0


def test_a_replay_in_the_forward_where_nothing_else_fits() -> None:
    """a = f(x), b = g(a), c = h(b, a): ``a`` is large, and is made again after ``b``'s narrow place."""
    a, b, w, c = 1, 2, 3, 4
    values = (
        Value("x", 1, Kind.INPUT),
        Value("a", 4, producer=0),
        Value("b", 1, producer=1),
        Value("w", 1, producer=2),
        Value("c", 1, producer=3),
    )
    ops = (
        Op("fa", "t.fa", Phase.FORWARD, (0,), (a,)),
        Op("fb", "t.fb", Phase.FORWARD, (a,), (b,)),
        Op("fw", "t.fw", Phase.FORWARD, (b,), (w,)),
        Op("fc", "t.fc", Phase.FORWARD, (a, w), (c,)),
    )
    graph = Graph(ops, values, outputs=(c,)).verify()
    problem = Problem(graph, Costs((1.0,) * 4, (1.0,) * 4, (0, 0, 3, 0)), budget_bytes=6)
    assert cheapest(problem) is None
    found = cheapest(problem, ANYWHERE)
    assert found is not None and found.extra_s == 1.0 and found.peak_bytes == 6 and found.forward_replays == 1
    assert [a.op for a in found.actions if a.op is not None] == [0, 1, 2, 0, 3]


@pytest.fixture(scope="module")
def tight() -> list[tuple[int, Problem, float]]:
    """60 random graphs within the least budget that a schedule fits, where that has to replay; and the least extra time."""
    found: list[tuple[int, Problem, float]] = []
    for seed, problem in small_problems(10_000):
        within = replace(problem, budget_bytes=least_budget(problem, ANYWHERE))
        best = cheapest(within, ANYWHERE)
        assert best is not None
        if best.extra_s > 0:
            found.append((seed, within, best.extra_s))
        if len(found) == 60:
            break
    return found


def test_a_plan_is_never_below_brute_force_and_seldom_missed(tight: list[tuple[int, Problem, float]]) -> None:
    missed, excess = 0, 0.0
    for seed, within, best_s in tight:
        found = plan(within, "milp", EXACT)
        assert found.bounds_forward and (found.global_bound_s or 0.0) <= best_s + 1e-9, seed
        if not found.found:
            missed += 1
            continue
        timeline = simulate(within, schedule_of(within.graph, found))
        assert check(within, timeline.schedule) == timeline.peak_bytes
        assert timeline.extra_s >= best_s - 1e-9, seed
        excess += timeline.extra_s / best_s - 1
    assert missed <= 0.02 * len(tight)
    assert excess <= 0.01 * len(tight)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems(max_forward=5))
def test_law_what_fits_is_found_and_what_is_found_costs_least(problem: Problem) -> None:
    best, found = cheapest(problem, ANYWHERE), plan(problem, "milp", EXACT)
    assert found.found == (best is not None)
    if best is not None:
        timeline = simulate(problem, schedule_of(problem.graph, found))
        assert check(problem, timeline.schedule) == timeline.peak_bytes <= problem.budget_bytes
        assert timeline.extra_s == pytest.approx(best.extra_s)


def proven(problem: Problem, *, anywhere: bool = False) -> float:
    """What the program over segments proves, before it is cut to what a plan takes; infinite if it says that nothing fits."""
    search = DagSearch(dag_of(problem, anywhere=anywhere), EXACT)
    search.take(search.runner.run(np.arange(search.dag.n_nodes)))
    search.prove(1.0)
    return float("inf") if search.infeasible else search.bound


def test_nothing_is_proven_that_is_not_so(tight: list[tuple[int, Problem, float]]) -> None:
    for seed, within, best_s in tight:
        assert proven(within, anywhere=True) <= best_s + 1e-9, seed
        backward = cheapest(within)
        assert backward is None or proven(within) <= backward.extra_s + 1e-9, seed


@pytest.mark.parametrize(("seed", "budget"), [(50075, 54), (50285, 54)])
def test_nor_of_graphs_that_need_an_early_replay(seed: int, budget: int) -> None:
    within = replace(random_problem(seed, 7), budget_bytes=budget)
    best = cheapest(within)
    assert best is not None and proven(within) <= best.extra_s + 1e-9


def test_a_replay_before_what_it_reads_goes() -> None:
    """``x`` is large, and gone after b3; ``v``, of ``x``, is small, and read after a narrow place: it is made again before."""
    x0, tangent, x, v, y, z, g_y, h, g_v = range(9)
    sizes = {"x": 10, "v": 1, "y": 1, "z": 1, "g_y": 1, "h": 1, "g_v": 1}
    given = (Value("x0", 0, Kind.INPUT), Value("tangent", 1, Kind.TANGENT))
    values = (*given, *(Value(name, size, producer=i) for i, (name, size) in enumerate(sizes.items())))
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    ops = (
        Op("f0", "t.f0", forward, (x0,), (x,), replayable=False),
        Op("f1", "t.f1", forward, (x,), (v,)),
        Op("f2", "t.f2", forward, (v,), (y,)),
        Op("f3", "t.f3", forward, (x, y), (z,)),
        Op("b3", "t.b3", backward, (tangent, x), (g_y,), replayable=False),
        Op("narrow", "t.narrow", backward, (g_y,), (h,), replayable=False),
        Op("b2", "t.b2", backward, (h, v), (g_v,), replayable=False),
    )
    graph = Graph(ops, values, outputs=(z,), gradients=(g_v,)).verify()
    problem = Problem(graph, Costs((1.0,) * 7, (1.0,) * 7, (0, 0, 0, 2, 0, 9, 0)), budget_bytes=14)
    best = cheapest(problem)
    assert best is not None and best.extra_s == 1.0
    found = plan(problem, "milp", EXACT)
    assert found.found and simulate(problem, schedule_of(graph, found)).extra_s == 1.0
