"""Weights that autocast lowers for several uses: their gradients are added as eager adds them, or it is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import actsolve
from actsolve.errors import CaptureError


def lowered(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


class Tied(nn.Module):
    """An embedding whose weight is also that of two low-precision products."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            h = self.embedding((h * 9).long().abs() % 20)
            return self.head(h + self.head(h).softmax(-1) @ self.embedding.weight).float().square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)


class Thrice(Layer):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            return self.layer(self.layer(self.layer(h).tanh()).tanh()).float().square().mean()


class Penalised(Layer):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            h = self.layer(self.layer(h).tanh())
        return h.float().square().mean() + self.layer.weight.square().sum()


class PartlyFull(Layer):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            h = self.layer(self.layer(h).tanh())
            with lowered(enabled=False):
                h = self.layer(h.float())
        return h.square().mean()


class TwoRegions(Layer):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            h = self.layer(self.layer(h).tanh())
        with lowered():
            return self.layer(h.tanh()).float().square().mean()


class PenalisedTwice(Layer):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            h = self.layer(self.layer(h).tanh())
        return h.float().square().mean() + self.layer.weight.square().sum() + self.layer.weight.sin().mean()


@pytest.mark.parametrize("kind", [Tied, Thrice, Penalised, PartlyFull])
def test_gradients_are_added_as_in_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = kind(), torch.randn(16, 16) if kind is not Tied else torch.randn(4, 6)
    eager = copy.deepcopy(model)
    module = actsolve.optimize(model, (inputs,), mem_budget=1.0, hardware="a100")
    for each in (eager, module):
        each(inputs).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [TwoRegions, PenalisedTwice])
def test_what_cannot_be_told_apart_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"gradients of layer\.\w+ bitwise"):
        actsolve.optimize(kind(), (torch.randn(16, 16),), mem_budget=1.0, hardware="a100")


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with lowered():
            return self.norm(self.layer(h)).float().square().mean()


def test_a_layer_norm_of_low_precision_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path))
    actsolve.optimize(Normed(), (torch.randn(8, 16),), mem_budget=1.0)
    assert "cannot be measured" not in caplog.text
