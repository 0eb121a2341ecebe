"""The simulator against peaks and times counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, Step, StepKind, build_schedule
from actsolve.simulate import Timeline, simulate

F, B = Phase.FORWARD, Phase.BACKWARD

# x -> a (4) -> b (6) -> c (6, may be written over b) -> out (1, held); gw (5) is the only gradient.
X, A, BB, C, OUT, TANGENT, GC, GB, GA, GW = range(10)
CHAIN = Graph(
    ops=(
        Op("f0", "f", F, (X,), (A,)),
        Op("f1", "f", F, (A,), (BB,)),
        Op("f2", "f", F, (BB,), (C,), in_place=(BB, C)),
        Op("f3", "f", F, (C,), (OUT,)),
        Op("b3", "b", B, (TANGENT, C), (GC,), replayable=False),
        Op("b2", "b", B, (GC,), (GB,), replayable=False, in_place=(GC, GB)),
        Op("b1", "b", B, (GB, A), (GA,), replayable=False),
        Op("b0", "b", B, (GA, X), (GW,), replayable=False),
    ),
    values=(
        Value("x", 100, Kind.INPUT),  # part of the static bytes, so not counted again
        Value("a", 4, producer=0),
        Value("b", 6, producer=1),
        Value("c", 6, producer=2),
        Value("out", 1, producer=3),
        Value("tangent", 1, Kind.TANGENT),
        Value("gc", 6, producer=4),
        Value("gb", 6, producer=5),
        Value("ga", 4, producer=6),
        Value("gw", 5, producer=7),
    ),
    outputs=(OUT,),
    gradients=(GW,),
).verify()
COSTS = Costs(
    seconds=(1, 2, 3, 4, 5, 6, 7, 8), replay_seconds=(10, 20, 30, 40, 0, 0, 0, 0), workspace_bytes=(0, 2, 0, 0, 0, 0, 0, 0)
)
PROBLEM = Problem(CHAIN, COSTS, budget_bytes=28, static_bytes=10, optimizer_bytes=7)


def shown(timeline: Timeline) -> list[tuple[str, int]]:
    """Each step as text, with its memory; the optimizer at the end."""
    steps = []
    for step in timeline.schedule.steps:
        if step.op is None:
            steps.append(f"free {CHAIN.values[step.value].name}")  # type: ignore[index]
        else:
            steps.append(f"{step.kind.value} {CHAIN.ops[step.op].name}{' in place' if step.in_place else ''}")
    return list(zip([*steps, "optimizer"], timeline.memory_bytes, strict=True))


def test_keep_all_by_hand() -> None:
    timeline = simulate(PROBLEM, build_schedule(CHAIN, frozenset({A, C})))
    assert shown(timeline) == [
        ("compute f0", 10 + 4),
        ("compute f1", 10 + 4 + 6 + 2),  # with its workspace
        ("compute f2 in place", 10 + 4 + 6),
        ("compute f3", 10 + 4 + 6 + 1),
        ("compute b3", 10 + 4 + 6 + 1 + 1 + 6),  # a, c, out, the tangent and gc
        ("free c", 22),
        ("compute b2 in place", 22),
        ("compute b1", 26),
        ("free a", 22),
        ("free gb", 16),
        ("compute b0", 21),
        ("free ga", 17),
        ("optimizer", 10 + 1 + 5 + 7),  # out and gw are held; the tangent is gone
    ]
    assert timeline.peak_bytes == 28
    assert timeline.peak_step == 4
    assert (timeline.step_s, timeline.recompute_s) == (36.0, 0.0)
    assert timeline.fits
    assert not simulate(replace(PROBLEM, budget_bytes=27), timeline.schedule).fits


def test_replays_by_hand() -> None:
    timeline = simulate(PROBLEM, build_schedule(CHAIN, frozenset()))
    assert shown(timeline) == [
        ("compute f0", 14),
        ("compute f1", 22),
        ("free a", 16),
        ("compute f2 in place", 16),
        ("compute f3", 17),
        ("free c", 11),
        ("replay f0", 11 + 1 + 4),  # the backward has begun, so the tangent is there
        ("replay f1", 24),
        ("replay f2 in place", 22),
        ("compute b3", 28),
        ("free c", 22),
        ("compute b2 in place", 22),
        ("compute b1", 26),
        ("free gb", 20),
        ("free a", 16),
        ("compute b0", 21),
        ("free ga", 17),
        ("optimizer", 23),
    ]
    assert (timeline.step_s, timeline.recompute_s) == (36.0 + 60.0, 60.0)


def test_the_optimizer_can_be_the_peak() -> None:
    timeline = simulate(replace(PROBLEM, optimizer_bytes=13), build_schedule(CHAIN, frozenset({A, C})))
    assert (timeline.peak_bytes, timeline.peak_step) == (29, len(timeline.schedule.steps))


def test_a_copy_of_a_live_value_counts_while_it_is_made_and_is_dropped_after() -> None:
    """split makes p, kept, and q, replayed: the replay makes both, and leaves q."""
    graph = Graph(
        ops=(
            Op("split", "f", F, (0,), (1, 2)),
            Op("sum", "f", F, (1, 2), (3,)),
            Op("back", "b", B, (4, 1, 2), (5,), replayable=False),
        ),
        values=(
            Value("x", 9, Kind.INPUT),
            Value("p", 3, producer=0),
            Value("q", 2, producer=0),
            Value("out", 1, producer=1),
            Value("tangent", 1, Kind.TANGENT),
            Value("gx", 9, producer=2),
        ),
        outputs=(3,),
        gradients=(5,),
    ).verify()
    problem = Problem(graph, Costs((1,) * 3, (1,) * 3, (0,) * 3), budget_bytes=99)
    timeline = simulate(problem, build_schedule(graph, frozenset({1})))
    kinds = [step.kind for step in timeline.schedule.steps]
    C, R, FREE = StepKind.COMPUTE, StepKind.REPLAY, StepKind.FREE
    assert kinds == [C, C, FREE, R, C, FREE, FREE]
    assert timeline.memory_bytes == (
        5,  # p, q
        6,  # and out
        4,  # q is freed
        4 + 1 + 5,  # the tangent, and both outputs anew
        7 + 9,  # p, q, out, tangent, and gx
        13,
        11,
        10,  # out and gx
    )


def test_the_copy_that_a_replay_makes_of_a_value_past_its_last_read_is_freed_at_once() -> None:
    """p is kept, read and freed; then split is replayed for q and makes p again."""
    graph = Graph(
        ops=(
            Op("split", "f", F, (0,), (1, 2)),
            Op("sum", "f", F, (1, 2), (3,)),
            Op("first", "b", B, (4, 1), (5,), replayable=False),
            Op("second", "b", B, (5, 2), (6,), replayable=False),
        ),
        values=(
            Value("x", 9, Kind.INPUT),
            Value("p", 3, producer=0),
            Value("q", 2, producer=0),
            Value("out", 1, producer=1),
            Value("tangent", 1, Kind.TANGENT),
            Value("g", 1, producer=2),
            Value("gx", 9, producer=3),
        ),
        outputs=(3,),
        gradients=(6,),
    ).verify()
    steps = build_schedule(graph, frozenset({1})).steps
    replay = steps.index(Step(StepKind.REPLAY, op=0))
    assert steps[replay - 1] == Step(StepKind.FREE, value=1)
    assert steps[replay + 1] == Step(StepKind.FREE, value=1)


def test_an_empty_step_needs_its_static_bytes() -> None:
    problem = Problem(Graph((), ()), Costs((), (), ()), budget_bytes=0, static_bytes=5, optimizer_bytes=2)
    timeline = simulate(problem, Schedule(()))
    assert (timeline.peak_bytes, timeline.step_s, timeline.fits) == (7, 0.0, False)


def test_an_optional_op_that_does_not_run_takes_no_time() -> None:
    optional = replace(CHAIN, ops=(replace(CHAIN.ops[0], name="state", inputs=(), optional=True), *CHAIN.ops[1:]))
    assert replace(PROBLEM, graph=optional).base_time_s == pytest.approx(35.0)
    assert PROBLEM.base_time_s == pytest.approx(36.0)
