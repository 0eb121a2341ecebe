"""Kinds of forward whose Python depends on what tensors hold; here it takes the same way at each step."""

from __future__ import annotations

from typing import Any

import torch
from kinds import kind, of, x
from torch.nn import functional as F

from actsolve.training_step import TrainingStep


def mask(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


@kind("data: a branch")
def _() -> TrainingStep:
    return of(lambda m, h, keep: m.b(m.a(h).tanh()) if keep.all() else m.a(h), x(3, 4), mask(True, True, True))


@kind("data: a branch on what the forward computes, after dropout")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        y = F.dropout(m.a(h).tanh(), 0.4)
        return F.dropout(m.b(y), 0.3) if y.abs().max() < 9 else y

    return of(run)


@kind("data: a number that scales")
def _() -> TrainingStep:
    return of(lambda m, h, n: m.b(m.a(h).relu() * n.item()), x(3, 4), torch.tensor(0.1, dtype=torch.float64))


@kind("data: lengths, as a list")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([m.b(part).sum(0) for part in m.a(h).tanh().split(lengths.tolist())])

    return of(run, x(6, 4), torch.tensor([1, 3, 2]))


@kind("data: the longest of some lengths")
def _() -> TrainingStep:
    return of(lambda m, h, lengths: m.b(m.a(h[: int(lengths.max())]).tanh()), x(5, 4), torch.tensor([2, 4]))


@kind("data: a boolean index")
def _() -> TrainingStep:
    return of(lambda m, h, keep: m.b(m.a(h).tanh()[keep]), x(3, 4), mask(True, False, True))


@kind("data: a boolean index that is computed")
def _() -> TrainingStep:
    return of(lambda m, h: m.b(m.a(h).tanh())[h[:, 0] < 9].square())


@kind("data: an assignment by a boolean index")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        y = m.a(h) * 2
        y[keep] = m.b(h[keep]).tanh()
        return y

    return of(run, x(3, 4), mask(True, False, True))


@kind("data: masked_select, nonzero and where")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, keep: torch.Tensor) -> Any:
        y = m.a(h).tanh()
        (rows,) = torch.where(keep)
        return y.masked_select(keep[:, None]), m.b(y[rows]), keep.nonzero()

    return of(run, x(3, 4), mask(True, False, True))


@kind("data: experts that get the tokens routed to them")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(h)
        for index, expert in enumerate((m.a, m.b)):
            rows = (route == index).nonzero().squeeze(-1)
            if rows.numel():
                y = y.index_add(0, rows, torch.tanh(expert(h[rows])))
        return y

    return of(run, x(5, 4), torch.tensor([0, 1, 1, 0, 1]))


@kind("data: unique, bincount, one_hot and repeat_interleave")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, group: torch.Tensor) -> Any:
        _, inverse, counts = group.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(counts), 4).index_add(0, inverse, m.a(h).tanh())
        one_hot = F.one_hot(group).float()
        return m.b(sums).repeat_interleave(counts, dim=0), one_hot @ one_hot.T @ m.b(h), torch.bincount(group)

    return of(run, x(5, 4), torch.tensor([0, 2, 2, 0, 1]))


@kind("data: two tensors that are equal")
def _() -> TrainingStep:
    return of(lambda m, h, a, b: m.b(m.a(h)) if torch.equal(a, b) else m.a(h), x(3, 4), torch.arange(3), torch.arange(3))


@kind("data: a loop until some number is reached")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        done = torch.zeros((), dtype=torch.int64)
        while done < steps:
            h = m.a(h).tanh()
            done += 1
        return m.b(h)

    return of(run, x(3, 4), torch.tensor(3))


@kind("data: a buffer that counts, and a branch on it")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.count += 1
        return m.b(m.a(h).tanh()) if m.count < 100 else m.a(h)

    return of(run, count=torch.zeros(()))


@kind("data: a sum of squares in the loss, and a gradient that is scaled by a number")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = m.b(m.a(h).tanh())
        return F.cross_entropy(logits[labels != -100], labels[labels != -100]) * float((labels != -100).sum())

    return of(run, x(4, 4), torch.tensor([1, -100, 3, 0]))


class Cache:
    """What a forward makes and returns: tensors in a list of an object."""

    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []
        self.length = 0

    def add(self, entry: torch.Tensor) -> None:
        self.entries.append(entry)
        self.length += entry.shape[0]


@kind("an object of tensors is returned", loss=lambda output: output["y"].square().mean() + output["cache"].entries[1].mean())
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> Any:
        cache = Cache()
        cache.add(m.a(h))
        cache.add(m.b(cache.entries[0].tanh()))
        return {"y": cache.entries[1].sin(), "cache": cache}

    return of(run)
