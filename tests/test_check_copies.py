"""The checker on schedules that copy: it accepts the valid ones, and what it accepts of the broken ones is right all the same.

Right means: run on symbols (tests/symbolic.py), where a copy reads its source as late as its wait and what is freed before that
is garbage, the step leaves the same contents as the one that keeps everything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from copies import LINKS, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Oddities, random_problem
from symbolic import outcome

from actsolve.check import check
from actsolve.errors import ScheduleError
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.plan import Copies
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, Step, StepKind, build_schedule
from actsolve.simulate import simulate

ODD = Oddities(multi_output=0.35, random_op=0.25, in_place=0.5, held_output=0.2, update=0.15)
F, B = Phase.FORWARD, Phase.BACKWARD
COPY_STEPS = (StepKind.COPY_OUT, StepKind.WAIT_OUT, StepKind.COPY_BACK, StepKind.WAIT_BACK)


def case(seed: int) -> tuple[Problem, Schedule]:
    rng = random.Random(seed)
    drawn = random_problem(rng, odd=ODD if seed % 2 else Oddities())
    problem = replace(drawn, budget_bytes=2**60, host_budget_bytes=None, links=LINKS, min_offload_bytes=1)
    return problem, random_schedule(problem, rng, share=rng.choice((0.5, 1.0)))


def cases(n: int) -> Iterator[tuple[Problem, Schedule]]:
    return (case(seed) for seed in range(n))


def kept_all(graph: Graph) -> Schedule:
    return build_schedule(graph, frozenset(graph.decidable))


def refused_or_right(problem: Problem, steps: list[Step]) -> bool:
    """Whether the checker refuses ``steps``; if not, they must compute the same."""
    try:
        check(problem, Schedule(tuple(steps)))
    except ScheduleError:
        return True
    assert outcome(problem.graph, Schedule(tuple(steps))) == outcome(problem.graph, kept_all(problem.graph))
    return False


def test_every_built_schedule_is_accepted_and_right() -> None:
    n_copies = 0
    for problem, schedule in cases(400):
        assert check(problem, schedule) == simulate(problem, schedule).peak_bytes
        assert outcome(problem.graph, schedule) == outcome(problem.graph, kept_all(problem.graph))
        n_copies += sum(step.kind is StepKind.COPY_BACK for step in schedule.steps)
    assert n_copies > 400


def test_no_step_of_a_copy_can_be_left_out() -> None:
    for problem, schedule in cases(150):
        for number, step in enumerate(schedule.steps):
            if step.kind in COPY_STEPS:
                assert refused_or_right(problem, [*schedule.steps[:number], *schedule.steps[number + 1 :]]), step


def test_no_step_of_a_copy_can_be_done_twice() -> None:
    for problem, schedule in cases(100):
        for number, step in enumerate(schedule.steps):
            if step.kind in COPY_STEPS:
                assert refused_or_right(problem, [*schedule.steps[: number + 1], *schedule.steps[number:]]), step


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 500), st.data())
def test_whatever_is_moved_the_schedule_is_refused_or_right(seed: int, data: st.DataObject) -> None:
    """Up to three steps, copies and waits first of all, are moved, swapped or dropped."""
    problem, schedule = case(seed)
    steps = list(schedule.steps)
    for _ in range(data.draw(st.integers(1, 3))):
        places = [i for i, s in enumerate(steps) if s.value is not None] or list(range(len(steps)))
        at = data.draw(st.sampled_from(places))
        other = data.draw(st.integers(0, len(steps) - 1))
        change = data.draw(st.sampled_from(("move", "swap", "drop", "next")))
        if change == "move":
            steps.insert(other, steps.pop(at))
        elif change == "swap":
            steps[at], steps[other] = steps[other], steps[at]
        elif change == "next" and at + 1 < len(steps):
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
        elif len(steps) > 1:
            steps.pop(at)
    refused_or_right(problem, steps)


# -- each rule by its message, on a schedule of one copy ------------------------------------------------------------------

VALUES = (
    Value("x", 64, Kind.INPUT),
    Value("a", 64, producer=0),
    Value("b", 64, producer=1),
    Value("loss", 4, producer=2),
    Value("tangent", 4, Kind.TANGENT),
    Value("gb", 64, producer=3),
    Value("ga", 64, producer=4),
)
OPS = (
    Op("f0", "f0", F, (0,), (1,)),
    Op("f1", "f1", F, (1,), (2,)),
    Op("f2", "f2", F, (2,), (3,)),
    Op("b2", "b2", B, (4, 2), (5,), replayable=False),
    Op("b1", "b1", B, (5, 1), (6,), replayable=False),
)
ONE = Graph(OPS, VALUES, outputs=(3,), gradients=(6,)).verify()
PROBLEM = Problem(ONE, Costs((1.0,) * 5, (1.0,) * 5, (0,) * 5), 2**40, links=LINKS, min_offload_bytes=1)
OFFLOADED = build_schedule(ONE, frozenset({2}), offloaded={1: Copies(free_at=3, back_at=3)})
OUT, WAIT_OUT, FREE, BACK, WAIT_BACK = (
    Step(kind, value=1) for kind in (StepKind.COPY_OUT, StepKind.WAIT_OUT, StepKind.FREE, StepKind.COPY_BACK, StepKind.WAIT_BACK)
)


def without(step: Step) -> list[Step]:
    return [s for s in OFFLOADED.steps if s != step]


def moved(step: Step, before: Step) -> list[Step]:
    steps = without(step)
    steps.insert(steps.index(before), step)
    return steps


def broken() -> dict[str, list[Step]]:
    return {
        "is read before its return was waited for": moved(Step(StepKind.COMPUTE, op=4), WAIT_BACK),
        "is freed before its copy out was waited for": moved(FREE, WAIT_OUT),
        "is copied back before its copy out has ended": moved(BACK, WAIT_OUT),
        "the copy out of a is waited for, and there is none": moved(WAIT_OUT, OUT),
        "the copy back of a is waited for, and there is none": moved(WAIT_BACK, BACK),
        "a is copied out and not live": moved(OUT, Step(StepKind.COMPUTE, op=0)),
        "a is copied back and on the device already": without(FREE),
    }


def test_the_schedule_that_is_broken_below_is_valid() -> None:
    kinds = [(s.kind, s.value) for s in OFFLOADED.steps if s.value == 1]
    assert [kind for kind, _ in kinds] == [*(s.kind for s in (OUT, WAIT_OUT, FREE, BACK, WAIT_BACK)), StepKind.FREE]
    check(PROBLEM, OFFLOADED)


@pytest.mark.parametrize("message", broken())
def test_a_broken_rule_is_named(message: str) -> None:
    with pytest.raises(ScheduleError, match=message.removeprefix("is ")):
        check(PROBLEM, Schedule(tuple(broken()[message])))


def test_more_than_the_host_budget_is_refused() -> None:
    with pytest.raises(ScheduleError, match="64 bytes are offloaded, more than the host's budget of 63 bytes"):
        check(replace(PROBLEM, host_budget_bytes=63), OFFLOADED)
