"""Kinds of backward: what it starts from, and what is done with autograd inside the forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from kinds import Of, kind, of, step, x
from torch import nn
from torch.utils.checkpoint import checkpoint

from actsolve.training_step import TrainingStep

# -- what the backward starts from -------------------------------------------------------------------------------------


def _language_model(m: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = m.out(F.dropout(m.table(ids), 0.1))
    return {"loss": F.cross_entropy(logits.view(-1, 9), ids.view(-1)), "logits": logits}


def language_model() -> TrainingStep:
    return step(Of(_language_model, table=nn.Embedding(9, 6), out=nn.Linear(6, 9)), torch.tensor([[0, 1, 2], [3, 0, 1]]))


kind("a loss with its logits", loss=lambda out: out["loss"])(language_model)
kind("a loss and its logits", loss=lambda out: out["loss"] + out["logits"].square().mean())(language_model)


def two_heads() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> dict[str, torch.Tensor]:
        trunk = m.trunk(h).tanh()
        return {"a": m.a(trunk), "b": m.b(trunk).log_softmax(-1), "trunk": trunk}

    return of(run, x(3, 4, grad=True), trunk=nn.Linear(4, 4))


kind("one of two heads", loss=lambda out: out["a"].square().sum())(two_heads)
kind("the mean of an output", loss=lambda out: out["b"].mean())(two_heads)
kind("a transposed output", loss=lambda out: (out["a"].t().contiguous() * out["trunk"].t().contiguous()).sum() * 0.3)(two_heads)


@kind("an output and a loss that does not depend on it", loss=lambda out: out[0].square().mean() + out[1])
def _() -> TrainingStep:
    return of(lambda m, h: (m.a(h), m.b(h).square().mean()))


@kind("a loss function")
def _() -> TrainingStep:
    layers = (nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4))
    return step(nn.Sequential(*layers), x(5, 6), loss_fn=lambda y: F.cross_entropy(y, torch.arange(5) % 4))


# -- autograd ----------------------------------------------------------------------------------------------------------


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(h)
        ctx.limit = limit
        return h.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (h,) = ctx.saved_tensors
        return gradient * (h.abs() < ctx.limit), None


@kind("a function with a backward of its own, fake quantization, vmap")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> Any:
        mapped = torch.vmap(lambda row: (m.a.weight @ row).tanh())(h)
        return m.b(Quantize.apply(m.a(h), 1.0)), torch.fake_quantize_per_tensor_affine(mapped, 0.1, 0, 0, 255)

    return of(run)


@kind("a part that is checkpointed already")
def _() -> TrainingStep:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.4), nn.Linear(4, 4))
    return of(lambda m, h: m.b(checkpoint(m.block, m.a(h), use_reentrant=False)), block=block)


@kind("detached parts, parts without gradients")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = F.dropout(m.b(h), 0.5)
        feature = m.b(h).detach().requires_grad_()
        return m.a(h) * target + m.b(h.detach()).sum() + m.a(feature)

    return of(run, x(3, 4, grad=True))


@kind("a gradient taken in the forward, hooks on its tensors")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        at = h.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(m.a(at).tanh().sum(), at, create_graph=True)
        y = m.b(gradient)
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return y.tanh()

    return of(run)


@kind("infinities and NaN")
def _() -> TrainingStep:
    return of(lambda m, h: torch.where(h > 0, m.a(h).log(), m.a(h)))


@kind("forty layers")
def _() -> TrainingStep:
    return step(nn.Sequential(*(m for _ in range(40) for m in (nn.Linear(4, 4), nn.Tanh()))), x(2, 4))


@kind("reentrant checkpoints with dropout, one in another")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        inner = lambda y: F.dropout(m.b(y).tanh(), 0.4)  # noqa: E731
        outer = lambda y: F.dropout(checkpoint(inner, m.a(y), use_reentrant=True), 0.2)  # noqa: E731
        return m.b(checkpoint(outer, m.a(h), use_reentrant=True))

    return of(run)


@kind("a reentrant checkpoint whose arguments require no gradient")
def _() -> TrainingStep:
    """Its parameters get none, as in eager, which warns of it."""
    return of(lambda m, h: m.b(h) + checkpoint(m.a, h, use_reentrant=True))


@kind("a loss of logits and of their transpose, which are returned too", loss=lambda output: output[0])
def _() -> TrainingStep:
    """Without a gradient for the logits, the sum of theirs is laid out as its first term is."""

    def run(m: Any, h: torch.Tensor) -> Any:
        logits = m.wide(m.a(h))
        labels = torch.arange(len(logits))
        return F.cross_entropy(logits.t(), labels) + F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels), logits

    return of(run, x(6, 4), wide=nn.Linear(4, 6))
