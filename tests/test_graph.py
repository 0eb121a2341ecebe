"""The graph: its invariants, and what it derives from ops and values, checked by hand."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import networkx as nx
import pytest
from golden_text import assert_golden
from hand_made import BB, GB, GE, HAND_MADE, NEW, OPS, OUT, STAT, TANGENT, VALUES, A, B, C, D, E, F, S, W, X
from hypothesis import given
from strategies import random_training_graph, training_graphs

from actsolve.check import check
from actsolve.graph import Graph, GraphError, Kind, Op, Value
from actsolve.problem import Costs, Problem
from actsolve.report.graph_text import format_flops, graph_text
from actsolve.schedule import build_schedule


def with_op(index: int, **update: Any) -> Graph:
    ops = list(OPS)
    ops[index] = replace(ops[index], **update)
    return replace(HAND_MADE, ops=tuple(ops))


def with_value(index: int, **update: Any) -> Graph:
    values = list(VALUES)
    values[index] = replace(values[index], **update)
    return replace(HAND_MADE, values=tuple(values))


def test_the_hand_made_graph_is_sound() -> None:
    assert HAND_MADE.verify() is HAND_MADE


BROKEN: dict[str, tuple[Graph, str, str]] = {
    "value names": (with_value(A, name="b"), "two values share a name", "b"),
    "op names": (with_op(1, name="mm"), "two ops share a name", "mm"),
    "forward after backward": (replace(HAND_MADE, ops=(*OPS, OPS[0])), "two ops share a name", "mm"),
    "a late forward op": (
        replace(HAND_MADE, ops=(*OPS[:7], replace(OPS[0], name="late"), *OPS[7:])),
        "a forward op follows a backward op",
        "late",
    ),
    "a replayable backward op": (with_op(6, replayable=True), "a backward op is marked replayable", "loss_b"),
    "an input of no value": (with_op(0, inputs=(X, 99)), "value 99 does not exist", "mm"),
    "a negative input": (with_op(0, inputs=(-1,)), "value -1 does not exist", "mm"),
    "an output of no value": (with_op(0, outputs=(99,)), "value 99 does not exist", "mm"),
    "a replay input of no value": (with_op(3, replay_inputs=(99,)), "value 99 does not exist", "dropout"),
    "an input twice": (with_op(0, inputs=(X, X)), "an op lists a value twice", "mm"),
    "an output twice": (with_op(0, outputs=(A, A)), "an op lists a value twice", "mm"),
    "a backward edge": (with_op(0, inputs=(X, D)), "d is read before it is produced", "mm"),
    "an op that reads its own output": (with_op(0, inputs=(X, A)), "a is read before it is produced", "mm"),
    "a replay input that comes later": (with_op(3, replay_inputs=(E,)), "e is read before it is produced", "dropout"),
    "a forward op that reads a tangent": (with_op(0, inputs=(X, TANGENT)), "a forward op reads the tangent tangent", "mm"),
    "a forward op that reads an optional output": (
        with_op(3, inputs=(BB, S)),
        "a forward op reads what an optional op makes",
        "dropout",
    ),
    "an output of two ops": (with_op(1, outputs=(BB, A)), "a is produced twice, or is given", "split"),
    "an output that is given": (with_op(1, outputs=(BB, W)), "w is produced twice, or is given", "split"),
    "a value without producer": (with_op(1, outputs=(BB,)), "c is read before it is produced", "norm"),
    "an unread value without producer": (
        replace(HAND_MADE, values=(*VALUES, Value("lost", 1))),
        "an activation has no producer",
        "lost",
    ),
    "the wrong producer": (with_value(A, producer=1), "producer does not match the ops", "a"),
    "a given value with a producer": (with_value(X, producer=0), "producer does not match the ops", "x"),
    "a negative size": (with_value(A, size_bytes=-1), "negative size", "a"),
    "in place over what it does not read": (with_op(8, in_place=(GE, GB)), "in_place names no input and output", "dropout_b"),
    "in place into what it does not make": (with_op(8, in_place=(D, GE)), "in_place names no input and output", "dropout_b"),
    "in place over a given value": (with_op(0, in_place=(X, A)), "in_place would overwrite a given value", "mm"),
    "in place over a tangent": (with_op(6, in_place=(TANGENT, GE)), "in_place would overwrite a given value", "loss_b"),
    "in place over another size": (with_op(1, in_place=(A, BB)), "in_place joins storages of different sizes", "split"),
    "outputs": (replace(HAND_MADE, outputs=(99,)), "value 99 does not exist", "outputs, gradients or updates"),
    "gradients": (replace(HAND_MADE, gradients=(-1,)), "value -1 does not exist", "outputs, gradients or updates"),
    "updates": (replace(HAND_MADE, updates=((NEW, 99),)), "value 99 does not exist", "outputs, gradients or updates"),
    "a replayable optional op": (with_op(2, replayable=True), "an optional op is marked replayable", "state"),
    "an update by an optional op": (
        replace(HAND_MADE, updates=((S, STAT),)),
        "a buffer is updated with a value that is not there at the end of the forward",
        "s",
    ),
    "an update by a backward value": (
        replace(HAND_MADE, updates=((GE, STAT),)),
        "a buffer is updated with a value that is not there at the end of the forward",
        "ge",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_verify_rejects_each_broken_invariant(name: str) -> None:
    graph, what, where = BROKEN[name]
    with pytest.raises(GraphError, match=what) as raised:
        graph.verify()
    assert raised.value.where == where
    assert raised.value.exit_code == 2


def test_whatever_verify_lets_through_can_be_scheduled() -> None:
    """Random graphs with fields changed at random: refused, or every value kept makes a schedule that the checker accepts."""
    refused = accepted = 0
    for seed in range(800):
        rng = random.Random(seed)
        graph = meddled(random_training_graph(rng), rng)
        try:
            graph.verify()
        except GraphError:
            refused += 1
            continue
        accepted += 1
        n = len(graph.ops)
        problem = Problem(graph, Costs((1.0,) * n, (1.0,) * n, (0,) * n), budget_bytes=2**40)
        for kept in (graph.decidable, [v for v in graph.decidable if not graph.ops[graph.values[v].producer or 0].replayable]):
            check(problem, build_schedule(graph, frozenset(kept)))
    assert refused > 200 and accepted > 200


def meddled(graph: Graph, rng: random.Random) -> Graph:
    ops = list(graph.ops)
    for _ in range(rng.choice((1, 2, 3))):
        index, value, other = rng.randrange(len(ops)), rng.randrange(len(graph.values)), rng.randrange(len(graph.values))
        op = ops[index]
        changes: list[dict[str, Any]] = [
            {"inputs": tuple(dict.fromkeys((*op.inputs, value)))},
            {"replay_inputs": (*op.replay_inputs, value)},
            {"in_place": (rng.choice(op.inputs or (0,)), rng.choice(op.outputs or (0,)))},
            *({flag: not getattr(op, flag)} for flag in ("optional", "replayable", "random")),
        ]
        ops[index] = replace(op, **rng.choice(changes))
        graph_changes: list[dict[str, Any]] = [
            {"outputs": (*graph.outputs, value)},
            {"gradients": (*graph.gradients, value)},
            {"updates": (*graph.updates, (value, other))},
            {},
        ]
        graph = replace(graph, **rng.choice(graph_changes))
    return replace(graph, ops=tuple(ops))


def test_readers_by_hand() -> None:
    assert HAND_MADE.n_forward == 6
    assert HAND_MADE.forward_readers[D] == (4,)
    assert HAND_MADE.backward_readers[D] == (7, 8)
    assert HAND_MADE.backward_readers[X] == (10,)
    assert HAND_MADE.held == {OUT, VALUES.index(VALUES[-1])}
    assert HAND_MADE.given_bytes(Kind.PARAMETER) == 1024
    # norm cannot be replayed, so c and d have no replay reader there; the state is read by a replay of dropout alone
    assert HAND_MADE.replay_readers[C] == ()
    assert HAND_MADE.replay_readers[D] == ()
    assert HAND_MADE.replay_readers[S] == (3,)
    assert HAND_MADE.replay_readers[BB] == (3,)
    assert HAND_MADE.replay_readers[A] == (1,)
    assert HAND_MADE.replay_readers[X] == (0,)


def test_late_by_hand() -> None:
    assert HAND_MADE.late == (
        9,  # mm: a is first read by split_b (9), later than the replay of split (7) needs it
        7,  # split: only for the replay of dropout, which is needed at norm_b
        None,  # state: nothing reads it but a replay
        7,  # dropout: d is first read by norm_b
        6,  # norm: e is read by loss_b
        None,  # loss: out is not read
    )


def test_last_read_by_hand() -> None:
    assert HAND_MADE.last_read[:11] == (
        10,  # x: mm_b itself
        9,  # w: a replay of mm before split_b
        None,  # stat: norm is not replayed
        9,  # a: split_b
        7,  # b: a replay of dropout before norm_b
        None,  # c
        7,  # s: a replay of dropout
        8,  # d: dropout_b
        6,  # e: loss_b
        None,  # new
        None,  # out
    )


def test_decidable_by_hand() -> None:
    """Neither c, which only the forward reads, nor new, nor out, which is held."""
    assert HAND_MADE.decidable == (A, BB, S, D, E)
    assert replace(HAND_MADE, outputs=(OUT, D)).decidable == (A, BB, S, E)


def test_networkx_export() -> None:
    exported = HAND_MADE.to_networkx()
    assert nx.is_directed_acyclic_graph(exported)
    assert exported.number_of_nodes() == len(OPS) + len(VALUES)
    assert exported.number_of_edges() == sum(len(op.inputs) + len(op.outputs) for op in OPS)
    assert exported.nodes["op", 0]["target"] == "aten.mm.default"
    assert exported.nodes["value", A]["size_bytes"] == 4096
    assert set(exported.successors(("op", 1))) == {("value", BB), ("value", C)}
    assert nx.is_bipartite(exported)


@given(training_graphs())
def test_random_graphs_export_as_dags(graph: Graph) -> None:
    exported = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(exported)
    assert len(exported) == len(graph.ops) + len(graph.values)
    order = {node: n for n, node in enumerate(nx.lexicographical_topological_sort(exported, key=lambda n: n[1]))}
    for index, value in enumerate(graph.values):
        if value.producer is not None:
            assert order["op", value.producer] < order["value", index]


OP_CHANGES: dict[str, Any] = {
    "name": "other",
    "target": "aten.other",
    "phase": B,
    "inputs": (W, X),
    "outputs": (BB,),
    "replayable": False,
    "replay_inputs": (X,),
    "random": True,
    "optional": True,
    "in_place": (X, A),
    "signature": "(64, 64)",
}
DISPLAYED = {"flops", "why_not", "module", "layer", "source"}  # say nothing about what is computed


def test_the_fingerprint_changes_with_what_is_computed_and_with_nothing_else() -> None:
    assert set(OP_CHANGES) | DISPLAYED == {f.name for f in fields(Op)}
    prints = {with_op(0, **{field: value}).fingerprint for field, value in OP_CHANGES.items()}
    prints |= {with_value(A, **change).fingerprint for change in ({"name": "z"}, {"size_bytes": 1}, {"kind": Kind.INPUT})}
    changes: tuple[dict[str, Any], ...] = ({"outputs": ()}, {"gradients": ()}, {"updates": ()}, {"outputs": (OUT, D)})
    prints |= {replace(HAND_MADE, **change).fingerprint for change in changes}
    assert len(prints | {HAND_MADE.fingerprint}) == len(OP_CHANGES) + 3 + len(changes) + 1
    same = with_op(0, flops=None, why_not="?", module="m", layer=None, source="elsewhere.py:1")
    assert same.fingerprint == HAND_MADE.fingerprint == replace(HAND_MADE, name="renamed").fingerprint


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """No hash of a text, which Python salts, and no address goes into it."""
    assert_golden("fingerprint.txt", HAND_MADE.fingerprint + "\n")


def test_the_graph_as_text() -> None:
    assert_golden("graph.txt", graph_text(HAND_MADE))


def test_hostile_names_are_escaped_in_the_text() -> None:
    text = graph_text(with_op(0, name="\x1b[2Jmm\n", source="\u202eevil"))
    assert all(line.isprintable() for line in text.split("\n"))
    assert r"\x1b[2Jmm\n" in text


def test_an_empty_graph_has_a_text() -> None:
    assert graph_text(Graph((), ())).startswith("graph (no name): 0 forward ops, 0 backward ops\n")


@pytest.mark.parametrize(
    ("flops", "text"),
    [(None, "?"), (0, "0"), (999, "999"), (1000, "1 k"), (1_234_567, "1.23 M"), (999_999, "1 M"), (3 * 10**21, "3000 E")],
)
def test_flops_as_text(flops: int | None, text: str) -> None:
    assert format_flops(flops) == text


def test_phases_are_plain_text_in_messages() -> None:
    assert f"{F}" == "forward"
