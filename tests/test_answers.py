"""Forwards whose Python depends on data: as eager, whichever way they take, and planned once for each way."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alike import assert_same, assert_same_state
from kinds import of, x
from torch import nn
from torch.nn import functional as F

import actsolve
from actsolve.capture.joint import trace_joint
from actsolve.errors import CaptureError, UsageError
from actsolve.module import runtime_of
from actsolve.runtime.exactness import bitwise_equal
from actsolve.training_step import TrainingStep
from actsolve.ways import MANY_WAYS

Batch = tuple[Any, ...]


def optimize(made: TrainingStep, **settings: Any) -> nn.Module:
    options = {"mem_budget": 1.0, "planner": "keep_all", "hardware": "a100", "optimizer": "sgd", **settings}
    return actsolve.optimize(made.model, made.args, made.kwargs, **options)


def n_ways(module: nn.Module) -> list[int]:
    """How many ways are planned for, per signature."""
    runtime = runtime_of(module)
    assert runtime is not None
    return [len(ways.steps) for ways in runtime.steps.values()]


def assert_like_eager(made: TrainingStep, batches: list[Batch], **settings: Any) -> nn.Module:
    """Train the same model in eager and optimized on some batches; compare loss, output, gradients, state and random state."""
    twin = copy.deepcopy(made.model)
    module = optimize(made, **settings)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (twin, module)]
    for number, batch in enumerate(batches):
        seen = []
        for model in (twin, module):
            torch.manual_seed(number)
            output = model(*batch)
            output.square().mean().backward()
            seen.append((output, torch.rand(1)))
        (expected, drawn), (got, our_drawn) = seen
        assert_same(expected, got, f"batch {number}")
        assert torch.equal(drawn, our_drawn), f"batch {number}: the random states differ"
        for p, q in zip(twin.parameters(), module.parameters(), strict=True):
            assert bitwise_equal(p.grad, q.grad), f"batch {number}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(twin, module, f"batch {number}")
    return module


def branches(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    m.count += 1  # once a call, however often a forward begins anew
    y = F.dropout(m.a(h).relu(), 0.3)
    if mask.all():
        y = y * 2
    y = F.dropout(y, 0.2)
    if m.count > 3:
        y = m.b(y)
    return m.b(y)[mask] * int(mask.sum())


def masked(*true: int) -> Batch:
    mask = torch.ones(4, dtype=torch.bool)
    mask[list(true)] = False
    return x(4, 4), mask


def test_each_way_is_planned_for_once() -> None:
    made = of(branches, *masked(), count=torch.zeros(()))
    batches = [masked(*([0] if i % 2 else [])) for i in range(8)]
    module = assert_like_eager(made, batches, mem_budget="min", planner="milp")
    assert n_ways(module) == [4]


def test_a_way_is_found_again_whichever_came_between() -> None:
    made = of(lambda m, h, mask: m.b(m.a(h)[mask]), *masked())
    batches = [masked(), masked(1), masked(2, 3), masked(1), masked(), masked(0, 1)]
    assert n_ways(assert_like_eager(made, batches)) == [3]


def test_random_ways() -> None:
    """Layers that are dropped at random, as in wav2vec 2.0: the numbers drawn are eager's, also where a forward begins anew."""

    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        for layer in (m.a, m.b, m.a):
            h = F.dropout(h, 0.1)
            if torch.rand(()) > 0.4:
                h = layer(h).tanh()
        return m.b(h)

    module = assert_like_eager(of(run), [(x(3, 4),) for _ in range(14)])
    (n,) = n_ways(module)
    assert 2 < n <= 8


def test_after_many_ways_the_original_runs_where_there_is_another() -> None:
    made = of(lambda m, h, n: m.b(m.a(h).tanh()) * n.item(), x(3, 4), torch.tensor(0.0))
    batches = [(x(3, 4), torch.tensor(float(i))) for i in range(1, MANY_WAYS + 3)]
    with pytest.warns(UserWarning, match=f"another way than the {MANY_WAYS} planned for"):
        module = assert_like_eager(made, batches)
    assert n_ways(module) == [MANY_WAYS]


def test_other_data_are_new_inputs() -> None:
    for setting, error in (("raise", UsageError), ("original", None)):
        made = of(branches, *masked(), count=torch.zeros(()))
        module = optimize(made, on_new_inputs=setting)
        module(*masked())
        count = module.count.clone()
        if error is not None:
            with pytest.raises(error, match="takes another way"):
                module(*masked(0))
            assert torch.equal(module.count, count), "a forward that ends has changed nothing"
        else:
            with pytest.warns(UserWarning, match="budget is not held"):
                assert module(*masked(0)).shape == (3, 4)


def test_an_answer_that_is_never_the_same_is_told() -> None:
    draws = iter(range(100))
    made = of(lambda m, h: m.b(m.a(h)) * (h + next(draws)).sum().item())
    with pytest.raises((UsageError, CaptureError), match=r"answered otherwise|in the trace"):
        optimize(made)(*made.args)


def test_the_trace_leaves_state_and_random_state_alone() -> None:
    generator = torch.Generator().manual_seed(5)

    def run(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        m.count += 1
        h = h.mul_(2) + torch.rand(4, generator=m.draws) + torch.rand(4)
        return m.b(m.a(h)) if mask.any() else m.a(h)

    made = of(run, *masked(), count=torch.zeros(()))
    made.model.draws = generator  # type: ignore[assignment]
    before = [made.args[0].clone(), torch.get_rng_state(), generator.get_state()]
    joint = trace_joint(made)
    assert joint.answers == (True,)
    after = [made.args[0], torch.get_rng_state(), generator.get_state()]
    assert all(map(torch.equal, before, after)) and made.model.count == 0


def test_what_is_asked_is_told_with_its_line() -> None:
    module = optimize(of(branches, *masked(), count=torch.zeros(())))
    report = module.report()
    assert "depends on data 4 times" in report and "test_answers.py" in report


def test_a_plan_of_another_way_is_not_for_this_one(tmp_path: Any) -> None:
    made = of(lambda m, h, mask: m.b(m.a(h)[mask]).tanh(), *masked())
    optimize(made).plan.save(tmp_path / "plan.json")
    other = TrainingStep(made.model, masked(0))
    with pytest.raises(actsolve.ActsolveError, match="another"):
        optimize(other, plan=tmp_path / "plan.json")


class Config:
    """A module's settings, as some libraries have them."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.more = SimpleNamespace(depth=2)


def fills_in(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.config.kind is None:
        m.config.kind, m.ready = "regression", True
        m.table["scale"] = 2
    return m.b(m.a(h).tanh()) * m.table["scale"]


def configured(run: Callable[..., Any]) -> TrainingStep:
    made = of(run)
    made.model.config, made.model.ready, made.model.table = Config(), False, {}  # type: ignore[assignment]
    return made


def test_a_setting_that_the_first_forward_fills_in() -> None:
    made = configured(fills_in)
    module = assert_like_eager(made, [made.args] * 3)
    assert made.model.config.kind == "regression" and made.model.ready and made.model.table == {"scale": 2}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*made.args)


def test_to_optimize_fills_in_nothing() -> None:
    made = configured(fills_in)
    optimize(made)
    assert made.model.config.kind is None and not made.model.ready and made.model.table == {}  # type: ignore[union-attr]


def test_a_setting_that_changes_at_each_forward_is_refused() -> None:
    def flips(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.config.kind = "odd" if m.config.kind == "even" else "even"
        return m.b(m.a(h))

    with pytest.raises(CaptureError, match="the forward changes config"):
        optimize(configured(flips))


def test_an_input_that_the_forward_fills_is_refused_and_left_as_it_was() -> None:
    def fills(m: Any, h: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.depth = m.a(h)
        return m.b(cache.depth)

    cache = Config()
    with pytest.raises(CaptureError, match="one of its inputs"):
        optimize(of(lambda m, h, cache: fills(m, h, cache.more), x(3, 4), cache))
    assert cache.more.depth == 2


def test_one_tensor_in_two_places_is_one() -> None:
    """As a model's own loss is, where the loss function picks it: its gradient is asked for in either."""

    def run(m: Any, h: torch.Tensor) -> Any:
        y = m.b(m.a(h).tanh())
        return {"loss": y.square().mean(), "y": y}

    made = of(run)
    made.loss_fn = lambda out: out["loss"]
    module = optimize(made, loss_fn=made.loss_fn)
    for _ in range(2):
        loss, out = module(*made.args)
        assert out["loss"] is loss
        loss.backward()
    assert n_ways(module) == [1] and runtime_of(module).first.outgrown is None  # type: ignore[union-attr]


def test_generators_of_the_models_own_are_put_back_where_a_forward_begins_anew() -> None:
    def run(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = m.a(h) + torch.rand(4, generator=m.draws)
        return m.b(y) if mask.all() else m.b(y.tanh() + torch.rand(4, generator=m.draws))

    made = of(run, *masked())
    made.model.draws = torch.Generator().manual_seed(5)  # type: ignore[assignment]
    twin = copy.deepcopy(made.model)
    twin.draws = torch.Generator().manual_seed(5)  # type: ignore[assignment]
    module = optimize(made)
    for batch in (masked(), masked(1), masked(), masked(2)):
        assert torch.equal(twin(*batch), module(*batch))


def test_answers_tell_zeros_of_either_sign_apart() -> None:
    made = of(lambda m, h, n: m.b(m.a(h).tanh()) * n.item(), x(3, 4), torch.tensor(0.0))
    module = optimize(made)
    assert torch.equal(
        torch.signbit(module(made.args[0], torch.tensor(-0.0))), torch.signbit(made.model(made.args[0], torch.tensor(-0.0)))
    )
    assert n_ways(module) == [2]


def test_text_of_tensors_asks_nothing() -> None:
    """A message with a number in it, before a question of the same kind."""

    def run(m: Any, h: torch.Tensor, flag: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        assert f"{n} tokens, {n:.1f}, {flag!r}"
        return m.b(m.a(h)) if flag.item() else m.a(h)

    flag = torch.tensor(True)
    module = assert_like_eager(
        of(run, x(3, 4), flag, torch.tensor(3.5)), [(x(3, 4), flag, torch.tensor(float(n))) for n in range(3)]
    )
    assert n_ways(module) == [1]


def test_constants_are_asked_too() -> None:
    """A trace knows what they hold, and a forward that runs for real asks."""

    def run(m: Any, h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n = torch.div(torch.tensor(7), 2, rounding_mode="trunc")
        return m.b(m.a(h))[:, : int(n)] * k.item()

    assert_like_eager(of(run, x(3, 4), torch.tensor(2)), [(x(3, 4), torch.tensor(k)) for k in (2, 2, 5)])


def test_a_mask_that_is_only_written_through() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        return m.b(torch.zeros_like(h).masked_scatter((h[..., :1] > 0).expand_as(h), m.a(h).flatten() * 2))

    assert_like_eager(of(run), [(x(3, 4),) for _ in range(3)])


def test_what_the_model_raises_is_raised() -> None:
    """For data that it does not want, as in eager: random state and buffers are where they were then."""

    def run(m: Any, h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        m.count += 1
        h = F.dropout(m.a(h), 0.5)
        if n.item() < 0:
            raise ValueError("a bad sample")
        return m.b(h)

    made = of(run, x(3, 4), torch.tensor(1), count=torch.zeros(()))
    twin = copy.deepcopy(made.model)
    module = optimize(made)
    for model in (twin, module):
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="a bad sample"):
            model(x(3, 4), torch.tensor(-1))
    assert torch.equal(twin.count, module.count)
