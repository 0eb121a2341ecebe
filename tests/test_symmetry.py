"""The order that the MILP prescribes to identical layers loses nothing: with and without it the optimum is the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.planners import PlannerOptions, plan
from actsolve.planners import symmetry as symmetry_module
from actsolve.problem import Costs, Problem
from actsolve.schedule import build_schedule
from actsolve.simulate import simulate

EXACT = PlannerOptions(gap=1e-6, time_limit_s=60.0)


def layered(seed: int, n_layers: int, n_ops: int) -> Problem:
    """A residual network of identical layers, each a chain of ops of random sizes and costs; every op has a backward twin."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 3, 4, 8]) * 100 for _ in range(n_ops)]
    costs = [rng.choice([1, 2, 5, 9]) for _ in range(n_ops)]
    saves_input = [rng.random() < 0.7 for _ in range(n_ops)]
    width = 200
    values = [Value("x", width, Kind.INPUT), Value("dloss", 4, Kind.TANGENT)]
    ops: list[Op] = []
    seconds: list[float] = []

    def run(phase: Phase, name: str, inputs: list[int], size: int, cost: float, layer: int | None, signature: str) -> int:
        values.append(Value(name, size, producer=len(ops)))
        forward = phase is Phase.FORWARD
        ops.append(
            Op(name, name, phase, tuple(inputs), (len(values) - 1,), replayable=forward, layer=layer, signature=signature)
        )
        seconds.append(float(cost))
        return len(values) - 1

    x, tape = 0, []
    for layer in range(n_layers):
        skip, h, inner = x, x, []
        for i in range(n_ops):
            out = run(Phase.FORWARD, f"f{layer}.{i}", [h], sizes[i], costs[i], layer, f"f{i}")
            inner.append((h, out, i))
            h = out
        x = run(Phase.FORWARD, f"add{layer}", [skip, h], width, 1, layer, "add")
        tape.append(inner)
    loss = run(Phase.FORWARD, "loss", [x], 4, 1, None, "loss")
    g = run(Phase.BACKWARD, "dl", [1, x], width, 1, None, "dl")
    gradients = []
    for layer in reversed(range(n_layers)):
        d = g
        for before, after, i in reversed(tape[layer]):
            saved = before if saves_input[i] else after
            gradients.append(run(Phase.BACKWARD, f"w{layer}.{i}", [d, saved], 10, 1, layer, f"w{i}"))
            size = width if i == 0 else sizes[i - 1]
            d = run(Phase.BACKWARD, f"b{layer}.{i}", [d, saved], size, 2 * costs[i], layer, f"b{i}")
        g = run(Phase.BACKWARD, f"dadd{layer}", [g, d], width, 1, layer, "dadd")
    graph = Graph(tuple(ops), tuple(values), outputs=(loss,), gradients=(*gradients, g)).verify()
    return Problem(graph, Costs(tuple(seconds), tuple(seconds), (0,) * len(ops)), 1 << 40)


def optimum_s(problem: Problem) -> float | None:
    found = plan(problem, "milp", EXACT)
    return simulate(problem, build_schedule(problem.graph, found.kept, found.early)).recompute_s if found.found else None


@pytest.mark.parametrize("seed", range(12))
def test_order_of_identical_layers_loses_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered(seed, n_layers=3 + seed % 3, n_ops=2 + seed % 2)
    everything = simulate(problem, build_schedule(problem.graph, plan(problem, "keep_all").kept)).peak_bytes
    for share in (0.9, 0.75, 0.6, 0.5, 0.4):
        tight = replace(problem, budget_bytes=int(share * everything))
        ordered = optimum_s(tight)
        with monkeypatch.context() as patched:
            patched.setattr(symmetry_module, "_MOST_LAYERS", 0)
            free = optimum_s(tight)
        assert ordered == pytest.approx(free) if free is not None else ordered is None, share


def test_rows_are_written_for_identical_layers_only() -> None:
    from actsolve.planners.milp import build
    from actsolve.planners.windows import windows

    problem = layered(0, n_layers=4, n_ops=2)
    columns, _, _ = build(problem, windows(problem), 10_000)
    with_rows = columns.lp.n_rows
    ops = tuple(replace(op, signature=op.name) for op in problem.graph.ops)
    different = replace(problem, graph=replace(problem.graph, ops=ops))
    columns, _, _ = build(different, windows(different), 10_000)
    assert with_rows == columns.lp.n_rows + 3
