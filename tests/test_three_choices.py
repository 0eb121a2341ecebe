"""What the planner decides where the right choice is plain to see: large and cheap, large and dear, small."""

from __future__ import annotations

from dataclasses import replace

from actsolve.check import check
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.links import Links
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PlannerOptions, plan
from actsolve.problem import Costs, Problem
from actsolve.simulate import simulate

MB = 1_000_000
LARGE, SMALL = 64 * MB, MB // 10
N = 10  # triples of ops: one whose value is large and cheap, one large and dear, one small


def training_step() -> Problem:
    """A chain of triples; the backward of each op reads its input, its output and the gradient."""
    values = [Value("x", SMALL, Kind.INPUT), Value("t", SMALL, Kind.TANGENT)]
    ops: list[Op] = []
    seconds: list[float] = []
    for i in range(3 * N):
        size, cost_s = ((LARGE, 0.0005), (LARGE, 0.03), (SMALL, 0.005))[i % 3]
        values.append(Value(f"{('cheap', 'dear', 'small')[i % 3]}{i // 3}", size, producer=i))
        ops.append(Op(f"f{i}", "f", Phase.FORWARD, (0 if i == 0 else i + 1,), (i + 2,)))
        seconds.append(cost_s)
    gradient = 1
    for i in range(3 * N - 1, -1, -1):
        values.append(Value(f"g{i}", SMALL, producer=len(ops)))
        ops.append(
            Op(f"b{i}", "b", Phase.BACKWARD, (gradient, 0 if i == 0 else i + 1, i + 2), (len(values) - 1,), replayable=False)
        )
        gradient = len(values) - 1
        seconds.append(2 * seconds[i])
    graph = Graph(tuple(ops), tuple(values), gradients=(gradient,)).verify()
    costs = Costs(tuple(seconds), tuple(seconds), (0,) * len(ops))
    problem = Problem(graph, costs, 0, links=Links(2.4e9, 2.4e9))  # a large value crosses in 27 ms, while a dear op runs
    return replace(problem, budget_bytes=5 * LARGE)  # of 20


def test_what_is_large_and_cheap_is_recomputed_what_is_dear_offloaded_what_is_small_kept() -> None:
    problem = training_step()
    found = plan(problem, "milp", PlannerOptions(gap=0.01, threads=1))
    timeline = simulate(problem, schedule_of(problem.graph, found))
    assert check(problem, timeline.schedule) <= problem.budget_bytes
    choices: dict[str, list[str]] = {"cheap": [], "dear": [], "small": []}
    for v in problem.graph.decidable:
        kind = problem.graph.values[v].name.rstrip("0123456789")
        choices[kind].append("offload" if v in found.offloaded else "keep" if v in found.kept else "recompute")
    assert set(choices["small"]) == {"keep"}
    assert "recompute" not in choices["dear"] and choices["dear"].count("offload") > N // 2
    assert choices["cheap"].count("recompute") >= N // 3  # where the link is idle some may cross it
    assert choices["cheap"].count("offload") < choices["dear"].count("offload")
    assert timeline.extra_s < 0.015 * problem.base_time_s


def test_each_choice_alone_costs_far_more() -> None:
    problem = training_step()
    recompute = plan(replace(problem, links=None), "milp", PlannerOptions(threads=1))
    ops = tuple(replace(op, replayable=False, why_not="only offload") for op in problem.graph.ops)
    offload = plan(replace(problem, graph=replace(problem.graph, ops=ops)), "milp", PlannerOptions(threads=1))
    for found in (recompute, offload):
        extra_s = simulate(problem, schedule_of(problem.graph, found)).extra_s
        assert extra_s > 0.03 * problem.base_time_s
