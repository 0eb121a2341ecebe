"""Loss functions, and what is in them, left in eager: they train as eager does, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_parts import (
    TARGETS,
    WIDTH,
    Called,
    Criterion,
    Detector,
    assert_alike,
    batch,
    by_numpy,
    criterion,
    eager_of,
    pair,
)
from torch import nn

from actsolve.errors import CaptureError

LOSSES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a function": (lambda: by_numpy, ("loss_fn",)),
    "a lambda": (lambda: lambda outputs: by_numpy(outputs) * 2, ("loss_fn",)),
    "a partial": (lambda: functools.partial(by_numpy, targets=TARGETS), ("loss_fn",)),
    "an object": (Called, ("loss_fn",)),
    "a method": (lambda: Called().__call__, ("loss_fn",)),
    "a module": (Criterion, ("loss_fn.matcher",)),
    "a function that makes a module": (lambda: criterion, ("eager_parts.Matcher",)),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_no_trace_can_follow(kind: str) -> None:
    made, found = LOSSES[kind]
    loss_fn = made()
    module, twin = pair(Detector, loss_fn=loss_fn)
    assert eager_of(module) == found, "found by itself"
    assert f"Left in eager: {found[0]}." in module.report()  # type: ignore[operator]
    assert_alike(module, twin, loss_fn)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_by_name(kind: str) -> None:
    loss_fn = LOSSES[kind][0]()
    module, twin = pair(Detector, loss_fn=loss_fn, eager=["loss_fn"], planner="milp", mem_budget="min")
    assert eager_of(module) == ("loss_fn",)
    assert_alike(module, twin, loss_fn)


def test_a_loss_and_its_output() -> None:
    """The loss reads its output twice: a backward that starts from that output too would add in another order."""
    module, _ = pair(Detector, loss_fn=by_numpy, eager=["loss_fn"])
    loss, output = module(batch())
    with pytest.raises(CaptureError, match=r"cannot add the gradients of .* bitwise as eager does"):
        (loss + output["boxes"].mean()).backward()


def test_a_weight_of_the_loss_is_refused() -> None:
    class Scaled(Criterion):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: dict[str, Any]) -> torch.Tensor:
            return super().forward(outputs) * self.scale

    weight = torch.ones((), requires_grad=True)
    for loss_fn in (Scaled(), lambda outputs: by_numpy(outputs) * weight):
        with pytest.raises(CaptureError, match=r"loss_fn, which is left in eager, uses a tensor of shape \(\)"):
            pair(Detector, loss_fn=loss_fn, eager=["loss_fn"])


def test_a_weight_that_a_loss_uses_later_is_refused() -> None:
    weight = torch.ones((), requires_grad=True)

    def loss_fn(outputs: dict[str, Any]) -> torch.Tensor:
        loss = by_numpy(outputs)
        return loss if float(outputs["boxes"].detach().numpy()[0, 0, 0]) > LIMIT[0] else loss * weight

    module, _ = pair(Detector, loss_fn=loss_fn, eager=["loss_fn"])
    module(batch())[0].backward()
    LIMIT[0] = float("inf")
    try:
        with pytest.raises(CaptureError, match=r"loss_fn, which is left in eager, uses a tensor of shape \(\)"):
            module(batch())[0].backward()
    finally:
        LIMIT[0] = float("-inf")


LIMIT = torch.tensor([float("-inf")]).numpy()


def test_a_loss_that_reads_the_model_is_refused() -> None:
    model = Detector()
    with pytest.raises(CaptureError, match=r"reads a tensor of shape .* of another module"):
        pair(lambda: model, loss_fn=lambda o: by_numpy(o) + model.last.weight.detach().sum(), eager=["loss_fn"])


def counts_in_its_module(seen: list[int]) -> Any:
    class Counts(Criterion):
        def forward(self, outputs: dict[str, Any]) -> torch.Tensor:
            self.matcher.weight += 1
            return super().forward(outputs)

    return Counts()


def counts_in_a_closure(seen: list[int]) -> Any:
    def loss_fn(outputs: dict[str, Any]) -> torch.Tensor:
        seen[0] += 1
        return by_numpy(outputs)

    return loss_fn


def counts_in_an_object(seen: list[int]) -> Any:
    class Counts(Called):
        calls = 0

        def __call__(self, outputs: dict[str, Any]) -> torch.Tensor:
            self.calls += 1
            return super().__call__(outputs)

    return Counts()


@pytest.mark.parametrize("made", [counts_in_its_module, counts_in_a_closure, counts_in_an_object])
def test_a_loss_that_changes_something_is_refused(made: Callable[[list[int]], Any]) -> None:
    with pytest.raises(CaptureError, match="loss_fn, which is left in eager, changes"):
        pair(Detector, loss_fn=made([0]), eager=["loss_fn"])


def test_a_loss_that_takes_another_way_each_time() -> None:
    """As hard negatives are mined: how many there are differs at each step."""

    def mined(outputs: dict[str, Any]) -> torch.Tensor:
        error = outputs["boxes"].pow(2).mean(-1)
        return error[error > error.mean()].sum()

    module, twin = pair(Detector, loss_fn=mined)
    assert eager_of(module) == ()
    with pytest.warns(UserWarning, match="from here on loss_fn run as they are"):
        assert_alike(module, twin, mined)
    assert eager_of(module) == ("loss_fn",)


# -- a loss that is traced, and a module ---------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self, run: Callable[[Any], None] = lambda m: None) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(WIDTH))
        self.run = run

    def forward(self, outputs: dict[str, Any]) -> torch.Tensor:
        self.run(self)
        return (outputs["boxes"] * self.weight).pow(2).mean()


@pytest.mark.parametrize(
    "run",
    [lambda m: m.weight.mul_(2), lambda m: setattr(m, "weight", m.weight * 2), lambda m: setattr(m, "calls", 1)],
    ids=["in place", "a new buffer", "an attribute"],
)
def test_a_loss_that_changes_itself_is_refused_and_put_back(run: Callable[[Any], None]) -> None:
    loss_fn = Weighted(run)
    with pytest.raises(CaptureError, match="the loss changes"):
        pair(Detector, loss_fn=loss_fn)
    assert torch.equal(loss_fn.weight, torch.ones(WIDTH)) and "calls" not in loss_fn.__dict__


def test_a_buffer_of_the_loss_is_read_as_it_is() -> None:
    inner = Weighted()
    loss_fn = nn.Sequential(inner)
    module, twin = pair(Detector, loss_fn=loss_fn)
    assert eager_of(module) == ()
    assert_alike(module, twin, loss_fn)
    inner.weight.mul_(2)
    assert_alike(module, twin, loss_fn)
    inner.weight = torch.full((WIDTH,), 3.0)
    assert_alike(module, twin, loss_fn)
