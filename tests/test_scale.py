"""Everything between capture and lowering takes about a second on 20,000 ops, whatever their shape.

The limits are several times what was measured, for a busy machine; a quadratic step would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from actsolve.check import check
from actsolve.graph import Graph, GraphError, Kind, Op, Phase, Value
from actsolve.graph_file import load_graph, save_graph
from actsolve.plan import Plan
from actsolve.plan_file import load_plan, plan_file
from actsolve.problem import Costs, Problem
from actsolve.report.graph_text import graph_text
from actsolve.schedule import build_schedule
from actsolve.simulate import simulate

N_OPS = 20_000
LIMIT_S = 6.0


@contextmanager
def quickly(what: str) -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < LIMIT_S, what


def graph_of(forward_inputs: Callable[[int], list[int]]) -> Graph:
    """Forward op i reads what ``forward_inputs(i)`` made (-1 is the input); backward op i reads its neighbours' values."""
    n = N_OPS // 2
    values = [Value("x", 8, Kind.INPUT), Value("tangent", 8, Kind.TANGENT)]
    values += [Value(f"v{i}", 8, producer=i, shape=(128, 256), dtype="float32") for i in range(n)]
    values += [Value(f"g{i}", 8, producer=2 * n - 1 - i) for i in range(n)]
    value = [*range(2, n + 2), 0]  # of forward op i; the input for -1
    ops = []
    for i in range(n):
        inputs = tuple(value[j] for j in forward_inputs(i))
        ops.append(
            Op(f"f{i}", "aten.mm.default", Phase.FORWARD, inputs, (value[i],), source=f"net.py:{i}", signature="(128, 256)")
        )
    for i in range(n - 1, -1, -1):
        incoming = 1 if i == n - 1 else n + 2 + i + 1
        inputs = (incoming, value[i - 1], value[i])
        ops.append(Op(f"b{i}", "aten.mm.default", Phase.BACKWARD, inputs, (n + 2 + i,), replayable=False))
    return Graph(tuple(ops), tuple(values), outputs=(n + 1,), gradients=(n + 2,))


@cache
def shaped(shape: str) -> Graph:
    """A chain; one op that reads everything; values that everything reads; long skips."""
    n = N_OPS // 2
    return graph_of(
        {
            "chain": lambda i: [i - 1],
            "wide": lambda i: [i - 1] if i < n - 1 else list(range(n - 1)),
            "shared": lambda i: [i - 1] if i < 2 else [0, i - 1],
            "skips": lambda i: sorted({i - 1, i // 2 - 1}),
        }[shape]
    )


SHAPES = ("chain", "wide", "shared", "skips")


@pytest.mark.parametrize(("shape", "share"), [*((shape, "none") for shape in SHAPES), ("skips", "few"), ("wide", "all")])
def test_schedules(shape: str, share: str) -> None:
    graph = replace(shaped(shape))  # with nothing cached
    n = len(graph.ops)
    with quickly("verify"):
        graph.verify()
    with quickly("fingerprint"):
        assert graph.fingerprint
    with quickly("decidable"):
        decidable = graph.decidable
    with quickly("last_read"):
        assert graph.last_read
    kept = frozenset({"none": (), "few": decidable[::100], "all": decidable}[share])
    problem = Problem(graph, Costs((1e-3,) * n, (1e-3,) * n, (4,) * n), budget_bytes=2**50)
    with quickly("build_schedule"):
        schedule = build_schedule(graph, kept)
    with quickly("simulate"):
        peak = simulate(problem, schedule).peak_bytes
    with quickly("check"):
        assert check(problem, schedule) == peak


def test_files(tmp_path: Path) -> None:
    graph = shaped("skips")
    n = len(graph.ops)
    costs = Costs((1e-3,) * n, (1e-3,) * n, (4,) * n)
    with quickly("save_graph"):
        save_graph(tmp_path / "graph.json", graph, costs)
    with quickly("load_graph"):
        assert load_graph(tmp_path / "graph.json") == (graph, costs)
    kept = frozenset(graph.decidable[::100])
    schedule = build_schedule(graph, kept)
    with quickly("plan_file"):
        file = plan_file(Problem(graph, costs, budget_bytes=2**50), Plan("x", kept), schedule)
    with quickly("save"):
        file.save(tmp_path / "plan.json")
    with quickly("load_plan"):
        loaded = load_plan(tmp_path / "plan.json")
    assert loaded == file
    with quickly("decode"):
        assert loaded.decode(graph) == (schedule, kept)
    with quickly("graph_text"):
        assert len(graph_text(graph).split("\n")) > n


def test_refusals() -> None:
    """Also what is wrong is found quickly."""
    graph = shaped("chain")
    last = graph.ops[-1]
    with quickly("two names"), pytest.raises(GraphError, match="share a name"):
        replace(graph, ops=(*graph.ops[:-1], replace(last, name=graph.ops[-2].name))).verify()
    with quickly("a bad op"), pytest.raises(GraphError, match="does not exist"):
        replace(graph, ops=(*graph.ops[:-1], replace(last, inputs=(10**9,)))).verify()
