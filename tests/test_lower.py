"""What the two graphs of a schedule hold: each run once, in order, and what is saved; and backwards made later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alike import checked_schedule, required
from kinds import of, step, x
from torch import fx, nn

from actsolve.capture.captured import Captured, capture
from actsolve.errors import ScheduleError
from actsolve.graph import Graph
from actsolve.lower import Lowered, lower, lower_backward
from actsolve.runtime.rng import replay_random, rng_state
from actsolve.training_step import TrainingStep

aten = torch.ops.aten


def lowered(made: TrainingStep, keep: str) -> tuple[Captured, Lowered]:
    """``made`` lowered with all kept, or only what must be; or that and the values whose names end in ``keep``."""
    captured = capture(made)
    graph = captured.graph
    if keep == "all":
        kept = {v for v in graph.decidable if not graph.values[v].name.endswith(".rng_state")}
    else:
        kept = required(graph) | {v for v in graph.decidable if keep and graph.values[v].name.endswith(keep)}
    return captured, lower(captured, checked_schedule(graph, frozenset(kept)))


def calls(module: fx.GraphModule) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def runs(graph: Graph, target: str) -> int:
    return sum(op.target == target for op in graph.ops)


def mlp() -> TrainingStep:
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Sigmoid())]
    return step(nn.Sequential(*layers), x(3, 4), loss_fn=lambda y: y.square().sum())


def test_keep_all_runs_each_op_once() -> None:
    captured, both = lowered(mlp(), "all")
    for target in {op.target for op in captured.graph.ops}:
        n_calls = sum(str(t).removesuffix("_") == target for t in calls(both.forward) + calls(both.backward))
        assert n_calls <= runs(captured.graph, target), target
    assert calls(both.forward).count(aten.addmm.default) == 3 and aten.addmm.default not in calls(both.backward)


def test_replays_are_in_the_backward() -> None:
    _, both = lowered(mlp(), "")
    assert calls(both.forward).count(aten.addmm.default) == 3
    assert calls(both.backward).count(aten.addmm.default) == 2, "the last one's activation is an output, and held"
    assert all(name.startswith("primals") or name in ("sigmoid_2", "sum_1") for name in both.saved), "what is given or held"


def test_what_is_saved_is_asked_for_in_order() -> None:
    _, both = lowered(mlp(), "all")
    placeholders = [n.name for n in both.backward.graph.find_nodes(op="placeholder")]
    assert placeholders[: len(both.saved)] == [f"saved_{name}" for name in both.saved]
    assert placeholders[len(both.saved) :] == ["tangents_1", "tangents_2"]
    (output,) = both.forward.graph.find_nodes(op="output")
    assert len(output.args[0]) == 2 + len(both.saved)  # loss, output


def test_a_replayed_dropout_gets_the_state_it_had() -> None:
    made = of(lambda m, h: m.b(F.dropout(m.a(h), 0.5)).sum())
    _, kept = lowered(made, "all")
    assert rng_state not in calls(kept.forward)
    _, replayed = lowered(made, ".rng_state")
    assert calls(replayed.forward)[:3].count(rng_state) == 1 and replay_random in calls(replayed.backward)
    assert any(name.endswith(".rng_state") for name in replayed.saved)
    again = next(n for n in replayed.backward.graph.nodes if n.target is replay_random)
    assert again.args[0] == torch.device("cpu") and again.args[2] is aten.native_dropout.default


def test_batch_norm_is_replayed_without_its_statistics() -> None:
    made = step(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Linear(4, 2)), x(3, 4), loss_fn=lambda y: y.sum()
    )
    _, both = lowered(made, "")
    assert aten._native_batch_norm_legit_functional.default in calls(both.forward)
    assert aten._native_batch_norm_legit_functional.default not in calls(both.backward)
    assert aten._native_batch_norm_legit.no_stats in calls(both.backward)


def test_what_was_in_place_is_in_place_again() -> None:
    made = step(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(True), nn.Linear(4, 2)), x(3, 4), loss_fn=lambda y: y.sum()
    )
    _, both = lowered(made, "all")
    assert aten.relu_.default in calls(both.forward)


def test_nothing_saved_is_overwritten() -> None:
    for keep in ("all", "", "addmm_1"):
        _, both = lowered(mlp(), keep)
        saved = set(both.backward.graph.find_nodes(op="placeholder"))
        for node in both.backward.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                out = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
                written = [node.kwargs[name] for name in out if name in node.kwargs] or [node.args[0]]
                assert saved.isdisjoint(written), node.format_node()


def test_an_unread_random_op_still_draws() -> None:
    made = of(lambda m, h: (F.dropout(m.b(h), 0.5), m.a(h))[1].sum())
    for keep in ("all", ""):
        _, both = lowered(made, keep)
        assert aten.native_dropout.default in calls(both.forward), keep


# -- a backward for a forward that is there ----------------------------------------------------------------------------


def two_outputs() -> TrainingStep:
    return of(lambda m, h: (m.a(h).tanh(), m.b(F.dropout(h, 0.5)).tanh()))


def test_a_backward_from_one_of_two_outputs() -> None:
    captured, both = lowered(two_outputs(), "all")
    first, _ = (t.name for t in captured.joint.tangents)
    one = lower_backward(captured.starting_from(frozenset({first})), both.saved, any_layout=False)
    assert calls(one).count(aten.tanh_backward.default) == 1
    (output,) = one.graph.find_nodes(op="output")
    given = [gradient is not None for gradient in output.args[0]]
    assert given == [True, True, False, False, False], "a's weight and bias; not b's, nor the input's"
    names = [n.name for n in one.graph.find_nodes(op="placeholder")]
    assert names == [n.name for n in both.backward.graph.find_nodes(op="placeholder")], "called alike"


def test_a_backward_that_replays_what_it_lacks() -> None:
    captured, both = lowered(mlp(), "")
    again = lower_backward(captured, both.saved, any_layout=False)
    assert calls(again).count(aten.addmm.default) == 2


def test_a_backward_for_any_layout_reshapes_and_makes_fresh_memory() -> None:
    captured, both = lowered(step(nn.Linear(4, 4), x(2, 3, 4)), "all")
    assert aten.view.default in calls(both.backward)
    other = lower_backward(captured, both.saved, any_layout=True)
    assert aten.view.default not in calls(other) and aten.reshape.default in calls(other)
    overwriting = (t for t in calls(other) if isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable)
    assert not list(overwriting)


def test_a_backward_that_cannot_be_made() -> None:
    captured, both = lowered(two_outputs(), "all")
    without_mask = tuple(name for name in both.saved if not name.startswith("getitem"))
    with pytest.raises(ScheduleError):
        lower_backward(captured, without_mask[:1], any_layout=False)
