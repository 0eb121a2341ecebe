"""The registry, the baselines and what they rest on: layers, and values that cannot be done without."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from strategies import training_graphs

from actsolve.errors import UsageError
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.planners import BASELINES, PLANNERS, plan
from actsolve.planners.layers import crossing, layers
from actsolve.planners.required import replayed, required, useful
from actsolve.problem import Costs, Problem
from actsolve.schedule import build_schedule
from actsolve.simulate import simulate


def chain(n: int, layer_of: list[int | None] | None = None, size: int = 1) -> Graph:
    """n forward ops in a row; the backward of each reads its input and the gradient."""
    values = [Value("x", size, Kind.INPUT), Value("t", size, Kind.TANGENT)]
    ops = []
    for i in range(n):
        layer = None if layer_of is None else layer_of[i]
        values.append(Value(f"v{i}", size, producer=i))
        ops.append(Op(f"f{i}", "f", Phase.FORWARD, (0 if i == 0 else i + 1,), (i + 2,), layer=layer))
    gradient = 1
    for i in range(n - 1, -1, -1):
        values.append(Value(f"g{i}", size, producer=len(ops)))
        source = 0 if i == 0 else i + 1
        ops.append(Op(f"b{i}", "b", Phase.BACKWARD, (gradient, source), (len(values) - 1,), replayable=False))
        gradient = len(values) - 1
    return Graph(tuple(ops), tuple(values), outputs=(n + 1,), gradients=(gradient,)).verify()


def problem_of(graph: Graph) -> Problem:
    ones = tuple(1.0 for _ in graph.ops)
    return Problem(graph, Costs(ones, ones, tuple(0 for _ in graph.ops)), budget_bytes=10**9)


def names(graph: Graph, kept: frozenset[int]) -> list[str]:
    return [graph.values[v].name for v in sorted(kept)]


def test_an_unknown_planner_names_those_that_there_are() -> None:
    with pytest.raises(UsageError) as error:
        plan(problem_of(chain(3)), "nobody")
    assert all(name in str(error.value) for name in PLANNERS)


def test_baselines_are_planners() -> None:
    assert set(BASELINES) < set(PLANNERS)
    for name in BASELINES:
        found = plan(problem_of(chain(9)), name)
        assert found.planner == name and found.bound_s is None
        applies = not name.startswith("offload") and name not in ("selective", "torch_budget")
        assert found.found == applies  # no link is known, there is no attention, nothing was traced
        assert found.found or found.note


def test_keep_all_replays_nothing() -> None:
    problem = problem_of(chain(9))
    assert simulate(problem, build_schedule(problem.graph, plan(problem, "keep_all").kept)).recompute_s == 0


def test_per_layer_keeps_the_boundaries_and_what_is_in_no_layer() -> None:
    graph = chain(10, [None, 0, 0, 0, 1, 1, 1, None, None, None])
    assert layers(graph) == [[1, 2, 3], [4, 5, 6]]
    assert names(graph, plan(problem_of(graph), "per_layer").kept) == ["v0", "v3", "v6", "v7", "v8"]


def test_sqrt_l_keeps_the_boundaries_of_segments() -> None:
    graph = chain(18, [i // 2 for i in range(18)])  # 9 layers: segments of 3
    assert names(graph, plan(problem_of(graph), "sqrt_l").kept) == ["v5", "v11"]
    graph = chain(20, [i // 2 for i in range(20)])  # 10 layers: segments of 4
    assert names(graph, plan(problem_of(graph), "sqrt_l").kept) == ["v7", "v15"]


def test_without_layers_the_stretches_end_at_articulation_points() -> None:
    assert layers(chain(4)) == [[0], [1], [2], [3]]
    # 0 feeds 1 and 2, which meet in 3; 4 follows
    values = [Value("x", 1, Kind.INPUT), *(Value(f"v{i}", 1, producer=i) for i in range(5))]
    reads = [(0,), (1,), (1,), (2, 3), (4,)]
    ops = tuple(Op(f"f{i}", "f", Phase.FORWARD, r, (i + 1,)) for i, r in enumerate(reads))
    assert layers(Graph(ops, tuple(values), outputs=(5,)).verify()) == [[0], [1, 2, 3], [4]]


def test_a_list_that_runs_twice_gives_its_layers_twice() -> None:
    assert layers(chain(4, [0, 1, 0, 1])) == [[0], [1], [2], [3]]


def test_deep_graphs_need_no_recursion() -> None:
    graph = chain(10_000)
    begin = time.perf_counter()
    assert len(layers(graph)) == 10_000
    kept = plan(problem_of(graph), "sqrt_l").kept
    assert 90 <= len(kept) <= 110
    assert time.perf_counter() - begin < 10


@settings(max_examples=100, deadline=None)
@given(training_graphs())
def test_what_is_required_makes_any_choice_schedulable(graph: Graph) -> None:
    for start in (frozenset(), crossing(graph, layers(graph)), frozenset(graph.decidable)):
        kept = required(graph, start)
        assert start <= kept <= set(graph.decidable)
        schedule = build_schedule(graph, kept)
        ran_again = {step.op for step in schedule.steps if step.kind.value == "replay"}
        assert replayed(graph, kept) == ran_again
        assert {s.op for s in build_schedule(graph, useful(graph, kept)).steps if s.kind.value == "replay"} == ran_again


@settings(max_examples=100, deadline=None)
@given(training_graphs())
def test_nothing_that_can_be_replayed_is_required(graph: Graph) -> None:
    for v in required(graph, ()):
        producer = graph.values[v].producer
        assert producer is not None and not graph.ops[producer].replayable
