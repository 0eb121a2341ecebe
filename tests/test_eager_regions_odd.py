"""Regions left in eager that do odd things: bitwise as eager where that is so, and refused where a second run would tell."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import actsolve
from actsolve.errors import CaptureError, UsageError

WIDTH = 16
Run = Callable[..., Any]


class Region(nn.Module):
    """What is left in eager: it runs ``run``."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("table", torch.ones(WIDTH))
        self.scale = 1.0
        self._run = run

    def forward(self, *args: Any) -> Any:
        return self._run(self, *args)


class Model(nn.Module):
    def __init__(self, run: Run, around: Run) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Region(run), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self._around = around

    def forward(self, x: torch.Tensor) -> Any:
        return self._around(self, torch.tanh(self.first(x)))


def plain(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.last(m.middle(h)).float().pow(2).mean()  # type: ignore[no-any-return]


def batch(seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(seed)) * scale


def pair(run: Run, around: Run = plain, *, autocast: bool = False, scale: float = 1.0) -> tuple[nn.Module, nn.Module]:
    """The planned model, and its twin in eager."""
    torch.manual_seed(0)
    model = Model(run, around)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        options: dict[str, Any] = {"planner": "keep_all", "hardware": "a100", "mem_budget": "100%", "eager": ["middle"]}
        return actsolve.optimize(model, (batch(99, scale),), **options), twin


def first_of(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs  # type: ignore[no-any-return]


def assert_alike(module: nn.Module, twin: nn.Module, *, autocast: bool = False, scale: float = 1.0) -> None:
    """Losses, gradients (None among them), buffers and random states are the same for six batches."""
    for step in range(6):
        seen = []
        for m in (module, twin):
            m.zero_grad()
            torch.manual_seed(step)
            random.seed(step)
            np.random.seed(step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = first_of(m(batch(step, scale)))
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append((loss.detach(), torch.rand(1).item(), random.random(), np.random.rand()))
        assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1:] == seen[1][1:], f"step {step}: {seen}"
        for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"step {step}: {name}: {p.grad}"
            assert p.grad is None or torch.equal(p.grad, q.grad), f"step {step}: {name}"  # type: ignore[arg-type]
        assert all(map(torch.equal, module.buffers(), twin.buffers()))


def largest(x: torch.Tensor) -> float:
    return float(np.abs(x.detach().float().numpy()).max())


def expert(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.a, m.b, m.c)[int(largest(x) * 1000) % 3](x)  # type: ignore[no-any-return]


def sometimes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x).pow(2).mean() if largest(x) > 0.9 else torch.zeros(())  # type: ignore[no-any-return]


def in_full_precision(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.a(x.float())  # type: ignore[no-any-return]


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


def without_gradients(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.middle(h)
    return m.last(h + y).pow(2).mean()  # type: ignore[no-any-return]


def two_losses(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = m.middle(h)
    return m.last(one).pow(2).mean(), other.pow(2).mean()


ALIKE: dict[str, tuple[Run, Run, float]] = {
    "a gradient of one call of two": (expert, lambda m, h: m.last(m.middle(m.middle(h))).pow(2).mean(), 1.0),
    "an output that needs a gradient later": (sometimes, lambda m, h: m.last(h).pow(2).mean() + m.middle(h), 5.0),
    "an input that is not used": (
        lambda m, x, y: (x if largest(x) > 0.97 else y) * 2,
        lambda m, h: m.middle(m.first(h), m.last(h)).pow(2).mean(),
        1.0,
    ),
    "a number that depends on data": (
        lambda m, x: (m.a(x), int(largest(x) * 4)),
        lambda m, h: (lambda y, n: m.last(y).pow(2).mean() * (n + 1))(*m.middle(h)),
        1.0,
    ),
    "a layout that depends on data": (
        lambda m, x: m.a(x) if largest(x) > 0.97 else m.a(x).mT.contiguous().mT,
        lambda m, h: m.last(m.middle(h).reshape(-1, WIDTH)).pow(2).mean(),
        1.0,
    ),
    "a dtype that depends on data": (
        lambda m, x: m.a(x) if largest(x) > 0.97 else m.a(x).double(),
        lambda m, h: m.last(m.middle(h).float()).pow(2).mean(),
        1.0,
    ),
    "called without gradients": (lambda m, x: m.a(x) * (2.0 if torch.is_grad_enabled() else 1.0), without_gradients, 1.0),
    "parameters are parameters": (lambda m, x: m.a(x) * isinstance(m.a.weight, nn.Parameter), plain, 1.0),
    "its input is no leaf": (lambda m, x: m.a(x) * (2.0 if x.is_leaf else 1.0), plain, 1.0),
    "its backward draws": (lambda m, x: Draws.apply(m.a(x)), plain, 1.0),
    "a backward from one of two outputs": (lambda m, x: (m.a(x), m.b(x)), two_losses, 1.0),
    "a leaf that it makes": (lambda m, x: m.a(x + torch.zeros(WIDTH, requires_grad=True)), plain, 1.0),
    "a checkpoint inside": (lambda m, x: checkpoint(lambda y: m.drop(m.a(y)), x, use_reentrant=False), plain, 1.0),
    "it sets the seed": (lambda m, x: m.a(x) * torch.manual_seed(3).initial_seed() + torch.rand(1), plain, 1.0),
    "it shows a number": (lambda m, x: m.a(x) * float(f"{x.mean():.3f}"), plain, 1.0),
    "it sets the data of a tensor": (lambda m, x: setattr(m.a.weight, "data", m.a.weight.data) or m.a(x), plain, 1.0),
    "a use of its input before": (lambda m, x: m.a(x) * m.b(x), lambda m, h: plain(m, h * 1) + m.last(h).mean(), 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALIKE)
def test_as_in_eager(kind: str) -> None:
    run, around, scale = ALIKE[kind]
    module, twin = pair(run, around)
    assert_alike(module, twin, scale=scale)


@pytest.mark.parametrize("run", [in_full_precision, lambda m, x: m.a(x) * m.b(x)], ids=["full precision", "two uses"])
def test_as_in_eager_under_autocast(run: Run) -> None:
    """Its backward runs outside of autocast, and the casts of its inputs, which are no leaves, are not kept."""
    module, twin = pair(run, lambda m, h: plain(m, F.layer_norm(h.float(), (WIDTH,))), autocast=True)
    assert_alike(module, twin, autocast=True)


KEPT: list[torch.Tensor] = []


def appends(m: Any, x: torch.Tensor, into: Any) -> torch.Tensor:
    into.append(m.a(x).mean())
    return m.b(x)  # type: ignore[no-any-return]


def keeps(m: Any, x: torch.Tensor) -> torch.Tensor:
    KEPT.append(m.a(x))
    return KEPT[-1]


def with_list(m: Any, h: torch.Tensor) -> torch.Tensor:
    into: list[torch.Tensor] = []
    return plain(SimpleNamespace(last=m.last, middle=lambda x: m.middle(x, into)), h) + sum(into)


def sets_a_mask(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.middle.mask = (h > 0).float()
    return plain(m, h)


REFUSED: dict[str, tuple[Run, Run, str]] = {
    "sums in another order": (
        lambda m, x: m.a(x) * m.b(x),
        lambda m, h: m.last(h + m.middle(h)).pow(2).mean(),
        "cannot add the gradients of tanh bitwise as eager does",
    ),
    "a list that it is given": (appends, with_list, "changes a list, dict or object that it is given"),
    "a list of all": (keeps, plain, "changes something outside of it"),
    "a view of its input": (lambda m, x: x[..., :8], lambda m, h: m.middle(h).mean() + plain(m, h), "in memory of its inputs"),
    "one tensor twice": (lambda m, x: (x * 2,) * 2, lambda m, h: m.middle(h)[0].mean(), "in memory of its inputs"),
    "a buffer": (lambda m, x: (m.table, m.a(x)), lambda m, h: m.middle(h)[1].mean(), "in memory of its inputs"),
    "no tensor": (lambda m, x: 3, lambda m, h: m.last(h).mean() * m.middle(h), "returns no tensor"),
    "an object": (lambda m, x: (m.a(x), object()), lambda m, h: m.middle(h)[0].mean(), "returns a object"),
    "a tensor that is set before": (lambda m, x: m.a(x * m.mask), sets_a_mask, "a tensor is put into middle"),
    "a mode": (lambda m, x: (m.drop.eval() if m.drop.training else m.drop.train())(m.a(x)), plain, "an attribute of middle.drop"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_lost_is_refused(kind: str) -> None:
    run, around, message = REFUSED[kind]
    with pytest.raises(CaptureError, match=message):
        pair(run, around)
    KEPT.clear()


def test_an_input_of_the_model_is_a_leaf() -> None:
    """So autocast keeps its cast, and adds the gradients of its two uses in low precision."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle = Region(lambda m, x: m.a(x) * m.b(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.middle(x).float().pow(2).mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Direct()
    twin = copy.deepcopy(model)
    inputs = [batch(3).requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        options: dict[str, Any] = {"planner": "keep_all", "hardware": "a100", "mem_budget": "100%", "eager": ["middle"]}
        module = actsolve.optimize(model, (batch(3).requires_grad_(),), **options)
        losses = [m(x) for m, x in zip((module, twin), inputs, strict=True)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses) and torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


def test_a_buffer_of_another_module_is_refused() -> None:
    """The planned step updates it at its end, eager before the region reads it."""
    owner: list[Any] = []

    def around(m: Any, h: torch.Tensor) -> torch.Tensor:
        owner[:] = [m]
        m.count += 1
        return plain(m, h)

    with pytest.raises(CaptureError, match=r"reads a tensor of shape .* of another module"):
        pair(lambda m, x: m.a(x) * owner[0].count, around)


@pytest.mark.parametrize(
    ("attribute", "expected"), [("training", nullcontext()), ("scale", pytest.raises(UsageError, match="changed between"))]
)
def test_a_change_between_forward_and_backward(attribute: str, expected: Any) -> None:
    """Modes are put back for the second run; any other change is refused."""
    module, twin = pair(lambda m, x: m.drop(m.a(x)) * m.scale)
    gradients = []
    for m, context in ((twin, nullcontext()), (module, expected)):
        torch.manual_seed(1)
        loss = m(batch(0))
        if attribute == "training":
            m.eval()
        else:
            m.middle.scale = 3.0  # type: ignore[union-attr]
        with context:
            loss.backward()
            gradients.append(m.middle.a.weight.grad)  # type: ignore[union-attr]
    assert len(gradients) == 1 or torch.equal(*gradients)


def test_two_threads_run_one_after_the_other() -> None:
    def slowly(m: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return m.a(x)  # type: ignore[no-any-return]

    module, twin = pair(slowly)
    errors: list[Exception] = []

    def train() -> None:
        try:
            for _ in range(3):
                module(batch(0)).backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and all(type(p) is nn.Parameter for p in module.middle.a._parameters.values())  # type: ignore[union-attr]
    for _ in range(9):
        twin(batch(0)).backward()
    for (name, p), q in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        if (gradient := q[1].grad) is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, gradient, msg=f"{name}: no gradient is lost")
    assert_alike(module, twin)


def test_one_module_in_two_places() -> None:
    def around(m: Any, h: torch.Tensor) -> torch.Tensor:
        return m.last(m.again(m.middle(h))).pow(2).mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Model(lambda m, x: m.a(x), around)
    model.again = model.middle
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"planner": "keep_all", "hardware": "a100", "mem_budget": "100%"}
    assert_alike(actsolve.optimize(model, (batch(99),), eager=["middle", "again"], **options), twin)


def test_an_error_inside_leaves_all_as_it_was() -> None:
    fails = [False]

    def may_fail(m: Any, x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise KeyboardInterrupt
        return m.a(x)  # type: ignore[no-any-return]

    module, twin = pair(may_fail)
    fails[0] = True
    with pytest.raises(KeyboardInterrupt):
        module(batch(0))
    fails[0] = False
    assert_alike(module, twin)


def test_a_second_optimized_run_of_a_saved_plan(tmp_path: Any) -> None:
    module, twin = pair(lambda m, x: m.a(x))
    module.plan.save(tmp_path / "plan.json")  # type: ignore[union-attr,operator]
    again = actsolve.optimize(copy.deepcopy(twin), (batch(99),), eager=["middle"], plan=tmp_path / "plan.json", hardware="a100")
    assert_alike(again, twin)
