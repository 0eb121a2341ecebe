"""Models and losses with parts that no trace can follow, and what it is to train as their twins in eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import actsolve
from actsolve.module import runtime_of

WIDTH, QUERIES = 16, 6


def assignment(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest pair first, as a Hungarian matcher's stand-in."""
    cost = cost.copy()
    rows, columns = [], []
    for _ in range(min(cost.shape)):
        row, column = np.unravel_index(cost.argmin(), cost.shape)
        rows.append(row)
        columns.append(column)
        cost[row, :], cost[:, column] = np.inf, np.inf
    return np.array(rows), np.array(columns)


class Matcher(nn.Module):
    """Which query is nearest to which target, as DETR has it: no trace follows SciPy or NumPy."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("weight", torch.linspace(1, 2, WIDTH))

    @torch.no_grad()
    def forward(self, outputs: dict[str, Any], targets: list[dict[str, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        boxes = outputs["boxes"] * self.weight
        costs = [self.scale * torch.cdist(b, t["boxes"]) for b, t in zip(boxes, targets, strict=True)]
        pairs = [assignment(cost.numpy()) for cost in costs]
        return [(torch.as_tensor(i), torch.as_tensor(j)) for i, j in pairs]


TARGETS = [{"boxes": torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n))} for n in (2, 3)]


def criterion(outputs: dict[str, Any], targets: Any = TARGETS, matcher: Callable[..., Any] | None = None) -> torch.Tensor:
    pairs = (matcher or Matcher())(outputs, targets)
    losses = [F.l1_loss(b[i], t["boxes"][j]) for b, t, (i, j) in zip(outputs["boxes"], targets, pairs, strict=True)]
    return sum(losses) + outputs["boxes"].pow(2).mean()  # type: ignore[return-value]


def by_numpy(outputs: dict[str, Any], targets: Any = TARGETS) -> torch.Tensor:
    """The matcher is no module."""
    boxes = outputs["boxes"]
    total = boxes.pow(2).mean()
    for b, t in zip(boxes, targets, strict=True):
        i, j = assignment(torch.cdist(b, t["boxes"]).detach().numpy())
        total = total + F.l1_loss(b[i], t["boxes"][j])
    return total  # type: ignore[no-any-return]


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matcher = Matcher(2.0)

    def forward(self, outputs: dict[str, Any]) -> torch.Tensor:
        return criterion(outputs, matcher=self.matcher)


class Called:
    """No module, and no function."""

    def __init__(self) -> None:
        self.targets = TARGETS

    def __call__(self, outputs: dict[str, Any]) -> torch.Tensor:
        return by_numpy(outputs, self.targets)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.drop(F.gelu(self.first(x)))
        return {"boxes": self.last(h.relu()), "none": None}


def batch(seed: int = 99, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, QUERIES, WIDTH, generator=torch.Generator().manual_seed(seed))


def states() -> list[Any]:
    key, position = np.random.get_state()[1:3]
    return [torch.get_rng_state().tolist(), random.getstate(), key.tolist(), position]  # type: ignore[union-attr]


def assert_alike(
    module: nn.Module, twin: nn.Module, loss_fn: Any = None, *, inputs: Callable[[int], torch.Tensor] = batch
) -> None:
    """Losses, gradients (None among them), trained weights, buffers and where the generators are, after each of five steps."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, twin)]
    for step in range(5):
        seen = []
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            random.seed(step)
            np.random.seed(step)
            out = m(inputs(step))
            loss = out[0] if m is module and loss_fn is not None else out if loss_fn is None else loss_fn(out)
            loss.backward()
            seen.append((loss.detach(), states(), [p.grad for p in m.parameters()]))
            optimizer.step()
        (loss, ends, gradients), (loss_twin, ends_twin, gradients_twin) = seen
        assert torch.equal(loss, loss_twin) and ends == ends_twin, f"step {step}: {loss} {loss_twin}"
        for (name, _), a, b in zip(module.named_parameters(), gradients, gradients_twin, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), f"step {step}: {name}"
        assert all(map(torch.equal, module.parameters(), twin.parameters())), f"step {step}"
        assert all(map(torch.equal, module.buffers(), twin.buffers())), f"step {step}"


def pair(made: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The planned model, and its twin in eager. To plan draws nothing."""
    torch.manual_seed(0)
    model = made()
    twin = copy.deepcopy(model)
    before = states()
    module = actsolve.optimize(model, (batch(),), **({"mem_budget": "100%", "planner": "keep_all", "hardware": "a100"} | options))
    assert states() == before
    return module, twin


def eager_of(module: nn.Module) -> tuple[str, ...]:
    runtime = runtime_of(module)
    assert runtime is not None
    return runtime.eager


class Augmented(nn.Module):
    """As SpecAugment is written: NumPy draws what is masked, and the method writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.unused = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.probability = 0.3

    def _mask_hidden(self, h: torch.Tensor, *, options: dict[str, Any]) -> torch.Tensor:
        if self.training:
            h[torch.from_numpy(np.random.rand(*h.shape[:2]) < options["p"])] = self.mask.to(h.dtype)
        return h

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self._mask_hidden(self.drop(self.inner(h)), options={"p": self.probability, "none": None})
        return F.gelu(self.inner(h))


class Model(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle or Augmented(), nn.Linear(WIDTH, WIDTH)

    def _loss(self, y: torch.Tensor) -> torch.Tensor:
        return y.logsumexp(-1).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._loss(self.last(self.middle(F.gelu(self.first(x)))))
