"""The module that is handed back keeps the manners of the original, in the loops that people write."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kinds import of
from torch import nn

import actsolve
from actsolve.errors import UsageError
from actsolve.runtime.memory_events import measure_peak


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16), nn.BatchNorm1d(16)) for _ in range(3)
    ]
    return nn.Sequential(*blocks)


def batch(seed: int = 0, size: int = 32) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """An optimized module that must recompute, and its eager twin."""
    model = net()
    twin = copy.deepcopy(model)
    optimized = actsolve.optimize(model, (batch(),), mem_budget=0.8, hardware="a100", optimizer="none")
    assert optimized.plan.predicted.recompute_s > 0
    return optimized, twin


def gradients(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for x, y in zip(gradients(a), gradients(b), strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


def loss(module: nn.Module, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return module(x).square().mean()  # type: ignore[no-any-return]


def test_it_is_the_original_to_whoever_looks(pair: tuple[nn.Module, nn.Module]) -> None:
    optimized, twin = pair
    assert isinstance(optimized, nn.Sequential) and type(optimized).__name__ == "Sequential"
    assert list(optimized.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in optimized.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert optimized.original is not optimized and optimized.original[0] is optimized[0]
    assert "fits" in optimized.report() and "budget" in optimized.report()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate(pair: tuple[nn.Module, nn.Module], set_to_none: bool) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in pair]
    for _ in range(2):
        for module, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(3):
                loss(module, batch(micro), micro).backward()
            optimizer.step()
        assert_equal(*pair)


def test_two_forwards_are_pending_and_end_in_any_order(pair: tuple[nn.Module, nn.Module]) -> None:
    for module in pair:
        first, second = loss(module, batch(1), 1), loss(module, batch(2), 2)
        first.backward()
        second.backward()
    assert_equal(*pair)


def test_backward_twice(pair: tuple[nn.Module, nn.Module]) -> None:
    for module in pair:
        value = loss(module, batch())
        value.backward(retain_graph=True)
        value.backward()
    assert_equal(*pair)


def test_gradient_of_a_subset(pair: tuple[nn.Module, nn.Module]) -> None:
    ours, theirs = (torch.autograd.grad(loss(m, batch()), [next(m.parameters())])[0] for m in pair)
    assert torch.equal(ours, theirs)


def test_double_backward_is_right_or_refused(pair: tuple[nn.Module, nn.Module]) -> None:
    optimized, _ = pair
    with pytest.raises((RuntimeError, UsageError)):
        first = torch.autograd.grad(loss(optimized, batch()), list(optimized.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()  # type: ignore[union-attr]


def test_eval_and_no_grad_run_the_original(pair: tuple[nn.Module, nn.Module]) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(loss(pair[0], batch()), loss(pair[1], batch()))
    for module in pair:
        module.eval()
    assert torch.equal(pair[0](batch()), pair[1](batch()))
    assert not any(m.training for m in pair[0].modules())
    for module in pair:
        module.train()
        loss(module, batch()).backward()
    assert_equal(*pair)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_used(pair: tuple[nn.Module, nn.Module], assign: bool) -> None:
    state = {k: v + 0.01 if v.is_floating_point() else v for k, v in net().state_dict().items()}
    for module in pair:
        module.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign)
        loss(module, batch()).backward()
    assert_equal(*pair)


def test_new_shapes_and_toggled_parameters_are_planned_for(pair: tuple[nn.Module, nn.Module]) -> None:
    for module in pair:
        loss(module, batch(3, size=20)).backward()
    assert_equal(*pair)
    for module in pair:
        module.zero_grad()
        module[0][0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        loss(module, batch()).backward()
    assert_equal(*pair)
    for module in pair:
        module[1].eval()  # type: ignore[index, union-attr, operator]
        loss(module, batch(), 5).backward()
    assert_equal(*pair)


def test_an_exception_leaves_no_half_state(pair: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises((RuntimeError, actsolve.ActsolveError)):
        pair[0](torch.randn(4, 7))
    for module in pair:
        loss(module, batch()).backward()
    assert_equal(*pair)


def test_other_inputs_as_asked() -> None:
    strict = actsolve.optimize(net(), (batch(),), mem_budget=1.0, hardware="a100", on_new_inputs="raise")
    with pytest.raises(UsageError):
        strict(batch(size=8))
    lenient = actsolve.optimize(net(), (batch(),), mem_budget=1.0, hardware="a100", on_new_inputs="original")
    with pytest.warns(UserWarning):
        lenient(batch(size=8)).sum().backward()


def test_where_nothing_fits_the_original_trains_if_asked_to() -> None:
    with pytest.warns(UserWarning, match="no plan fits"):
        module = actsolve.optimize(net(), (batch(),), mem_budget=1, hardware="a100", on_error="original")
    loss(module, batch()).backward()
    twin = net()
    loss(twin, batch()).backward()
    assert_equal(module, twin)


def test_copies_are_of_their_own_and_pickles_are_refused(pair: tuple[nn.Module, nn.Module]) -> None:
    twin = copy.deepcopy(pair[0])
    loss(twin, batch()).backward()
    assert all(p.grad is None for p in pair[0].parameters())
    loss(pair[1], batch()).backward()
    assert_equal(twin, pair[1])
    with pytest.raises(UsageError, match="pickle"):
        pickle.dumps(pair[0])


def test_pins() -> None:
    free = actsolve.optimize(net(), (batch(),), mem_budget=1.0, hardware="a100")
    assert free.plan.predicted.recompute_s == 0
    pinned = actsolve.optimize(net(), (batch(),), mem_budget=1.0, hardware="a100", recompute=["1"])
    assert pinned.plan.predicted.recompute_s > 0
    twin = net()
    for module in (pinned, twin):
        loss(module, batch()).backward()
    assert_equal(pinned, twin)
    with pytest.raises(UsageError, match="no op comes from"):
        actsolve.optimize(net(), (batch(),), mem_budget=1.0, hardware="a100", keep=["nowhere"])


def test_without_inputs_it_is_planned_for_at_the_first_training_call() -> None:
    """For a trainer that makes the batches, also where new inputs are to be refused."""
    made = of(lambda m, h: m.b(m.a(h).tanh()))
    twin = copy.deepcopy(made.model)
    module = actsolve.optimize(made.model, mem_budget=1.0, hardware="a100", optimizer="sgd", on_new_inputs="raise")
    assert module.plan is None and "first training call" in module.report()
    module.eval()(*made.args)
    assert module.plan is None, "nothing is trained in a call without gradients"
    assert torch.equal(module.train()(*made.args), twin(*made.args)) and module.plan is not None
    with pytest.raises(UsageError, match="not planned for these inputs"):
        module(torch.randn(5, 4))


def test_a_loss_may_be_scaled_in_place() -> None:
    """As trainers do for gradient accumulation: no backward reads it."""
    made = of(lambda m, h: {"loss": m.b(m.a(h).tanh()).square().mean()})
    twin = copy.deepcopy(made.model)
    module = actsolve.optimize(made.model, made.args, mem_budget="min", hardware="a100", optimizer="sgd")
    for model in (twin, module):
        loss = model(*made.args)["loss"]
        loss *= 0.5
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(twin.parameters(), module.parameters(), strict=True))  # type: ignore[arg-type]


def test_gradients_that_accumulate_are_not_held_twice() -> None:
    """The second backward adds each gradient as it is made: its peak is that of the first."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    twin = nn.Sequential(*layers)
    model, inputs = copy.deepcopy(twin), torch.randn(8, 64)
    options = {"hardware": "auto", "optimizer": "none", "grads": "accumulate", "planner": "keep_all", "mem_budget": 1.0}
    module = actsolve.optimize(model, (inputs,), loss_fn=lambda y: y.square().mean(), **options)
    for m, call in ((twin, lambda: twin(inputs).square().mean()), (module, lambda: module(inputs)[0])):
        for _ in range(3):
            call().backward()
        if m is module:
            held = sum(p.nbytes + p.grad.nbytes for p in module.parameters()) + inputs.nbytes
            measured = measure_peak(lambda call=call: call().backward())
            assert held + measured.peak_bytes <= module.plan.budget_bytes
        else:
            call().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(twin.parameters(), module.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["hook", "post hook", "grad", "some", "layout"])
def test_gradients_are_added_by_autograd_where_others_see_them(how: str) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model, inputs = copy.deepcopy(twin), torch.randn(3, 4)
    module = actsolve.optimize(model, (inputs,), mem_budget=1.0, planner="keep_all", hardware="a100", grads="accumulate")
    seen: list[list[torch.Tensor]] = []
    for m in (twin, module):
        log: list[torch.Tensor] = []
        first, *rest = m.parameters()
        loss(m, inputs).backward()
        if how == "hook":
            first.register_hook(lambda g, log=log: log.append(g.clone()) or g * 2)
        elif how == "post hook":
            first.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
        elif how == "layout":
            first.grad = first.grad.t().contiguous().t()
        if how == "grad":
            log += torch.autograd.grad(loss(m, inputs), [first, *rest])
        else:
            loss(m, inputs).backward(inputs=[first] if how == "some" else None)
        seen.append([*log, *(p.grad for p in (first, *rest))])
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))
    assert [t.stride() for t in seen[0]] == [t.stride() for t in seen[1]]


def test_hooks_of_a_parameter_that_gets_no_gradient_are_not_called() -> None:
    twin = of(lambda m, h: m.a(h).tanh()).model  # ``b`` is not used
    module = actsolve.optimize(copy.deepcopy(twin), mem_budget=1.0, planner="keep_all", hardware="a100")
    called: list[list[str]] = []
    for model in (twin, module):
        names: list[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, names=names, name=name: names.append(name))
        model(torch.randn(3, 4)).sum().backward()
        called.append(sorted(names))
    assert called[0] == called[1] == ["a.bias", "a.weight"]


def test_an_error_that_is_kept_does_not_stop_the_next_trace() -> None:
    kept = []
    with pytest.raises(actsolve.CaptureError) as raised:
        actsolve.optimize(
            of(lambda m, h: m.b(m.a(h)).detach().numpy()).model, (torch.randn(3, 4),), mem_budget=1.0, hardware="a100"
        )
    kept.append(raised.value)
    actsolve.optimize(net(), (batch(),), mem_budget=1.0, planner="keep_all", hardware="a100")


def test_attention_with_dropout_planned_in_an_autocast_region() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, 4, 2, 2).transpose(1, 2) for t in (m.a(h), m.b(h), h))
        return m.b(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).reshape(2, 4, 4))

    twin = of(run).model
    module, h = actsolve.optimize(copy.deepcopy(twin), mem_budget=1.0, planner="keep_all", hardware="a100"), torch.randn(2, 4, 4)
    for model in (twin, module):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(h)
        output.float().square().mean().backward()
    assert_equal(module, twin)
