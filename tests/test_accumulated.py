"""Gradients that are added as they are made: to the bit what autograd would add, or left to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import Of, x
from torch import nn

import actsolve
from actsolve.errors import UsageError
from actsolve.runtime.exactness import bitwise_equal

Drive = Callable[[nn.Module, torch.Tensor], Any]


def made(run: Callable[..., Any]) -> Of:
    torch.manual_seed(0)
    return Of(run, e=nn.Linear(8, 8), f=nn.Linear(8, 8), p=nn.Parameter(torch.randn(4, 8)))


def written_over(m: Any, h: torch.Tensor) -> torch.Tensor:
    """The gradient of ``p`` is what the gradient of tanh is computed from, in place where nothing else needs it."""
    return m.f(torch.sigmoid(torch.tanh(m.e(h)) + m.p)).sin()


def two_kinds(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.f(torch.cat([h, m.p]))  # the gradients of an input and of a parameter are parts of one


def backward(m: nn.Module, h: torch.Tensor) -> None:
    m(h).mean().backward()


def with_penalty(m: nn.Module, h: torch.Tensor) -> None:
    (m(h).mean() + 0.3 * m.p.square().sum()).backward()  # type: ignore[union-attr, operator]


def two_forwards(m: nn.Module, h: torch.Tensor) -> None:
    (m(h).mean() + m(h * 2).square().mean()).backward()


def two_losses(m: nn.Module, h: torch.Tensor) -> None:
    torch.autograd.backward([m(h).mean(), m(h * 2).mean()])


def frozen_meanwhile(m: nn.Module, h: torch.Tensor) -> None:
    loss = m(h).mean()
    m.requires_grad_(False)
    loss.backward()
    m.requires_grad_(True)


def hooks_of_the_accumulator(m: nn.Module, h: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    p: Any = m.p
    node = p.view_as(p).grad_fn.next_functions[0][0]
    handles = [node.register_prehook(lambda grads: (grads[0] * 2,)), node.register_hook(lambda *_: seen.append(p.grad.clone()))]
    m(h).mean().backward()
    for handle in handles:
        handle.remove()
    return seen


DRIVES: dict[str, Drive] = {
    "a backward": backward,
    "a penalty outside": with_penalty,
    "two forwards in one backward": two_forwards,
    "two losses": two_losses,
    "frozen between forward and backward": frozen_meanwhile,
    "hooks of the accumulator": hooks_of_the_accumulator,
}


@pytest.mark.parametrize("planner", ["keep_all", "milp"])
@pytest.mark.parametrize("drive", DRIVES.values(), ids=DRIVES)
@pytest.mark.parametrize("run", [written_over, two_kinds])
def test_as_eager(run: Callable[..., Any], drive: Drive, planner: str) -> None:
    """Five micro-batches; before the first there are no gradients, and before the fourth they are dropped."""
    ours, inputs = made(run), [x(4, 8, grad=True) for _ in range(5)]
    twin, their_inputs = copy.deepcopy(ours), [h.detach().clone().requires_grad_() for h in inputs]
    budget = 1.0 if planner == "keep_all" else "min"
    module = actsolve.optimize(
        ours, (inputs[0],), mem_budget=budget, planner=planner, hardware="a100", grads="accumulate", optimizer="none"
    )
    for number, (a, b) in enumerate(zip(their_inputs, inputs, strict=True)):
        if number == 3:
            twin.zero_grad()
            module.zero_grad()
        expected, got = drive(twin, a), drive(module, b)
        assert (expected is None) == (got is None) and all(map(bitwise_equal, expected or (), got or ()))
        for (name, p), q in zip(twin.named_parameters(), module.parameters(), strict=True):
            assert bitwise_equal(p.grad, q.grad), f"{name}, micro-batch {number}"
        assert bitwise_equal(a.grad, b.grad), f"input, micro-batch {number}"


def test_gradients_that_are_differentiated_keep_their_graph() -> None:
    """``create_graph`` adds out of place: a penalty on ``p.grad`` leads back, and is refused."""
    ours, h = made(written_over), x(4, 8)
    module = actsolve.optimize(ours, (h,), mem_budget=1.0, planner="keep_all", hardware="a100", grads="accumulate")
    backward(module, h)
    module(h).mean().backward(create_graph=True)
    with pytest.raises(UsageError, match="differentiated twice"):
        ours.p.grad.square().sum().backward()  # type: ignore[union-attr, operator]
