"""Methods, loss functions and modules that are made in the forward, left in eager: they train as eager does, to the bit."""

from __future__ import annotations

import copy
import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import actsolve
from actsolve.capture.captured import capture
from actsolve.errors import CaptureError, UsageError
from actsolve.module import runtime_of
from actsolve.runtime.memory_events import measure_peak
from actsolve.runtime.trainer import Trainer
from actsolve.training_step import TrainingStep

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


# -- the loss -------------------------------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a function": (lambda: by_numpy, ("loss_fn",)),
    "a lambda": (lambda: lambda outputs: by_numpy(outputs) * 2, ("loss_fn",)),
    "a partial": (lambda: functools.partial(by_numpy, targets=TARGETS), ("loss_fn",)),
    "an object": (Called, ("loss_fn",)),
    "a method": (lambda: Called().__call__, ("loss_fn",)),
    "a module": (Criterion, ("loss_fn.matcher",)),
    "a function that makes a module": (lambda: criterion, (f"{__name__}.Matcher",)),
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


# -- methods --------------------------------------------------------------------------------------------------------------------


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

    with pytest.raises(CaptureError, match="_edit, which is left in eager, changes one of its inputs in place"):
        pair(lambda: Edits(nn.Linear(WIDTH, WIDTH)), eager=["_edit"])


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
    [(WithFunction, "loss_function", f"{__name__}.Matcher"), (InAnAttribute, "criterion", "criterion")],
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
    assert eager_of(module) == (f"{__name__}.Matcher",)
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
