"""What is private in torch still does what we rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kinds import of, step, x
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

from actsolve.capture.captured import capture
from actsolve.capture.joint import trace_joint
from actsolve.capture.torch_internals import (
    FakeTensorMode,
    annotation,
    input_role,
    leaked_tensors,
    mutated_input,
    real_tensors,
    storage_key,
)
from actsolve.errors import UsageError

aten = torch.ops.aten


def targets(made: Any) -> list[Any]:
    return [node.target for node in trace_joint(made).module.graph.nodes]


def test_roles_of_inputs_and_outputs() -> None:
    def run(m: Any, h: torch.Tensor) -> Any:
        m.n.add_(1)
        return m.a(h), m.b(h).sum()

    joint = trace_joint(of(run, n=torch.zeros(4)))
    inputs = joint.module.graph.find_nodes(op="placeholder")
    assert [input_role(n).index for n in inputs if not input_role(n).is_tangent] == list(range(6))
    assert [input_role(n).index for n in joint.tangents] == [0, 1]
    assert [mutated_input(desc) is not None for desc in joint.output_descs[: joint.n_forward_outputs]] == [True, False, False]
    assert joint.n_forward_outputs == 3 and len(joint.output_descs) == 3 + 6


def test_annotations_reach_backward_nodes() -> None:
    joint = trace_joint(step(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x(3, 4)))
    (backward,) = joint.module.graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
    assert annotation(backward).module == "1"


def test_random_calls_stay_though_nothing_reads_them() -> None:
    made = of(lambda m, h: (F.dropout(h, 0.5), torch.rand(3), m.a(h))[2])
    assert {aten.native_dropout.default, aten.rand.default} <= set(targets(made))


def test_composite_kernels_are_those_of_eager() -> None:
    kernels = {
        aten.mkldnn_rnn_layer.default: step(nn.LSTM(4, 4), x(3, 2, 4)),
        aten.upsample_bilinear2d.default: step(
            nn.Sequential(nn.Conv2d(1, 1, 1), nn.Upsample(scale_factor=2, mode="bilinear")), x(1, 1, 3, 3)
        ),
        aten._linalg_check_errors.default: of(lambda m, h: torch.linalg.inv(m.a.weight + 4 * torch.eye(4))),
    }
    for kernel, made in kernels.items():
        assert kernel in targets(made), kernel


def test_torchs_own_kernels_are_back_after_a_trace() -> None:
    ops = [aten.dropout.default, aten.lstm.input, aten.upsample_bilinear2d.default]
    before = [dict(op.py_kernels) for op in ops]
    dead_code = set(torch.fx.node._side_effectful_functions)
    trace_joint(step(nn.Linear(4, 4), x(3, 4)))
    assert [dict(op.py_kernels) for op in ops] == before and all(before)
    assert torch.fx.node._side_effectful_functions == dead_code


def test_leaked_tensors_are_told_once() -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(UsageError):
        capture(of(lambda m, h: (kept.append(m.a(h)), kept[-1] * 2)[1]))
    assert kept and all(type(t) is FunctionalTensor for t in kept)
    assert leaked_tensors() == []


def test_real_tensors_inside_of_a_fake_mode() -> None:
    with FakeTensorMode():
        assert type(torch.ones(2)) is not torch.Tensor
        with real_tensors():
            assert torch.ones(2).sum().item() == 2


def test_storage_keys() -> None:
    a = x(3, 4)
    assert storage_key(a) == storage_key(a.t()[1:]) != storage_key(a.clone())


def test_a_backward_in_an_autocast_region_is_traced_outside_of_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        joint = trace_joint(step(nn.Linear(4, 4), x(3, 4, grad=True)))
    products = [n for n in joint.module.graph.find_nodes(op="call_function", target=aten.mm.default)]
    assert products and all(n.meta["val"].dtype is torch.bfloat16 for n in products)
