"""Submodules that are left in eager train as eager does, to the bit, and what they take is in the plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import actsolve
import actsolve.module
import actsolve.ways
from actsolve.capture.captured import capture
from actsolve.capture.eager_choice import left_besides, left_in_eager
from actsolve.errors import CaptureError, UsageError
from actsolve.module import runtime_of
from actsolve.runtime.memory_events import measure_peak
from actsolve.runtime.trainer import Trainer
from actsolve.training_step import TrainingStep

WIDTH = 16


class Experts(nn.Module):
    """Tokens go to the experts that a gate sends them to: how many go where is known when it runs."""

    def __init__(self, *, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH)) for _ in range(4)
        )
        self.shared = shared or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, WIDTH)
        scores = self.gate(flat).softmax(-1)
        weight, chosen = scores.topk(1)
        out = self.shared(flat)
        for number, expert in enumerate(self.experts):
            rows, k = torch.where(chosen == number)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, k, None])
        return out.reshape(x.shape), scores.mean()


class Model(nn.Module):
    def __init__(self, middle: Callable[[nn.Linear], nn.Module] = lambda shared: Experts(shared=shared)) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle(self.first)
        self.last = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 20))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.first(self.embed(tokens)), 0.1)
        out = self.middle(h)
        y, extra = out if isinstance(out, tuple) else (out, out.mean())
        return self.last(h + y).logsumexp(-1).mean() + extra


def tokens(rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 20, (rows, 6))


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index,union-attr]


def restore(kept: Any) -> None:
    torch_state, python, array = kept
    torch.set_rng_state(torch_state)
    random.setstate(python)
    np.random.set_state(array)


def assert_trains_alike(
    module: nn.Module, twin: nn.Module, *, steps: int = 4, backward: Callable[[Any], None] = torch.Tensor.backward
) -> None:
    """Both train on the same random batches; all that can be seen is compared after each."""
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (module, twin)]
    for step in range(steps):
        batch = tokens()
        begun = (torch.get_rng_state(), random.getstate(), np.random.get_state())
        losses, ends = [], []
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            restore(begun)
            optimizer.zero_grad()
            losses.append(m(batch))
            backward(losses[-1])
            optimizer.step()
            ends.append(states())
        assert torch.equal(*losses), f"step {step}: {losses}"
        assert ends[0] == ends[1], f"step {step}: random state"
        for (name, a), (_, b) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), f"step {step}: {name}: {a.grad}"
            assert a.grad is None or torch.equal(a.grad, b.grad), f"step {step}: {name}"  # type: ignore[arg-type]
            assert torch.equal(a, b), f"step {step}: {name}"


def optimized(model: nn.Module, **options: Any) -> nn.Module:
    args = options.pop("args", None) or (tokens(),)
    return actsolve.optimize(model, args, **({"mem_budget": "100%", "planner": "keep_all"} | options))


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Model(**options)
    return model, copy.deepcopy(model)


# -- it trains as eager does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mem_budget": "min", "planner": "milp"}, {"grads": "accumulate"}], ids=str)
def test_experts_with_dropout_and_a_shared_weight(options: dict[str, Any]) -> None:
    """Some experts get no token: eager's gradients are None there, until they have got one."""
    model, twin = pair()
    module = optimized(model, eager=["middle"], **options)
    assert_trains_alike(module, twin, steps=6)
    assert runtime_of(module).eager == ("middle",)  # type: ignore[union-attr]


def test_no_token_no_gradient() -> None:
    model, twin = pair()
    module = optimized(model, eager=["middle"])
    batch = torch.zeros(4, 6, dtype=torch.long)  # all alike: but for dropout they go to one expert
    for m in (module.eval(), twin.eval()):
        m.middle.train() and m.last.train()
    module.train(), twin.train()
    model.middle.gate.weight.data.zero_()[2] = 100 * torch.sign(model.middle.gate.weight.data[2] + 0.5)
    twin.load_state_dict(model.state_dict())
    for m in (module, twin):
        torch.manual_seed(3)
        m(batch).backward()
    none = [name for name, p in twin.named_parameters() if p.grad is None]
    assert none and none == [name for name, p in module.named_parameters() if p.grad is None]


def test_two_forwards_pend_and_a_backward_runs_twice() -> None:
    model, twin = pair()
    module = optimized(model, eager=["middle"])
    batches = [tokens(), tokens()]
    for m in (module, twin):
        torch.manual_seed(7)
        losses = [m(batch) for batch in batches]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), name  # type: ignore[arg-type]


def test_under_autocast() -> None:
    model, twin = pair(middle=lambda _: Experts())
    batch = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = optimized(model, eager=["middle"])
    for m in (module, twin):
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m(batch)
        loss.backward()
    for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), name  # type: ignore[arg-type]


class Masked(nn.Module):
    """As SpecAugment is written: NumPy and Python draw."""

    def __init__(self, _: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        mask = torch.from_numpy(np.random.rand(*h.shape[:2]) < 0.3)
        h = torch.where(mask[..., None], self.inner.bias, h)
        return self.inner(h) * random.random()


def test_python_and_numpy_draw() -> None:
    model, twin = pair(middle=Masked)
    np.random.seed(0)
    random.seed(0)
    batch = tokens()
    before = states()
    module = optimized(model, args=(batch,), eager=["middle"])
    assert states() == before, "to plan draws nothing"
    assert_trains_alike(module, twin)


# -- what is left in eager unasked ----------------------------------------------------------------------------------------------


class ByNumpy(nn.Module):
    def __init__(self, _: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h) * float(np.abs(h.detach().numpy()).max())


class Packed(nn.Module):
    """Sequences of lengths that the data say."""

    def __init__(self, _: nn.Linear) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        lengths = 1 + (h.detach().sum((1, 2)).abs() * 7).long() % h.shape[1]
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=h.shape[1])
        return out


@pytest.mark.parametrize("middle", [ByNumpy, Packed])
def test_what_no_trace_can_follow(middle: Any) -> None:
    model, twin = pair(middle=middle)
    module = optimized(model)
    assert_trains_alike(module, twin)
    assert "Left in eager: middle." in module.report()  # type: ignore[operator]


def test_what_takes_another_way_each_time() -> None:
    model, twin = pair()
    module = optimized(model)
    with pytest.warns(UserWarning, match="from here on middle run as they are"):
        assert_trains_alike(module, twin, steps=8)
    runtime = runtime_of(module)
    assert runtime is not None and runtime.eager == ("middle",)
    assert [len(ways.steps) for ways in runtime.steps.values()] == [1]


def test_where_the_model_itself_asks_the_original_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * tokens.sum().item()

    monkeypatch.setattr(actsolve.module, "MANY_WAYS", 2)
    torch.manual_seed(0)
    model = Asks(lambda shared: nn.Identity())
    twin = copy.deepcopy(model)
    module = optimized(model)
    with pytest.warns(UserWarning, match="here the original runs"):
        assert_trains_alike(module, twin, steps=6)


# -- memory, time, FLOPs --------------------------------------------------------------------------------------------------------


def test_the_peak_and_the_flops_are_those_of_the_step() -> None:
    torch.manual_seed(0)
    batch = tokens(64)
    model = Model()
    module = actsolve.optimize(model, (batch,), mem_budget="min", eager=["middle"])
    trainer = Trainer(TrainingStep(module, (batch,)), torch.optim.AdamW)
    trainer.step()
    trainer.drop_gradients()
    peak_bytes = trainer.static_bytes() + measure_peak(trainer.step).peak_bytes
    # Dropout before it sends other tokens to other experts than those that were planned for.
    assert 0.9 * peak_bytes < module.plan.budget_bytes * 1.02 and peak_bytes < module.plan.budget_bytes * 1.02  # type: ignore[union-attr,operator]


def test_flops_are_those_that_torch_counts() -> None:
    torch.manual_seed(0)
    model, batch = Model(), tokens()
    graph = capture(TrainingStep(model, (batch,), eager=("middle",))).graph
    (forward,) = (op for op in graph.ops if "region.default" in op.target)
    (backward,) = (op for op in graph.ops if "region_backward" in op.target)
    h = torch.randn(4, 6, WIDTH)
    with FlopCounterMode(display=False) as counter:
        model.middle(h)
    products = counter.get_total_flops()  # torch counts these alone
    assert forward.flops is not None and backward.flops is not None
    assert products < forward.flops < 1.3 * products
    assert 3 * products < backward.flops < 3.5 * products, "once more forward, and two products for each in the backward"


# -- what is refused ------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, run: Callable[..., Any], first: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.hidden = [first]
        self.calls = 0
        self._run = run

    def forward(self, h: torch.Tensor) -> Any:
        return self._run(self, h)


def counts(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return m.inner(h)  # type: ignore[no-any-return]


def writes(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen += 1
    return m.inner(h)  # type: ignore[no-any-return]


def hides(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.inner(m.hidden[0](h))  # type: ignore[no-any-return]


def edits(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.inner(h.mul_(2))  # type: ignore[no-any-return]


def draws_by_itself(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.generator = getattr(m, "generator", None) or GENERATOR
    return m.inner(h) * torch.rand((), generator=GENERATOR)  # type: ignore[no-any-return]


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (counts, "changes an attribute of middle"),
        (writes, "which is left in eager, changes"),
        (hides, "uses a tensor of shape .* that is not its own"),
        (edits, "which is left in eager, changes"),
        (draws_by_itself, "changes|returns something else when it runs a second time"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_second_run_would_change_is_refused(run: Callable[..., Any], match: str) -> None:
    model, _ = pair(middle=lambda first: Odd(run, first))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=match):
        optimized(model, eager=["middle"])
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert "forward" not in model.middle.__dict__ and model.middle.calls == 0  # type: ignore[union-attr]


def test_a_weight_that_is_also_used_outside_is_refused_under_autocast() -> None:
    """Eager has one cast for both uses, and adds their gradients in low precision."""
    model, _ = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CaptureError, match=r"gradients of first\.weight"):
        optimized(model, eager=["middle"])


@pytest.mark.parametrize("eager", [["nowhere"], [""], "middle", [3]], ids=str)
def test_paths_of_submodules_only(eager: Any) -> None:
    with pytest.raises(UsageError, match="cannot use eager="):
        optimized(Model(), eager=eager)


def test_without_data_nothing_is_left_in_eager() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(CaptureError, match="the inputs hold no data"):
        capture(TrainingStep(model, (torch.zeros(4, 6, dtype=torch.long, device="meta"),), eager=("middle",)))


# -- which modules --------------------------------------------------------------------------------------------------------------


def test_the_smallest_that_hold_it_and_those_that_are_like_it() -> None:
    model = nn.Sequential(nn.Sequential(Experts(), nn.ReLU()), Experts(), nn.Linear(1, 1))
    assert left_in_eager(model, (), "0.0") == ("0.0", "1"), "the same class, unless it is torch's"
    assert left_in_eager(model, (), "2") == ("2",)
    assert left_in_eager(model, ("0.0", "1"), "0.0.gate") == ("0", "1"), "around the one that failed"
    assert left_in_eager(model, ("0.0", "1"), None) is None, "around 1 is the whole model"
    assert left_in_eager(model, ("0.0.gate",), None) == ("0.0", "1")
    assert left_besides(model, (), ["0.0", "1", "2"]) == ("0.0", "1", "2")
    assert left_besides(model, (), ["0.0", ""]) is None
    assert left_besides(model, ("0.0.gate",), ["0.0.gate", "1"]) == ("0.0", "1")
