"""What must hold for every planner where there is a link, on random training graphs without torch."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from strategies import PLAIN, Oddities, random_problem
from symbolic import outcome

from actsolve.check import check
from actsolve.errors import ScheduleError
from actsolve.links import Links
from actsolve.plan import Plan, Status
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PLANNERS, QUICK, PlannerOptions, plan
from actsolve.planners.improve import candidate
from actsolve.problem import Problem
from actsolve.schedule import StepKind, build_schedule
from actsolve.simulate import Timeline, simulate, timeline_of

N_GRAPHS = 200
UNLIMITED = 2**50
OPTIONS = PlannerOptions(gap=0.0, time_limit_s=20.0, threads=1)
KINDS = (Oddities(), PLAIN, Oddities(multi_output=0.4, in_place=0.5, random_op=0.4, update=0.2, not_replayable=0.2))
LINKED = [name for name in PLANNERS if name == "milp" or name.startswith("offload")]


def problem_of(seed: int) -> Problem:
    """A random problem on a machine whose link moves a value of a few bytes in about the time of an op."""
    rng = random.Random(seed)
    speeds = (rng.choice((500.0, 2e3, 1e4)), rng.choice((500.0, 2e3, 1e4)))
    both = (None, None) if rng.random() < 0.3 else tuple(s * rng.uniform(0.4, 1.0) for s in speeds)
    problem = random_problem(seed, rng.choice((None, 8, 12)), odd=KINDS[seed % len(KINDS)])
    host = rng.choice((None, None, 0, 5, 20))
    return replace(problem, links=Links(*speeds, *both), min_offload_bytes=1, host_budget_bytes=host)


@cache
def planned(name: str, seed: int) -> Plan:
    return plan(problem_of(seed), name, OPTIONS)


def timeline(problem: Problem, found: Plan) -> Timeline:
    return simulate(problem, schedule_of(problem.graph, found))


@pytest.mark.parametrize("name", LINKED)
def test_the_checker_accepts_every_schedule_and_agrees_on_the_peak(name: str) -> None:
    n_found = n_copies = n_stalls = 0
    for seed in range(N_GRAPHS):
        problem = replace(problem_of(seed), host_budget_bytes=None)
        found = planned(name, seed)
        if not found.found:
            assert not found.kept and not found.offloaded
            continue
        n_found += 1
        simulated = timeline(problem, found)
        assert check(replace(problem, budget_bytes=UNLIMITED), simulated.schedule) == simulated.peak_bytes, seed
        n_copies += sum(step.kind is StepKind.COPY_BACK for step in simulated.schedule.steps)
        n_stalls += simulated.stall_s > 0
        keep_everything = build_schedule(problem.graph, frozenset(problem.graph.decidable))
        assert outcome(problem.graph, simulated.schedule) == outcome(problem.graph, keep_everything), seed
    assert n_found > N_GRAPHS // 3
    assert n_copies > 20 and n_stalls > 0


def test_milp_is_within_both_budgets_and_never_worse_than_what_fits() -> None:
    """Not than a baseline, nor than the best plan that offloads nothing."""
    n_better = 0
    for seed in range(N_GRAPHS):
        problem, found = problem_of(seed), planned("milp", seed)
        others = [(problem, p) for name in QUICK if (p := planned(name, seed)).found]
        alone = replace(problem, links=None)
        others.append((alone, plan(alone, "milp", OPTIONS)))
        fitting = [t for p, f in others if f.found and (t := timeline(p, f)).fits]
        assert found.found or not fitting, seed
        if not found.found:
            continue
        mine = timeline(problem, found)
        assert mine.fits and check(problem, mine.schedule) <= problem.budget_bytes, seed
        assert found.bound_s is None or 0 <= found.bound_s <= mine.extra_s + 1e-9
        assert all(mine.step_s <= other.step_s + 1e-12 for other in fitting), seed
        n_better += bool(fitting) and mine.step_s < min(other.step_s for other in fitting) - 1e-12
    assert n_better > 5


def test_milp_against_every_choice() -> None:
    """Over every way to keep, offload and recompute, each with its copies where `place` puts them.

    The rows are conservative where there are few ops: a copy back ends a slot early, and all has left soon after the forward.
    """
    n_tried = n_missed = 0
    excess = []
    for seed in range(N_GRAPHS):
        problem, found = problem_of(seed), planned("milp", seed)
        if len(problem.graph.decidable) > 5:
            continue
        least_s = least_extra_s(problem)
        n_tried += 1
        if least_s is None:
            assert not found.found
        elif not found.found:
            n_missed += 1
        else:
            extra_s = timeline(problem, found).extra_s
            assert extra_s >= least_s - 1e-9 or found.early, seed
            excess.append((extra_s - least_s) / (problem.base_time_s + least_s))
    assert n_tried > 50
    assert n_missed <= 0.05 * n_tried
    assert sum(excess) / len(excess) < 0.02


def least_extra_s(problem: Problem) -> float | None:
    """The least extra time over all choices, or None if none fits."""
    least: float | None = None
    decidable = problem.graph.decidable
    for choice in product("kor", repeat=len(decidable)):
        kept, offloaded = (frozenset(v for v, c in zip(decidable, choice, strict=True) if c == letter) for letter in "ko")
        if not offloaded <= problem.offloadable:
            continue
        try:
            found = candidate(problem, kept, {}, offloaded)
        except ScheduleError:
            continue
        if found.fits and (least is None or found.extra_s < least):
            least = found.extra_s
    return least


def test_nothing_is_offloaded_without_host_memory() -> None:
    for seed in range(30):
        problem = replace(problem_of(seed), host_budget_bytes=0)
        found = plan(problem, "milp", OPTIONS)
        assert not found.offloaded
        assert found.status is not Status.OPTIMAL or found.bound_s is not None


def test_to_allow_offloading_costs_no_time() -> None:
    """What only recomputes is one of the plans, also where it replays ops more often than the windows do."""
    for seed in range(25):
        linked = problem_of(seed)
        alone = replace(linked, links=None, host_budget_bytes=None)
        recomputing, joint = plan(alone, "milp", OPTIONS), plan(linked, "milp", OPTIONS)
        if recomputing.found:
            assert joint.found, seed
            extra_s = timeline_of(alone, recomputing).extra_s
            assert timeline_of(linked, joint).extra_s <= extra_s + 1e-9, seed
