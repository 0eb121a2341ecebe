"""Methods, functions in attributes and modules that the forward makes, left in eager: they train as eager does, to the bit."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager_parts import (
    TARGETS,
    WIDTH,
    Detector,
    Matcher,
    Model,
    assert_alike,
    batch,
    by_numpy,
    criterion,
    eager_of,
    pair,
)
from torch import nn

import actsolve
from actsolve.capture.captured import capture
from actsolve.errors import CaptureError, UsageError
from actsolve.module import runtime_of
from actsolve.runtime.memory_events import measure_peak
from actsolve.runtime.trainer import Trainer
from actsolve.training_step import TrainingStep

# -- methods --------------------------------------------------------------------------------------------------------------------


def test_what_draws_is_found() -> None:
    module, twin = pair(Model)
    assert eager_of(module) == ("middle._mask_hidden",)
    assert_alike(module, twin)


@pytest.mark.parametrize("options", [{"mem_budget": "min", "planner": "milp"}, {"grads": "accumulate"}], ids=str)
def test_a_method_by_name(options: dict[str, Any]) -> None:
    module, twin = pair(Model, eager=["middle._mask_hidden", "_loss"], **options)
    assert eager_of(module) == ("middle._mask_hidden", "_loss")
    assert "_mask_hidden" not in module.middle.__dict__ and "_loss" not in module.__dict__  # type: ignore[operator]
    assert_alike(module, twin)


def test_a_method_is_given_what_it_uses() -> None:
    graph = capture(TrainingStep(Model().train(), (batch(),), eager=("middle._mask_hidden",))).graph
    (region,) = (op for op in graph.ops if "region.default" in op.target)
    assert [graph.values[i].name for i in region.inputs if "middle" in graph.values[i].name] == ["middle.mask"]


class Wide(Model):
    """The method that no trace can follow keeps what it makes in an attribute: what calls it may be left in eager, it may not."""

    largest = 0.0

    def _scale(self, h: torch.Tensor) -> float:
        self.largest = float(np.abs(h.detach().numpy()).max())
        return self.largest

    def _scaled(self, h: torch.Tensor) -> torch.Tensor:
        h = self.last(h) * self._scale(h)
        del self.largest
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._loss(self._scaled(F.gelu(self.first(x))))


def test_the_method_around_one_that_cannot_be() -> None:
    module, twin = pair(lambda: Wide(nn.Linear(1, 1)))
    assert eager_of(module) == ("_scaled",)
    assert_alike(module, twin)


class Sums(nn.Module):
    """Its method writes into what it is given, and that is read after it."""

    def __init__(self, *, later: bool) -> None:
        super().__init__()
        self.inner, self.later = nn.Linear(WIDTH, WIDTH), later

    def _edit(self, h: torch.Tensor) -> torch.Tensor:
        h[..., 0] = float(np.random.rand())
        return h * 1

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.inner(h)
        view = h[..., :4]
        edited = self._edit(h)
        return torch.cat([edited, view], -1)[..., -WIDTH:] if self.later else edited


def test_what_a_method_writes_to_may_not_be_read_after_it() -> None:
    module, twin = pair(lambda: Model(Sums(later=False)))
    assert eager_of(module) == ("middle._edit",)
    assert_alike(module, twin)
    with pytest.raises(CaptureError, match=r"middle\._edit, which is left in eager, changes one of its inputs in place"):
        pair(lambda: Model(Sums(later=True)), eager=["middle._edit"])
    module, twin = pair(lambda: Model(Sums(later=True)))
    assert eager_of(module) == ("middle",), "the module around it"
    assert_alike(module, twin)


def test_an_input_of_the_model_may_not_be_written_to() -> None:
    class Edits(Model):
        def _edit(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2) * float(np.random.rand())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self._edit(x))

    changes = "_edit, which is left in eager, changes an input of the step in place"
    with pytest.raises(CaptureError, match=changes) as named:
        pair(lambda: Edits(nn.Linear(WIDTH, WIDTH)), eager=["_edit"])
    assert named.value.try_ == "a model around this one, which calls it with a clone() of that"
    with pytest.raises(CaptureError, match=f"the forward draws from numpy.random(.|\n)*{changes}") as found:
        pair(lambda: Edits(nn.Linear(WIDTH, WIDTH)))
    assert str(named.value.try_) in str(found.value)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first = True

    def _routed(self, h: torch.Tensor) -> torch.Tensor:
        return (self.a if float(h.detach().numpy()[0, 0, 0]) > 0 else self.b)(h)  # type: ignore[no-any-return]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self._routed(h)


@pytest.mark.parametrize("eager", [["middle._routed"], []], ids=["named", "found"])
def test_a_weight_that_was_not_used_when_it_was_planned_for(eager: list[str]) -> None:
    """It is planned for once more, with that weight given too."""
    module, twin = pair(lambda: Model(Either()), eager=eager)
    assert_alike(module, twin)
    assert eager_of(module) == ("middle._routed",)
    runtime = runtime_of(module)
    assert runtime is not None and [len(ways.steps) for ways in runtime.steps.values()] == [2]
    assert type(module.middle.b.weight) is nn.Parameter  # type: ignore[union-attr]


def test_what_hides_that_it_used_another_weight() -> None:
    class Hides(Either):
        def _routed(self, h: torch.Tensor) -> torch.Tensor:
            try:
                return super()._routed(h)
            except Exception:
                return h * 2

    module, twin = pair(lambda: Model(Hides()), eager=["middle._routed"])
    assert_alike(module, twin)


def test_one_within_another() -> None:
    module, twin = pair(lambda: Wide(nn.Linear(1, 1)), eager=["_scaled", "last"])
    assert eager_of(module) == ("_scaled",)
    assert_alike(module, twin)


class Normalized(nn.Module):
    """Its running statistics are updated with no other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def _norm(self, h: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(h.flatten(0, 1), self.mean, self.variance, training=True) * float(np.random.rand())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self._norm(h).reshape(h.shape)


@pytest.mark.parametrize("eager", ["middle._norm", "middle"])
def test_running_statistics_would_be_updated_twice(eager: str) -> None:
    with pytest.raises(CaptureError, match="which is left in eager, changes one of its tensors in place"):
        pair(lambda: Model(Normalized()), eager=[eager])


# -- functions in attributes, and modules that are made -------------------------------------------------------------------------


class WithFunction(Detector):
    """As models of transformers have their loss: a property that gives a function, which makes a criterion and its matcher."""

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        return self.__dict__.get("_loss_function", criterion)

    @loss_function.setter
    def loss_function(self, function: Callable[..., torch.Tensor]) -> None:
        self._loss_function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.loss_function(super().forward(x))


class InAnAttribute(Detector):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = by_numpy

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.criterion(super().forward(x))


@pytest.mark.parametrize(
    ("made", "named", "found"),
    [(WithFunction, "loss_function", "eager_parts.Matcher"), (InAnAttribute, "criterion", "criterion")],
)
def test_a_function_in_an_attribute(made: Callable[[], nn.Module], named: str, found: str) -> None:
    for eager in ([named], []):
        module, twin = pair(made, eager=eager)
        assert eager_of(module) == (named if eager else found,)
        assert module.__dict__.keys() == twin.__dict__.keys()
        assert_alike(module, twin)
    assert Matcher.forward.__qualname__ == "Matcher.forward"


def test_modules_of_the_model_are_not_those_that_are_made() -> None:
    class Both(WithFunction):
        def __init__(self) -> None:
            super().__init__()
            self.own = Matcher()

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) + self.own.weight.sum()

    module, twin = pair(Both)
    assert eager_of(module) == ("eager_parts.Matcher",)
    assert_alike(module, twin)


class Remembers(Model):
    """A table that a cache of functools keeps."""

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _table(self, rows: int) -> torch.Tensor:
        return torch.linspace(0, 1, rows)[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self._table(x.shape[-2]))


@pytest.fixture
def _not_frozen() -> Any:
    gc.unfreeze()  # the garbage collector shows nothing of what conftest.py has frozen
    yield
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_not_frozen")
def test_a_cache_holds_nothing_of_the_trace() -> None:
    module, twin = pair(Remembers)
    assert_alike(module, twin)
    with torch.no_grad():
        assert torch.equal(module.eval()(batch()), twin.eval()(batch()))


# -- names ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["middle.forward", "middle.train", "middle.nothing", "middle.mask", "loss_fn", "torch.nn.Linear", "x."]
)
def test_what_is_no_part(name: str) -> None:
    with pytest.raises(UsageError, match="cannot use eager="):
        pair(Model, eager=[name])


def test_where_nothing_else_would_be_planned_nothing_is_left_in_eager() -> None:
    class Whole(Model):
        def _all(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(np.abs(x.detach().numpy()).max())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._all(x)

    with pytest.raises(CaptureError, match="cannot trace Whole"):
        pair(lambda: Whole(nn.Linear(WIDTH, WIDTH)))


# -- plans ----------------------------------------------------------------------------------------------------------------------


def test_other_shapes_copies_and_saved_plans(tmp_path: Any) -> None:
    module, twin = pair(Model)
    assert_alike(module, twin, inputs=lambda step: batch(step, rows=2 + step % 2))
    copied = copy.deepcopy(module)
    assert_alike(copied, copy.deepcopy(twin))
    assert eager_of(copied) == ("middle._mask_hidden",)
    module.plan.save(tmp_path / "plan.json")  # type: ignore[union-attr,operator]
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"plan": tmp_path / "plan.json", "hardware": "a100"}
    assert_alike(actsolve.optimize(model, (batch(),), eager=["middle._mask_hidden"], **options), twin)


@pytest.mark.parametrize(("made", "loss_fn", "eager"), [(Detector, by_numpy, "loss_fn"), (Model, None, "middle._mask_hidden")])
def test_the_budget_holds(made: Callable[[], nn.Module], loss_fn: Any, eager: str) -> None:
    torch.manual_seed(0)
    targets = [TARGETS[i % 2] for i in range(64)]
    loss = None if loss_fn is None else functools.partial(loss_fn, targets=targets)
    x = batch(rows=64)
    peaks = []
    for budget in ("min", "90%", "100%"):
        module = actsolve.optimize(made(), (x,), loss_fn=loss, mem_budget=budget, eager=[eager])
        trainer = Trainer(TrainingStep(module, (x,)), torch.optim.AdamW)
        trainer.step()
        trainer.drop_gradients()
        peaks.append(trainer.static_bytes() + measure_peak(trainer.step).peak_bytes)
        assert peaks[-1] <= module.plan.budget_bytes * 1.02  # type: ignore[union-attr,operator]
    assert peaks[0] <= peaks[1] <= peaks[2]
