"""Replays just before what reads them: the same runs, in an order that is as good."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

from actsolve.check import check
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.inductor.late_replays import late, late_runs
from actsolve.plan import Plan
from actsolve.problem import Costs, Problem
from actsolve.replays import replaying_schedule, replays_of, saved_by
from actsolve.schedule import Schedule, StepKind
from actsolve.simulate import timeline_of


def runs_of(schedule: Schedule) -> list[tuple[StepKind, int]]:
    return [(s.kind, s.op) for s in schedule.steps if s.op is not None and s.kind in (StepKind.COMPUTE, StepKind.REPLAY)]


def replaying(problem: Problem, draw: random.Random) -> Plan:
    """A plan that replays all that it can, each at any place between its inputs and its reader."""
    graph = problem.graph
    kept = (v for v in graph.decidable if not graph.ops[graph.values[v].producer or 0].replayable)
    runs = runs_of(timeline_of(problem, Plan("by hand", kept=frozenset(kept))).schedule)
    for i in range(len(runs)):
        earlier = i
        while runs[earlier][0] is StepKind.REPLAY and draw.random() < 0.7:
            before = graph.ops[runs[earlier - 1][1]]
            if runs[earlier - 1][1] < graph.n_forward and runs[earlier - 1][0] is StepKind.COMPUTE:
                break
            if set(before.outputs) & set(graph.ops[runs[earlier][1]].replay_inputs):
                break
            runs[earlier - 1 : earlier + 1] = runs[earlier], runs[earlier - 1]
            earlier -= 1
    replays = replays_of(graph, runs)
    return Plan("by hand", kept=saved_by(graph, replays), replays=replays)


def until_read(graph: Graph, runs: list[tuple[StepKind, int]], i: int) -> list[tuple[StepKind, int]] | None:
    """What runs between the ``i``-th run and the first that reads what it makes, or makes it again; None where none does."""
    made = set(graph.ops[runs[i][1]].outputs)
    for j, (kind, op) in enumerate(runs[i + 1 :], start=i + 1):
        read = graph.ops[op].inputs + (graph.ops[op].replay_inputs if kind is StepKind.REPLAY else ())
        if op == runs[i][1] or made.intersection(read):
            return runs[i + 1 : j]
    return None


@given(problems(), st.randoms(use_true_random=False))
def test_all_replays_are_where_they_are_first_read(problem: Problem, draw: random.Random) -> None:
    """But for those that nothing reads, which stay where they are."""
    graph, plan = problem.graph, replaying(problem, draw)
    own = runs_of(timeline_of(problem, plan).schedule)
    runs = late_runs(graph, own)
    check(replace(problem, budget_bytes=1 << 62), replaying_schedule(graph, replays_of(graph, runs)))
    assert sorted(runs) == sorted(own)
    unread = {op for i, (_, op) in enumerate(own) if until_read(graph, own, i) is None}
    for i, (kind, op) in enumerate(runs):
        if kind is StepKind.REPLAY and op not in unread:
            between = until_read(graph, runs, i)
            assert between is not None and all(k is StepKind.REPLAY for k, _ in between), "a first run before its reader"
    assert late(problem, plan).peak_bytes <= timeline_of(problem, plan).peak_bytes


def test_a_replay_does_not_wait_beside_another_ops_memory() -> None:
    """A chain of two whose first result is replayed before the loss's backward, and read after it."""
    values = (
        Value("x", 8, Kind.INPUT),
        Value("a", 100, producer=0),
        Value("b", 10, producer=1),
        Value("tangent", 4, Kind.TANGENT),
        Value("gb", 10, producer=2),
        Value("gx", 10, producer=3),
    )
    ops = (
        Op("first", "aten.exp.default", Phase.FORWARD, (0,), (1,)),
        Op("second", "aten.sum.default", Phase.FORWARD, (1,), (2,)),
        Op("second_b", "aten.mul.default", Phase.BACKWARD, (3, 2), (4,), replayable=False),
        Op("first_b", "aten.mul.default", Phase.BACKWARD, (4, 1), (5,), replayable=False),
    )
    graph = Graph(ops, values, outputs=(2,), gradients=(5,)).verify()
    costs = Costs((1.0,) * 4, (1.0,) * 4, (0, 0, 1000, 0), "by hand", ())
    problem = Problem(graph, costs, 10_000)
    plan = Plan("by hand", kept=saved_by(graph, {2: (0,)}), replays={2: (0,)})
    assert timeline_of(problem, plan).peak_bytes - late(problem, plan).peak_bytes == 100
    assert runs_of(late(problem, plan).schedule)[2:] == [(StepKind.COMPUTE, 2), (StepKind.REPLAY, 0), (StepKind.COMPUTE, 3)]
