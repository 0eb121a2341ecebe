"""The state that the returned module shares with the original, and the backwards that nobody expected."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kinds import of, step, x
from kinds_of_autograd import language_model, two_heads
from kinds_of_state import Averages
from test_refused import n_plans, optimize
from torch import nn

import actsolve
from actsolve.errors import UsageError
from actsolve.module import runtime_of
from actsolve.runtime.exactness import bitwise_equal
from actsolve.runtime.memory_events import measure_peak


class Named(nn.Module):
    """Has whatever a state dict can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleDict({"in": nn.Linear(4, 4), "out": nn.BatchNorm1d(4)})
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.tied = self.stem

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, *, reduce: str = "mean") -> torch.Tensor:
        self.steps += 1
        return self.tied(self.blocks["out"](self.blocks["in"](self.stem(inputs))))

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


def test_names_are_the_originals() -> None:
    made = step(Named(), x(3, 4))
    module = optimize(made)
    assert list(module.state_dict()) == list(made.model.state_dict())
    assert list(module.state_dict(prefix="net.")) == list(made.model.state_dict(prefix="net."))
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(module, names)()] == [n for n, _ in getattr(made.model, names)()]
    assert type(module).__qualname__ == "Named" and isinstance(module, Named) and repr(module) == repr(made.model)
    assert inspect.signature(module.forward) == inspect.signature(made.model.forward)
    other = Named()
    assert str(other.load_state_dict(module.state_dict())) == "<All keys matched successfully>"
    module(*made.args)
    assert made.model.steps == module.steps == 1


def test_whatever_is_done_to_one_is_done_to_both() -> None:
    made = step(Named(), x(3, 4))
    module = optimize(made)
    module.eval()
    assert not made.model.training and not made.model.stem.training  # type: ignore[union-attr]
    made.model.train()
    assert module.training
    module.note = "here"  # type: ignore[assignment]
    assert made.model.note == "here"
    module.double()
    assert made.model.stem.weight.dtype is torch.float64 is module(x(3, 4).double()).dtype  # type: ignore[union-attr]


def test_an_optimizer_of_either_moves_both() -> None:
    for build_on_original in (True, False):
        made = step(nn.Linear(4, 2), x(3, 4))
        twin = copy.deepcopy(made.model)
        module = optimize(made)
        optimizer = torch.optim.SGD((made.model if build_on_original else module).parameters(), lr=0.1)
        reference = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(2):
            for each, own in ((module, optimizer), (twin, reference)):
                own.zero_grad()
                each(*made.args).square().sum().backward()
                own.step()
        assert torch.equal(module.weight, twin.weight) and module.weight is made.model.weight  # type: ignore[arg-type]


def test_optimizing_again_starts_from_the_original() -> None:
    made = step(nn.Linear(4, 2), x(3, 4))
    first = optimize(made)
    again = actsolve.optimize(first, made.args, mem_budget=1.0, hardware="a100", optimizer="none")
    assert runtime_of(again).original is made.model and again.weight is first.weight  # type: ignore[union-attr]
    assert runtime_of(made.model) is None


def test_replaced_buffers_are_replaced_at_each_call() -> None:
    made = step(Averages(assign=True), x(4, 6))
    twin = copy.deepcopy(made.model)
    module = optimize(made)
    for number in range(1, 4):
        old = module.mean
        assert torch.equal(module(*made.args), twin(*made.args))
        assert module.calls == twin.calls == number and torch.equal(module.mean, twin.mean) and module.mean is not old  # type: ignore[arg-type]
    assert n_plans(module) == 1


def test_assigned_attributes_are_assigned_and_keep_no_old_graph() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.hidden = m.a(h).tanh()
        return m.b(m.hidden)

    made = of(run, x(64, 4))
    module, twin = optimize(made), copy.deepcopy(made.model)

    def train() -> None:
        module.zero_grad()
        (module(*made.args).square().sum() + module.hidden.square().sum()).backward()

    peaks = []
    for _ in range(4):
        peaks.append(measure_peak(train).end_bytes)
        twin.zero_grad()
        (twin(*made.args).square().sum() + twin.hidden.square().sum()).backward()
        assert torch.equal(module.hidden, twin.hidden) and bitwise_equal(module.a.weight.grad, twin.a.weight.grad)  # type: ignore[arg-type, union-attr]
    assert peaks[-1] <= peaks[1] and n_plans(module) == 1


def test_a_copy_has_settings_and_weights_of_its_own() -> None:
    made = step(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), x(3, 4))
    module = optimize(made, on_new_inputs="original")
    copied = copy.deepcopy(module)
    copied(*made.args).sum().backward()
    assert all(p.grad is None for p in module.parameters()) and module[1].num_batches_tracked == 0  # type: ignore[index, union-attr]
    ours, theirs = runtime_of(copied), runtime_of(module)
    assert ours is not None and theirs is not None and ours.original is not theirs.original
    assert ours.on_new_inputs == "original" and isinstance(copied, nn.Sequential)


# -- backwards ---------------------------------------------------------------------------------------------------------


def compare(module: nn.Module, twin: nn.Module, made: Any, loss: Any) -> None:
    for each in (module, twin):
        each.zero_grad()
        torch.manual_seed(0)
        loss(each(*made.args)).backward()
    for (name, p), q in zip(twin.named_parameters(), module.parameters(), strict=True):
        assert bitwise_equal(p.grad, q.grad), name


def test_outputs_without_gradient_leave_none() -> None:
    made = two_heads()
    twin = copy.deepcopy(made.model)
    module = optimize(made)
    for loss in (lambda out: out["a"].square().sum(), lambda out: out["b"].sum(), lambda out: out["trunk"].sum()):
        compare(module, twin, made, loss)
    assert module.b.weight.grad is None and n_plans(module) == 1  # type: ignore[union-attr]


class Returned(nn.Module):
    """Returns two of its parameters as they are, or shows them: one that it computes with, one that it does not."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 16), nn.Linear(16, 4)
        self.code, self.used, self.shown = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4)), shown

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.narrow(torch.tanh(self.wide(x))) @ self.used
        return y, *((self.code.t(), self.used[:2]) if self.shown else (self.code, self.used))


@pytest.mark.parametrize("shown", [False, True])
def test_parameters_that_are_returned_get_their_gradients(shown: bool) -> None:
    made = step(Returned(shown), x(8, 4))
    twin = copy.deepcopy(made.model)
    module = optimize(made)
    for _ in range(2):
        compare(module, twin, made, lambda out: sum(one.pow(3).sum() for one in out))
        assert all(p.grad is not None for p in module.parameters())
    returned = module(*made.args)[1]
    assert returned.requires_grad and (returned is module.code) == (not shown)


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_a_backward_from_more_than_was_expected(budget: Any) -> None:
    made = language_model()
    twin = copy.deepcopy(made.model)
    module = optimize(made, mem_budget=budget, planner="milp")
    runtime = runtime_of(module)
    assert runtime is not None and runtime.first is not None
    (expected,) = runtime.first.captured.tangents
    both = lambda out: out["loss"] + out["logits"].square().mean()  # noqa: E731
    compare(module, twin, made, both)
    assert runtime.first.outgrown is not None and expected in runtime.first.outgrown
    compare(module, twin, made, both)
    (ways,) = runtime.steps.values()
    (planned,) = ways.steps
    assert planned is not runtime.first and planned is not None and len(planned.captured.tangents) == 2
    compare(module, twin, made, lambda out: out["loss"])
    assert len(runtime.steps) == 1 and planned.outgrown is None


def test_what_cannot_be_differentiated_yet_can_be_at_the_next_step() -> None:
    def run(m: Any, h: torch.Tensor) -> Any:
        y = m.a(h)
        extra = F.dropout(m.b(y), 0.5)  # its mask serves its own gradient alone
        return {"loss": (y + extra.detach()).square().mean(), "extra": extra}

    made = of(run)
    module, twin = optimize(made), copy.deepcopy(made.model)
    runtime = runtime_of(module)
    assert runtime is not None and runtime.first is not None
    both = lambda out: out["loss"] + out["extra"].mean()  # noqa: E731
    if len(runtime.first.captured.tangents) == 1:
        with pytest.raises(UsageError, match="the next step"):
            both(module(*made.args)).backward()
    compare(module, twin, made, both)


def test_a_backward_inside_autocast_is_refused_where_it_would_differ() -> None:
    made = step(nn.Linear(4, 4), x(3, 4))
    module = optimize(made)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match="autocast region"):
        with torch.autocast("cpu", enabled=False):
            loss = module(*made.args).sum()
        loss.backward()


def test_saved_tensors_that_are_edited_are_an_error_as_in_eager() -> None:
    made = step(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), x(3, 4))
    module = optimize(made)
    out = module(*made.args)
    with torch.no_grad():
        made.args[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_warnings_name_the_callers_line() -> None:
    module = optimize(step(nn.Linear(4, 2), x(3, 4)), on_new_inputs="original")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(x(5, 4))
    assert [w.filename for w in caught if "new inputs" in str(w.message)] == [__file__]
