"""What the graph of a traced step says, and that tracing leaves everything as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alike import assert_same_state
from kinds import Of, of, step, x
from torch import nn

import models_zoo
from actsolve.capture.captured import Captured, capture
from actsolve.capture.torch_internals import FakeTensorMode
from actsolve.cost.layout_check import capture_as_laid_out
from actsolve.errors import CaptureError
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.training_step import TrainingStep

HERE = Path(__file__).name


def only(graph: Graph, target: str, phase: Phase = Phase.FORWARD) -> Op:
    """The one op of ``graph`` that calls ``target``."""
    (op,) = (op for op in graph.ops if op.target.startswith(target) and op.phase is phase)
    return op


def value_of(graph: Graph, op: Op) -> Value:
    return graph.values[op.outputs[0]]


def given(graph: Graph, kind: Kind) -> dict[str, int]:
    return {v.name: v.size_bytes for v in graph.values if v.kind is kind}


def mlp(*, loss: bool = True) -> TrainingStep:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return step(model, x(3, 4), loss_fn=(lambda y: y.square().mean()) if loss else None)


# -- values and ops ----------------------------------------------------------------------------------------------------


def test_views_are_no_values_and_a_storage_counts_once() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        y = m.a(h)
        return (
            y.t() @ y.view(-1, 4)[1:].expand(3, 2, 4)[0].unsqueeze(0).squeeze()[:, :3].t().t().detach().repeat(2, 1)[:3]
        ).sum()

    graph = capture(of(run)).graph
    views = ("view", "t", "slice", "expand", "unsqueeze", "squeeze", "select", "detach", "transpose", "permute")
    assert {op.target.split(".")[1] for op in graph.ops}.isdisjoint(views)
    addmm = only(graph, "aten.addmm")
    assert value_of(graph, addmm).size_bytes == 3 * 4 * 4
    assert sum(addmm.outputs[0] in op.inputs for op in graph.ops) >= 2, "each reader of a view reads the storage"


def test_a_batched_linear_layer_is_one_value() -> None:
    graph = capture(step(nn.Linear(4, 6), x(2, 3, 4), loss_fn=lambda y: y.square().sum())).graph
    assert value_of(graph, only(graph, "aten.addmm")).size_bytes == 2 * 3 * 6 * 4  # its output is a view of the product


def test_an_op_with_several_outputs_has_a_value_for_each() -> None:
    graph = capture(step(nn.LayerNorm(8), x(5, 8, dtype=torch.float64).float(), loss_fn=lambda y: y.sum())).graph
    norm = only(graph, "aten.native_layer_norm")
    assert [graph.values[v].size_bytes for v in norm.outputs] == [5 * 8 * 4, 5 * 4, 5 * 4]


def test_what_is_given_by_kind() -> None:
    constant = torch.ones(3, 2)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    graph = capture(step(model, x(3, 4), loss_fn=lambda y: F.mse_loss(y, constant))).graph
    assert given(graph, Kind.PARAMETER) == {"0.weight": 32, "0.bias": 8, "1.weight": 8, "1.bias": 8}
    assert given(graph, Kind.BUFFER) == {"1.running_mean": 8, "1.running_var": 8, "1.num_batches_tracked": 8}
    assert list(given(graph, Kind.INPUT).values()) == [48] and list(given(graph, Kind.CONSTANT).values()) == [24]
    assert list(given(graph, Kind.TANGENT).values()) == [4], "only the loss is differentiated, not the output beside it"
    assert {graph.values[buffer].name for _, buffer in graph.updates} == set(given(graph, Kind.BUFFER))


def test_a_tied_weight_is_one_parameter_with_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    graph = capture(step(model, x(3, 4), loss_fn=lambda y: y.sum())).graph
    assert given(graph, Kind.PARAMETER) == {"0.weight": 64}
    assert len(graph.gradients) == 1 and "add" in graph.ops[graph.values[graph.gradients[0]].producer].target  # type: ignore[index]


def test_sources_modules_and_layers() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h = self.stem(h)
            for block in self.blocks:
                h = torch.sin(block(h))
            return h.sum()

    graph = capture(step(Blocks(), x(3, 4))).graph
    layers = [(op.module, op.layer) for op in graph.ops if op.target == "aten.addmm.default"]
    assert layers == [("stem", None), ("blocks.0", 0), ("blocks.1", 1)]
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "torch.sin(block(h))" in text)
    sines = [op for op in graph.ops if op.target == "aten.sin.default"]
    assert [op.source.rpartition("/")[2] for op in sines] == [f"{HERE}:{line}"] * 2
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.target == "aten.cos.default"]
    assert backward and all(op.source.endswith(f"{HERE}:{line}") for op in backward), "a backward op is where its forward was"


def test_a_source_is_never_a_line_of_the_caller() -> None:
    graph = capture(mlp()).graph
    sources = {op.target: op.source.rpartition("/")[2] for op in graph.ops if op.phase is Phase.FORWARD}
    assert sources["aten.addmm.default"] == sources["aten.gelu.default"] == "", "only torch's code leads there from the model"
    assert sources["aten.mean.default"].startswith(f"{HERE}:"), "the loss is the user's"
    assert [op.module for op in graph.ops if op.target.startswith("aten.addmm")] == ["0", "2"]


def test_flops_are_known() -> None:
    graph = capture(mlp()).graph
    assert [op.flops for op in graph.ops if "mm" in op.target][:2] == [2 * 3 * 4 * 8, 2 * 3 * 8 * 2]
    assert all(op.flops is not None for op in graph.ops)


def test_random_ops_and_their_state() -> None:
    graph = capture(of(lambda m, h: m.b(F.dropout(m.a(h), 0.5)).sum())).graph
    dropout = only(graph, "aten.native_dropout")
    state = graph.values[dropout.replay_inputs[0]]
    save = graph.ops[state.producer]  # type: ignore[index]
    assert dropout.random and dropout.replayable and save.optional and save.outputs == dropout.replay_inputs
    assert state.size_bytes == torch.get_rng_state().nbytes and graph.ops.index(save) == graph.ops.index(dropout) - 1


def test_attention_without_dropout_is_not_random() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(m.a(h), h, m.b(h)).sum()

    attention = only(capture(of(run, x(1, 2, 5, 4))).graph, "aten._scaled_dot_product")
    assert not attention.random and attention.replayable


def test_in_place_ops_are_found_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    graph = capture(step(model, x(3, 4), loss_fn=lambda y: y.sum())).graph
    relu = only(graph, "aten.relu")
    assert relu.in_place == (relu.inputs[0], relu.outputs[0])


def test_what_must_not_run_twice() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        y = m.a(h) + m.mean
        m.mean.add_(y.detach().mean(0))
        return m.b(torch.sin(y)).sum()

    graph = capture(of(run, mean=torch.zeros(4))).graph
    reads = [op for op in graph.ops if op.phase is Phase.FORWARD and "a buffer that the step changes" in op.why_not]
    assert [op.target for op in reads] == ["aten.add.Tensor"] * 2  # y, and the mean itself


def test_batch_norm_may_be_replayed_unless_its_new_statistics_are_read() -> None:
    norm = nn.BatchNorm1d(4)
    assert only(capture(of(lambda m, h: m.n(m.a(h)).sum(), n=norm)).graph, "aten._native_batch_norm").replayable
    read = of(lambda m, h: (m.n(m.a(h)) * m.n.running_mean).sum(), n=norm)
    assert "statistics" in only(capture(read).graph, "aten._native_batch_norm").why_not


def test_a_shared_gradient_is_cloned_in_the_graph() -> None:
    graph = capture(of(lambda m, h: m.p + m.q + h, p=nn.Parameter(x(3, 4)), q=nn.Parameter(x(3, 4)))).graph
    assert len(graph.gradients) == 2 and only(graph, "aten.clone", Phase.BACKWARD).outputs[0] in graph.gradients


# -- stability ---------------------------------------------------------------------------------------------------------


def small_gpt() -> TrainingStep:
    torch.manual_seed(0)
    return models_zoo.get("gpt-mini")(layers=1, width=16, heads=2, seq=8, batch=2)


def test_the_fingerprint_is_that_of_the_step() -> None:
    first = capture(small_gpt()).graph
    assert first.fingerprint == capture(small_gpt()).graph.fingerprint
    other = step(nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.Linear(8, 2)), x(3, 4), loss_fn=lambda y: y.square().mean())
    assert capture(mlp()).graph.fingerprint != capture(other).graph.fingerprint


def test_a_fake_step_has_the_same_graph() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = small_gpt()
    assert capture(fake).graph == capture(small_gpt()).graph


def test_capture_leaves_all_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.LSTM(4, 4)).train()
    model.forward = None  # type: ignore[assignment]  # not called: `Of` calls the parts
    made = step(Of(lambda m, h: m.m[3](m.m[2](m.m[1](m.m[0](h))))[0], m=nn.ModuleList(model)), x(3, 4, grad=True))
    before, attributes = copy.deepcopy(made.model), [list(m.__dict__) for m in made.model.modules()]
    inputs, state = made.args[0].detach().clone(), torch.get_rng_state()
    capture(made)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(made.args[0], inputs)
    assert made.args[0].grad is None and all(p.grad is None for p in made.model.parameters())
    assert_same_state(made.model, before, "capture")
    assert [list(m.__dict__) for m in made.model.modules()] == attributes


def test_a_failed_capture_leaves_all_as_it_was() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.calls, m.kept = m.calls + 1, m.a(h)
        m.seen.append(m.kept)
        m.mean += m.kept.mean()
        return m.b(h) if m.kept.sum() > 0 else m.a(h)

    made = of(run, mean=torch.zeros(4))
    made.model.calls, made.model.seen = 0, []  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="the forward changes"):
        capture(made)
    assert (made.model.calls, made.model.seen) == (0, []) and not hasattr(made.model, "kept")
    assert torch.equal(made.model.mean, torch.zeros(4))  # type: ignore[arg-type]
    made.model(*made.args)  # works


# -- which outputs the backward starts from ----------------------------------------------------------------------------


def tangents(captured: Captured) -> list[tuple[int, ...]]:
    return [v.shape for v in captured.graph.values if v.kind is Kind.TANGENT]


def test_the_backward_starts_from_the_loss_where_there_is_one() -> None:
    def run(m: Any, h: torch.Tensor) -> Any:
        logits = m.b(m.a(h).tanh())
        return {"logits": logits, "loss": logits.square().mean()}

    assert tangents(capture(of(run))) == [()]
    assert tangents(capture(mlp())) == [()]


def test_it_starts_from_all_that_no_loss_depends_on() -> None:
    assert tangents(capture(of(lambda m, h: (m.a(h), m.b(h).mean())))) == [(3, 4), ()]
    assert tangents(capture(mlp(loss=False))) == [(3, 2)]


def test_another_start_is_another_graph_of_the_same_forward() -> None:
    captured = capture(of(lambda m, h: (m.a(h), m.b(h).tanh())))
    first, second = (t.name for t in captured.joint.tangents)
    one = captured.starting_from(frozenset({second}))
    assert one.tangents == {second} and captured.tangents == {first, second}
    names = [[op.name for op in g.ops[: g.n_forward]] for g in (one.graph, captured.graph)]
    assert names[0] == names[1]
    assert len(one.graph.gradients) == 2, "of b alone"


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_layouts_are_those_of_the_kernels() -> None:
    made = of(lambda m, h: F.relu_(m.n(h.transpose(1, 2))).sum(), x(3, 5, 4), n=nn.BatchNorm1d(4))
    believed = only(capture(made).graph, "aten.relu").signature
    real = only(capture_as_laid_out(made).graph, "aten.relu").signature
    assert "[3, 4, 5]@[20, 1, 4]" in believed and "[3, 4, 5]@[20, 5, 1]" in real
    assert capture(made).graph.fingerprint == capture_as_laid_out(made).graph.fingerprint, "what was learned is remembered"


def test_an_lstm_layer_has_a_workspace_of_its_real_size() -> None:
    graph = capture_as_laid_out(step(nn.LSTM(8, 8), x(4, 3, 8))).graph
    layer = only(graph, "aten.mkldnn_rnn_layer")
    with torch.enable_grad():
        weights = [torch.randn(32, 8, requires_grad=True), torch.randn(32, 8), torch.randn(32), torch.randn(32)]
        state = torch.zeros(1, 3, 8)
        arguments = (x(4, 3, 8), *weights, state, state, False, [], 2, 8, 1, True, False, False, True)
        workspace = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)[3]
    assert graph.values[layer.outputs[-1]].size_bytes == workspace.nbytes > 0
