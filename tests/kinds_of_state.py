"""Kinds of state, parameters, aliasing, inputs and outputs."""

from __future__ import annotations

import collections
import dataclasses
import types
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from kinds import Of, kind, of, step, x
from torch import nn
from torch.nn.utils import parametrizations, prune

from actsolve.training_step import TrainingStep

# -- state of the module -----------------------------------------------------------------------------------------------


class Averages(nn.Module):
    """Keeps averages in buffers; ``assign`` says whether it writes to them or replaces them."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.layer, self.assign = nn.Linear(6, 6), assign
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layer(h)
        if self.assign:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.calls = self.calls + 1
        else:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.calls += 1
        return F.gelu(h - self.mean) / self.calls


@kind("buffers updated in place")
def _() -> TrainingStep:
    return step(Averages(assign=False), x(4, 6))


@kind("buffers replaced")
def _() -> TrainingStep:
    return step(Averages(assign=True), x(4, 6))


@kind("tensors in attributes, read and assigned")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        h = m.a(h) * m.scale + m.table["shift"] + m.rows[0]
        m.last = h.detach()
        return F.gelu(h)

    made = of(run)
    made.model.scale, made.model.table, made.model.rows = torch.arange(4.0), {"shift": torch.ones(4)}, [torch.ones(4)]  # type: ignore[assignment]
    return made


@kind("weights made in hooks: weight norm, spectral norm, pruning")
def _() -> TrainingStep:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(layers[0])
    torch.nn.utils.spectral_norm(layers[1])
    prune.random_unstructured(layers[2], "weight", 0.3)
    return step(nn.Sequential(*(m for layer in layers for m in (layer, nn.GELU()))), x(3, 4))


@kind("parametrized weights: weight norm, spectral norm, orthogonal")
def _() -> TrainingStep:
    norms = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    return step(nn.Sequential(*(m for norm in norms for m in (norm(nn.Linear(4, 4)), nn.GELU()))), x(3, 4))


@kind("hooks on the module itself")
def _() -> TrainingStep:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.register_forward_hook(lambda _, args, output: output + args[0])
    return step(model, x(3, 4))


@kind("a parameter written to through .data")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.a.weight.data.mul_(0.9)
        return m.a(h)

    return of(run)


# -- parameters --------------------------------------------------------------------------------------------------------


@kind("tied weights, padding row, one block run twice")
def _() -> TrainingStep:
    model = Of(
        lambda m, ids: m.out(F.gelu(m.block(m.block(m.table(ids))))),
        table=nn.Embedding(9, 6, padding_idx=0),
        block=nn.Linear(6, 6),
        out=nn.Linear(6, 9, bias=False),
    )
    model.out.weight = model.table.weight
    model.alias = model.block
    return step(model, torch.tensor([[0, 1, 2], [3, 0, 1]]))


@kind("embeddings: bag, scaled gradients")
def _() -> TrainingStep:
    model = Of(
        lambda m, ids: m.bag(ids) + m.table(ids).mean(1),
        bag=nn.EmbeddingBag(9, 6),
        table=nn.Embedding(9, 6, scale_grad_by_freq=True),
    )
    return step(model, torch.tensor([[0, 1, 2], [3, 0, 1]]))


@kind("frozen layers, an integer parameter, an unused one")
def _() -> TrainingStep:
    made = of(
        lambda m, h: m.b(F.gelu(m.a(F.gelu(m.b(h)))))[:, m.index],
        index=nn.Parameter(torch.tensor([0, 2]), requires_grad=False),
        unused=nn.Linear(2, 2),
    )
    made.model.a.requires_grad_(False)  # type: ignore[operator]
    return made


@kind("one gradient for two parameters and an input")
def _() -> TrainingStep:
    return of(lambda m, h: m.p + m.q + h, x(3, 4, grad=True), p=nn.Parameter(x(3, 4)), q=nn.Parameter(x(3, 4)))


@kind("0-d parameter and input")
def _() -> TrainingStep:
    return of(
        lambda m, h, t: (m.a(h).sum() * m.s * t, m.s * 1.0),
        x(2, 4),
        torch.tensor(3.0, requires_grad=True),
        s=nn.Parameter(torch.tensor(2.0)),
    )


@kind("complex parameter, transforms, conjugates")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> Any:
        z = torch.fft.fft(m.a(h))
        product = (h.to(torch.cfloat) @ m.w) * z.conj() * torch.exp(1j * m.a(h))
        return product.abs(), torch.fft.rfft(m.b(h)), product.imag

    return of(run, w=nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat)))


# -- in place, aliases, views ------------------------------------------------------------------------------------------


@kind("slices, views and transposes edited in place")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        h = m.a(h) * 1
        h[:, :2] = torch.tanh(h[:, :2])
        h[1:].mul_(0.5)
        h.t()[0].add_(1.0)
        h.view(-1).mul_(2)
        h[0].zero_()
        return m.b(h.sin_().relu_())

    return of(run)


@kind("chunks edited in place")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        left, right = m.a(h).clone().chunk(2, -1)
        left, right = left * 1, right.contiguous()
        left.mul_(2)
        right.tanh_()
        return m.b(torch.cat([left, right], -1))

    return of(run)


@kind("masked_fill_, index_put, copy_ into a new tensor")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(5, 4)
        made[torch.tensor([0, 2, 4])] = m.a(h).masked_fill_(h > 0, -1.0)
        made.index_put_((torch.tensor([1, 1]),), m.a(h)[1:], accumulate=True)
        return m.b(torch.empty(5, 4).copy_(made)).softmax(-1)

    return of(run)


@kind("gather, scatter, sort, cumulate, unfold")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> Any:
        y, index = m.a(h), torch.tensor([[0, 1, 1, 2]] * 3)
        scattered = torch.zeros(3, 4).scatter_add(1, index, y) + torch.zeros(3, 4).scatter_reduce(1, index, y, "amax")
        reduced = (y.max(0)[0], y.amax(1), y.median(), y.var(0), y.norm(), y.prod(0), y.logsumexp(0), y.cumsum(0))
        return y.gather(1, index), scattered, y.sort(-1)[0], y.topk(2), reduced, y.unfold(1, 2, 1), F.unfold(y[None, None], 2)

    return of(run)


@kind("einsum, expand, roll, repeat, movedim")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("bi,ij,cj->bc", m.a(h), m.b.weight, h).flip(0).roll(1, 1).unsqueeze(0).movedim(0, 1)
        return torch.cat([h.tile(2, 1, 1), m.a.weight[:1, None, :3].expand(4, -1, -1)]).repeat_interleave(2, 0)

    return of(run)


@kind("as_strided, of an input that begins inside its storage too")
def _() -> TrainingStep:
    return of(lambda m, h: m.a(h.as_strided((2, 4), (2, 1))).as_strided((2, 3), (2, 1)), x(5, 4)[1:4])


@kind("decompositions, distances, sampling")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> Any:
        square = m.a.weight @ m.a.weight.t() + torch.eye(4)
        solved = (
            torch.linalg.inv(square),
            torch.linalg.solve(square, h.t()),
            torch.linalg.cholesky(square),
            torch.linalg.det(square),
        )
        grid = F.affine_grid(torch.eye(2, 3)[None], (1, 1, 3, 3), align_corners=False)
        sampled = F.grid_sample(m.a(h)[None, None], grid, align_corners=False)
        return solved, torch.linalg.svdvals(square), torch.cdist(m.a(h), h), F.cosine_similarity(m.b(h), h), sampled

    return of(run)


# -- inputs and outputs ------------------------------------------------------------------------------------------------


@kind("inputs that are not contiguous")
def _() -> TrainingStep:
    return of(lambda m, u, v: (m.a(u.relu()), m.b(v)), x(4, 5).t(), x(5, 8)[:, ::2])


@kind("one input given twice")
def _() -> TrainingStep:
    h = x(3, 4, grad=True)
    return of(lambda m, u, v: m.a(u) * v.sum(), h, h)


@kind("inputs edited in place")
def _() -> TrainingStep:
    return of(lambda m, h, n: (n.add_(1), m.a(h.mul_(0.5)))[1], x(2, 4), torch.zeros(2, dtype=torch.long))


@kind("keyword inputs, constants, None")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, *, scale: float, flag: bool, shift: torch.Tensor, nothing: None) -> torch.Tensor:
        return m.a(h) * scale + (shift if flag else 0)

    model = Of(run, a=nn.Linear(4, 4))
    return step(model, x(2, 4), scale=2.0, flag=True, shift=x(2, 4), nothing=None)


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Batch:
    h: torch.Tensor
    n: int = 3


@kind("named tuples, dataclasses and namespaces in and out")
def _() -> TrainingStep:
    def run(m: Any, pair: Pair, batch: Batch, space: types.SimpleNamespace) -> Any:
        out = Batch(m.a(batch.h) * batch.n + space.shift, 4)
        return Pair(m.b(pair.first), pair.second), out, types.SimpleNamespace(y=out.h.relu(), k=[1, "two"])

    return of(run, Pair(x(2, 4), [x(2), None]), Batch(x(2, 4)), types.SimpleNamespace(shift=x(4)))


@kind("outputs that are integers, constants, None")
def _() -> TrainingStep:
    return of(lambda m, h: {"y": m.a(h), "ids": m.a(h).argmax(-1), "t": torch.tensor(3), "rest": (7, None, "x", h.shape[0])})


@kind("outputs that alias inputs")
def _() -> TrainingStep:
    return of(lambda m, h: (h, h[0], h.t(), m.a(h)))


@kind("outputs that alias each other, or are one")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> Any:
        y, z = m.a(h), m.b(h).tanh()
        return y, y[0], y.t(), y.view(-1), z, z

    return of(run)


@kind("an output that is a buffer")
def _() -> TrainingStep:
    return of(lambda m, h: (m.a(h) * m.n.add_(1), m.n), n=torch.zeros(4))


@kind("a batch of none, a batch of one")
def _() -> TrainingStep:
    return of(lambda m, none, one: (m.b(F.gelu(m.a(none))), m.b(F.gelu(m.a(one)))), x(0, 4), x(1, 4))
