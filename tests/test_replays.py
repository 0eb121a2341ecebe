"""Law: a plan that replays an op more than once is carried out just as any other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from replayed_often import random_replays
from strategies import random_problem
from symbolic import outcome

from actsolve.check import check
from actsolve.errors import ScheduleError
from actsolve.planners import plan
from actsolve.replays import all_runs, replaying_schedule, replays_of, saved_by
from actsolve.schedule import StepKind, build_schedule, runs_of
from actsolve.simulate import simulate
from actsolve.split import first_backward_step

UNLIMITED = 1 << 50


@pytest.mark.parametrize("anywhere", [False, True])
def test_the_checker_accepts_it_and_the_step_ends_as_it_should(anywhere: bool) -> None:
    n_more_than_once = n_in_forward = 0
    for seed in range(400):
        problem = replace(random_problem(seed), budget_bytes=UNLIMITED)
        graph = problem.graph
        replays = random_replays(graph, seed, anywhere=anywhere)
        schedule = replaying_schedule(graph, replays)
        timeline = simulate(problem, schedule)
        assert check(problem, schedule) == timeline.peak_bytes, seed
        assert outcome(graph, schedule) == outcome(graph, build_schedule(graph, plan(problem, "keep_all").kept)), seed
        told = [op for ops in replays.values() for op in ops]
        done = [s.op for s in schedule.steps if s.kind is StepKind.REPLAY]
        assert Counter(done) == Counter(told)
        assert timeline.recompute_s == pytest.approx(sum(problem.costs.replay_seconds[op] for op in told))
        n_more_than_once += max(Counter(told).values(), default=0) > 1
        before = schedule.steps[: first_backward_step(graph, schedule)]
        in_forward = [s.op for s in before if s.kind is StepKind.REPLAY]
        assert Counter(in_forward) == Counter(op for index in range(graph.n_forward) for op in replays.get(index, ()))
        n_in_forward += bool(in_forward)
        assert {i: ops for i, ops in replays_of(graph, all_runs(graph, replays)).items()} == replays
        assert saved_by(graph, replays) <= set(graph.decidable)
    assert n_more_than_once > 100
    assert (n_in_forward > 100) == anywhere


def test_a_plan_that_replays_on_demand_needs_no_more_memory_when_its_replays_are_told() -> None:
    """Often less: where an op is replayed for one of its outputs, another of them ends just before."""
    for seed in range(400):
        problem = replace(random_problem(seed), budget_bytes=UNLIMITED)
        graph = problem.graph
        kept = plan(problem, "per_layer").kept
        replays = replays_of(graph, runs_of(graph, kept))
        told = simulate(problem, replaying_schedule(graph, replays))
        demanded = simulate(problem, build_schedule(graph, kept))
        assert told.step_s == pytest.approx(demanded.step_s)
        assert told.peak_bytes <= demanded.peak_bytes, seed
        assert saved_by(graph, replays) <= kept, seed


def test_what_is_still_to_be_computed_is_not_replayed() -> None:
    graph = random_problem(0).graph
    first = next(i for i, op in enumerate(graph.ops) if op.replayable)
    replaying_schedule(graph, {first + 1: (first,)})
    with pytest.raises(ScheduleError, match="replayed before it was computed"):
        replaying_schedule(graph, {first: (first,)})


def test_what_must_not_be_replayed_is_refused() -> None:
    graphs = (random_problem(seed).graph for seed in range(50))
    graph = next(g for g in graphs if not all(op.replayable for op in g.ops[: g.n_forward]))
    stuck = next(i for i, op in enumerate(graph.ops[: graph.n_forward]) if not op.replayable)
    with pytest.raises(ScheduleError, match="must not be replayed"):
        replaying_schedule(graph, {graph.n_forward: (stuck,)})
