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
from actsolve.replays import replaying_schedule, replays_of, saved_by
from actsolve.schedule import StepKind, build_schedule, runs_of
from actsolve.simulate import simulate

UNLIMITED = 1 << 50


def test_the_checker_accepts_it_and_the_step_ends_as_it_should() -> None:
    n_more_than_once = 0
    for seed in range(400):
        problem = replace(random_problem(seed), budget_bytes=UNLIMITED)
        graph = problem.graph
        replays = random_replays(graph, seed)
        schedule = replaying_schedule(graph, replays)
        timeline = simulate(problem, schedule)
        assert check(problem, schedule) == timeline.peak_bytes, seed
        assert outcome(graph, schedule) == outcome(graph, build_schedule(graph, plan(problem, "keep_all").kept)), seed
        told = [op for ops in replays.values() for op in ops]
        done = [s.op for s in schedule.steps if s.kind is StepKind.REPLAY]
        assert Counter(done) == Counter(told)
        assert timeline.recompute_s == pytest.approx(sum(problem.costs.replay_seconds[op] for op in told))
        n_more_than_once += max(Counter(told).values(), default=0) > 1
    assert n_more_than_once > 100


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


def test_what_must_not_be_replayed_is_refused() -> None:
    graphs = (random_problem(seed).graph for seed in range(50))
    graph = next(g for g in graphs if not all(op.replayable for op in g.ops[: g.n_forward]))
    stuck = next(i for i, op in enumerate(graph.ops[: graph.n_forward]) if not op.replayable)
    with pytest.raises(ScheduleError, match="must not be replayed"):
        replaying_schedule(graph, {graph.n_forward: (stuck,)})
