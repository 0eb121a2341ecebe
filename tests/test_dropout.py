"""Dropout is traced in the form that is eager's to the bit, with a mask of one byte where that is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kinds import of, x
from torch import nn

from actsolve.capture.captured import capture
from actsolve.capture.dropout import same_scale
from actsolve.errors import CaptureError

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("p", "dtype", "same"),
    [
        (0.1, torch.float32, True),
        (0.15, torch.float32, False),
        (0.5, torch.float32, True),
        (0.15, torch.float64, True),
        (0.1, torch.float16, False),
        (0.5, torch.bfloat16, True),
    ],
)
def test_whether_both_forms_scale_alike(p: float, dtype: torch.dtype, same: bool) -> None:
    value = x(200, 100).to(dtype)
    torch.manual_seed(0)
    eager = F.dropout(value, p)
    torch.manual_seed(0)
    traced, _ = torch.native_dropout(value, p, True)
    assert same_scale(p, dtype) == same
    assert torch.equal(eager, traced) or not same
    assert not torch.equal(eager, traced) or same or dtype is torch.float16  # there it may be equal by luck


def test_the_mask_takes_a_byte_where_it_can() -> None:
    for p, n_calls in ((0.5, 1), (0.15, 1), (1.0, 0), (0.0, 0)):
        graph = capture(of(lambda m, h, p=p: m.b(F.dropout(m.a(h), p)).sum())).graph
        drops = [op for op in graph.ops if op.target == "aten.native_dropout.default"]
        assert len(drops) == n_calls, p
        assert all(graph.values[op.outputs[1]].size_bytes == 3 * 4 for op in drops)


def test_an_inexact_mask_is_scaled_from_its_bytes_which_may_be_kept() -> None:
    graph = capture(of(lambda m, h: m.b(F.dropout(m.a(h), 0.15)).sum())).graph
    (drop,) = (op for op in graph.ops if op.target == "aten.native_dropout.default")
    mask = drop.outputs[1]
    readers = [graph.ops[i] for i in graph.forward_readers[mask]]
    assert [op.target for op in readers] == ["aten._to_copy.default"] and readers[0].replayable
    assert mask in graph.decidable


def test_other_masks_in_other_layouts_are_refused() -> None:
    with pytest.raises(CaptureError, match="not contiguous"):
        capture(of(lambda m, h: F.alpha_dropout(m.a(h).transpose(0, 1) * 2, 0.5, training=True).sin()))
    capture(of(lambda m, h: F.alpha_dropout(m.a(h), 0.5, training=True)))


def test_dropout_in_eval_mode_inside_a_model_in_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model[1].eval()
    graph = capture(of(lambda m, h: m.inner(h), inner=model)).graph
    assert not any(op.random for op in graph.ops)
