"""A loss inside of the step that reads a concatenation: the parts of its gradient are views of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import actsolve

PUT_TOGETHER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat of rows": lambda a, b: torch.cat([a, b], 0),
    "stack": lambda a, b: torch.stack([a, b]),
    "chunks, swapped": lambda a, b: torch.cat(torch.cat([a, b], 1).chunk(2, 1)[::-1], 1),
}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "square": lambda o: o.square().mean(),
    "mse": lambda o: F.mse_loss(o, torch.ones_like(o)),
    "cross entropy": lambda o: F.cross_entropy(o.flatten(0, -2), torch.zeros(o.flatten(0, -2).shape[0], dtype=torch.long)),
}


class Parts(nn.Module):
    def __init__(self, together: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.together = together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return self.together(h.sin(), h.cos())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("together", PUT_TOGETHER)
def test_it_trains_as_eager_does(together: str, loss: str) -> None:
    torch.manual_seed(0)
    eager, x = Parts(PUT_TOGETHER[together]), torch.randn(16, 8)
    ours = actsolve.optimize(
        copy.deepcopy(eager), args=(x,), loss_fn=LOSSES[loss], mem_budget=1.0, hardware="a100", optimizer="none"
    )
    expected = LOSSES[loss](eager(x))
    expected.backward()
    found, _ = ours(x)
    found.backward()
    assert torch.equal(found, expected)
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
