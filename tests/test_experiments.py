"""Schedules with the same decisions and worse times for their copies: valid, and as slow as they are meant to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from copies import LINKS, random_schedule
from strategies import Oddities, random_problem
from symbolic import outcome

from actsolve.check import check
from actsolve.errors import ScheduleError
from actsolve.experiments import late_out, on_demand, synchronous
from actsolve.graph import Graph
from actsolve.problem import Problem
from actsolve.schedule import Schedule, StepKind, build_schedule
from actsolve.simulate import simulate

Change = Callable[[Graph, Schedule], Schedule]
ODD = Oddities(multi_output=0.35, random_op=0.25, in_place=0.5, held_output=0.2, update=0.15)


def cases(n: int) -> Iterator[tuple[Problem, Schedule]]:
    for seed in range(n):
        rng = random.Random(seed)
        drawn = random_problem(rng, odd=ODD if seed % 2 else Oddities())
        problem = replace(drawn, budget_bytes=2**60, host_budget_bytes=None, links=LINKS, min_offload_bytes=1)
        yield problem, random_schedule(problem, rng)


@pytest.mark.parametrize("change", [synchronous, late_out, on_demand])
def test_it_is_valid_and_computes_the_same(change: Change) -> None:
    changed = 0
    for problem, schedule in cases(300):
        graph = problem.graph
        other = change(graph, schedule)
        assert check(problem, other) == simulate(problem, other).peak_bytes
        assert outcome(graph, other) == outcome(graph, build_schedule(graph, frozenset(graph.decidable)))
        assert sum(s.kind is StepKind.COPY_OUT for s in other.steps) == sum(s.kind is StepKind.COPY_OUT for s in schedule.steps)
        changed += other != schedule
    assert changed > 60


def test_synchronous_copies_are_all_waited_for() -> None:
    for problem, schedule in cases(100):
        timeline = simulate(problem, synchronous(problem.graph, schedule))
        alone_s = timeline.d2h_bytes / LINKS.d2h + timeline.h2d_bytes / LINKS.h2d
        assert timeline.stall_s == pytest.approx(alone_s)
        assert timeline.stall_s >= simulate(problem, schedule).stall_s - 1e-12


def test_late_copies_begin_when_the_forward_has_ended() -> None:
    for problem, schedule in cases(100):
        other = late_out(problem.graph, schedule)
        last_run = max(
            i
            for i, s in enumerate(other.steps)
            if s.op is not None and s.op < problem.graph.n_forward and s.kind is StepKind.COMPUTE
        )
        assert all(i > last_run for i, s in enumerate(other.steps) if s.kind is StepKind.COPY_OUT)


def test_copies_on_demand_are_queued_right_before_their_wait() -> None:
    for problem, schedule in cases(100):
        steps = on_demand(problem.graph, schedule).steps
        for i, step in enumerate(steps):
            if step.kind is StepKind.COPY_BACK:
                assert (steps[i + 1].kind, steps[i + 1].value) == (StepKind.WAIT_BACK, step.value)


def test_a_budget_of_the_planned_peak_may_be_too_small() -> None:
    refused = 0
    for problem, schedule in cases(400):
        tight = replace(problem, budget_bytes=check(problem, schedule))
        try:
            check(tight, late_out(problem.graph, schedule))
        except ScheduleError:
            refused += 1
    assert refused > 0
