"""What a trace would lose is refused, with a message, and the model still works; or it is seen at the next call."""

from __future__ import annotations

import copy
import logging
import random
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kinds import Of, of, x
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

import actsolve
from actsolve.errors import CaptureError, UsageError
from actsolve.module import runtime_of
from actsolve.training_step import TrainingStep


def optimize(made: TrainingStep, **settings: Any) -> nn.Module:
    """The module of ``made``, planned so that everything is kept."""
    options = {"mem_budget": 1.0, "hardware": "a100", "optimizer": "none", "planner": "keep_all", **settings}
    return actsolve.optimize(made.model, made.args, made.kwargs, loss_fn=made.loss_fn, **options)


def refused(made: TrainingStep, message: str) -> None:
    """Optimizing is refused with ``message``, and with ``on_error="original"`` the module trains as it is."""
    with pytest.raises(CaptureError, match=message):
        optimize(made)
    with pytest.warns(UserWarning, match=message):
        module = optimize(made, on_error="original")
    assert module(*made.args, **made.kwargs) is not None


def n_plans(module: nn.Module) -> int:
    runtime = runtime_of(module)
    assert runtime is not None
    return len(runtime.steps)


# -- Python that runs in the forward -----------------------------------------------------------------------------------


def counts(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.a(h)


def remembers(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.__dict__.setdefault("memory", []).append(m.a(h).detach())
    return m.a(h)


def keeps_gradient(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.hidden = m.a(h)
    m.hidden.retain_grad()
    return m.b(m.hidden)


def adds_module(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.c = nn.Linear(4, 4)
    return m.c(m.a(h))


ESCAPED: list[torch.Tensor] = []


def lets_escape(m: Any, h: torch.Tensor) -> torch.Tensor:
    ESCAPED.append(m.a(h))
    return ESCAPED[-1] * 2


def sets_data(m: Any, h: torch.Tensor) -> torch.Tensor:
    y = m.a(h)
    y.data = y.data * 2
    return y


PYTHON: dict[str, tuple[Callable[..., Any], str]] = {
    "a counter": (counts, "changes calls"),
    "a list that grows": (remembers, "changes memory"),
    "a gradient to be retained": (keeps_gradient, "retain its gradient"),
    "a new submodule": (adds_module, "changes"),
    "a tensor that escapes": (lets_escape, "intermediate tensors outside"),
    "data that is set": (sets_data, "sets the data"),
    "Python's random numbers": (lambda m, h: m.a(h) * random.random(), "draws from Python's random"),
    "NumPy's random numbers": (lambda m, h: m.a(h) * np.random.rand(), "draws from numpy"),
    "a seed": (lambda m, h: m.a(h) * torch.manual_seed(1).initial_seed(), "calls torch.manual_seed"),
}


@pytest.mark.parametrize("what", PYTHON)
def test_python_that_would_run_once(what: str) -> None:
    run, message = PYTHON[what]
    state = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    made = of(run)
    with pytest.raises(CaptureError, match=message):
        optimize(made)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state  # type: ignore[index]
    assert not hasattr(made.model, "calls") and not hasattr(made.model, "c")
    ESCAPED.clear()
    if what != "data that is set":
        assert made.model(*made.args).shape == (3, 4)


FAILING: dict[str, tuple[Callable[[], TrainingStep], str]] = {
    "an input that does not fit": (
        lambda: of(lambda m, h: m.a(h), x(3, 5)),
        r"where  .*test_refused.py:\d+\n.*one call in eager",
    ),
    "one that does not fit a module of torch's": (
        lambda: TrainingStep(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(4, 4))), (x(2, 3),)),
        r"where  the module 1\.0 \(Linear\)\n  why    RuntimeError: .*\n  try    one call in eager mode",
    ),
    "one that does not fit the model": (lambda: TrainingStep(nn.Linear(3, 3), (x(4, 4),)), "where  the forward of Linear\n"),
    "an error of Python's": (
        lambda: of(lambda m, h: m.a(h) * (1 // 0)),
        "why    ZeroDivisionError: .*\n  try    one call in eager",
    ),
    "a branch on data that are not there": (lambda: fake(lambda m, h: m.a(h) if h.sum() > 0 else m.b(h)), "try    real tensors"),
    "a number of data that are not there": (lambda: fake(lambda m, h: m.a(h) * h.sum().item()), "try    real tensors"),
    "a shape of data that are not there": (lambda: fake(lambda m, h: m.a(h)[h[:, 0] > 0]), "try    real tensors"),
}


def fake(run: Callable[..., Any]) -> TrainingStep:
    with FakeTensorMode():
        return of(run)


@pytest.mark.parametrize("what", FAILING)
def test_what_a_failed_trace_says(what: str, caplog: pytest.LogCaptureFixture) -> None:
    make, message = FAILING[what]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    for disabled in (True, False):
        logger.disabled = disabled
        with pytest.raises(CaptureError) as raised:
            optimize(make())
        assert logger.disabled == disabled
    assert re.search(message, str(raised.value), re.DOTALL), str(raised.value)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "torch logs nothing besides"


def test_a_cache_that_is_there_is_no_change() -> None:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        if m.size != h.shape[0]:
            m.size, m.mask = h.shape[0], torch.tril(torch.ones(h.shape[0], h.shape[0]))
        return m.mask @ m.a(h)

    made = of(run)
    made.model.size = 0  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="call the module once"):
        optimize(made)
    made.model(*made.args)
    module = optimize(made)
    assert torch.equal(module(*made.args), made.model(*made.args)) and n_plans(module) == 1


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_on_submodules() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        made = of(lambda m, h: m.b(m.a(h)))
        getattr(made.model.a, register)(lambda *_: None)
        refused(made, "a has a")


def test_global_hooks() -> None:
    handle = nn_module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="every module has a forward hook"):
            optimize(of(lambda m, h: m.a(h)))
    finally:
        handle.remove()


def test_hooks_that_come_later_are_seen() -> None:
    for on_error in ("raise", "original"):
        made = of(lambda m, h: m.b(m.a(h)))
        module = optimize(made, on_error=on_error)
        module(*made.args)
        made.model.a.register_forward_hook(lambda m, args, output: output + 1)  # type: ignore[union-attr]
        if on_error == "raise":
            with pytest.raises(CaptureError, match="a has a forward hook"):
                module(*made.args)
        else:
            with pytest.warns(UserWarning, match="a has a forward hook"):
                assert torch.equal(module(*made.args), made.model(*made.args))


def test_a_hook_that_would_see_the_loss() -> None:
    made = of(lambda m, h: m.a(h))
    made.loss_fn = lambda y: y.sum()
    made.model.register_forward_hook(lambda m, args, output: output)
    refused(made, "the module has a forward hook")


# -- inputs, outputs, parameters ---------------------------------------------------------------------------------------


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


class Subclass(torch.Tensor):
    pass


INPUTS: dict[str, tuple[Any, str]] = {
    "an object that holds a tensor": (Box(x(3, 4)), "hides a Tensor"),
    "an array": (np.ones((3, 4)), "hides a ndarray"),
    "a sparse tensor": (x(3, 4).to_sparse(), "layout torch.sparse_coo"),
    "a nested tensor": (torch.nested.nested_tensor([x(2, 4), x(1, 4)], layout=torch.jagged), "cannot plan for a NestedTensor"),
    "a tensor subclass": (x(3, 4).as_subclass(Subclass), "cannot plan for a Subclass"),
}


@pytest.mark.parametrize("what", INPUTS)
def test_inputs_that_a_graph_cannot_take(what: str) -> None:
    given, message = INPUTS[what]
    with pytest.raises(CaptureError, match=message):
        optimize(of(lambda m, h, other: m.a(h), x(3, 4), given))


def test_an_output_that_hides_a_tensor() -> None:
    box = Box(None)

    def fills(m: Any, h: torch.Tensor) -> Any:
        box.held = m.a(h)
        return box, box

    refused(of(fills), "an output is a Box")  # one object in two places: a planned step would make two


LOSSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of many elements": (lambda y: y.square(), r"it returns a tensor of shape \(3, 4\), float32"),
    "of complex numbers": (lambda y: torch.fft.fft(y).sum(), r"it returns a tensor of shape \(\), complex64"),
    "a number": (lambda y: 1.0, "it returns a float"),
    "a pair": (lambda y: (y.mean(), y), "it returns a tuple"),
    "detached": (lambda y: y.detach().mean(), "requires no gradient"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_no_backward_starts_from(what: str) -> None:
    made = of(lambda m, h: m.a(h))
    made.loss_fn, message = LOSSES[what]
    refused(made, f"(?s)cannot train with the loss <lambda>.*test_refused.py:.*{message}")


def test_a_loss_of_one_element_in_another_shape() -> None:
    made = of(lambda m, h: m.a(h))
    made.loss_fn = lambda y: y.mean().view(1)
    twin, module = copy.deepcopy(made.model), optimize(made)
    module(*made.args)[0].backward()
    made.loss_fn(twin(*made.args)).backward()
    assert torch.equal(module.a.weight.grad, twin.a.weight.grad)  # type: ignore[union-attr, arg-type]


def test_a_loss_is_not_to_blame_for_a_frozen_model() -> None:
    made = of(lambda m, h: m.a(h))
    made.model.requires_grad_(False)
    made.loss_fn = lambda y: y.mean()
    with pytest.raises(CaptureError, match="nothing to train"):
        optimize(made)


def test_a_list_given_to_be_filled() -> None:
    def run(m: Any, h: torch.Tensor, found: list[Any]) -> torch.Tensor:
        found.append(m.a(h))
        return m.b(found[-1])

    refused(of(run, x(3, 4), []), "one of its inputs")


def test_parameters_that_are_not_registered() -> None:
    made = of(lambda m, h: m.hidden[0](m.a(h)))
    made.model.hidden = [nn.Linear(4, 4)]  # type: ignore[assignment]
    refused(made, "requires a gradient and is not reached")
    weight = made.model.a.weight  # type: ignore[union-attr]
    loss = TrainingStep(nn.Linear(4, 4), (x(3, 4),), loss_fn=lambda y: y.sum() + weight.sum())
    with pytest.raises(CaptureError, match="requires a gradient and is not reached"):
        optimize(loss)


def test_sparse_gradients() -> None:
    refused(of(lambda m, ids: m.table(ids), torch.tensor([[0, 1]]), table=nn.Embedding(9, 4, sparse=True)), "a sparse tensor")


def test_nothing_to_train() -> None:
    made = of(lambda m, h: m.a(h))
    made.model.requires_grad_(False)
    refused(made, "nothing to train")


def test_forwards_that_cannot_be_replaced() -> None:
    made = of(lambda m, h: m.a(h))
    made.model.forward = types.MethodType(lambda m, h: h, made.model)  # type: ignore[method-assign]
    for model in (made.model, torch.jit.script(nn.Linear(4, 4))):
        with pytest.raises(UsageError, match="cannot be replaced"):
            optimize(TrainingStep(model, made.args))


# -- changes that are seen at the next call ----------------------------------------------------------------------------


@contextmanager
def trains_alike_after(change: Callable[[Any], Any], made: TrainingStep, new_plans: int) -> Iterator[nn.Module]:
    module = optimize(made)
    module(*made.args)
    change(made.model)
    yield module
    torch.manual_seed(0)
    ours = module(*made.args)
    torch.manual_seed(0)
    theirs = made.model(*made.args) if made.loss_fn is None else made.loss_fn(made.model(*made.args))
    assert torch.equal(ours if made.loss_fn is None else ours[0], theirs)
    assert n_plans(module) == 1 + new_plans


def dropping() -> TrainingStep:
    return TrainingStep(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU()), (x(3, 4),))


def replace_activation(m: Any) -> None:
    m[2] = nn.GELU()


def set_probability(m: Any) -> None:
    m[1].p = 0.1


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a probability": (set_probability, 1),
    "a submodule": (replace_activation, 1),
    "a mode": (lambda m: m[1].eval(), 1),
    "a frozen parameter": (lambda m: m[0].weight.requires_grad_(False), 1),
    "a weight in place": (lambda m: m[0].weight.data.mul_(2), 0),
    "a new parameter": (lambda m: setattr(m[0], "weight", nn.Parameter(x(4, 4))), 0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_the_module(what: str) -> None:
    change, new_plans = CHANGES[what]
    with trains_alike_after(change, dropping(), new_plans):
        pass


def test_tensors_in_attributes() -> None:
    made = of(lambda m, h: m.a(h) * m.scale)
    made.model.scale = torch.ones(4)  # type: ignore[assignment]
    with trains_alike_after(lambda m: setattr(m, "scale", torch.arange(4.0)), made, 0):
        pass


def test_what_a_loss_refers_to() -> None:
    targets = [torch.zeros(3, 4)]
    made = of(lambda m, h: m.a(h))
    made.loss_fn = lambda y: F.mse_loss(y, targets[0])
    with trains_alike_after(lambda _: targets[0].fill_(2.0), made, 0):
        pass
    with trains_alike_after(lambda _: targets.__setitem__(0, torch.ones(3, 4)), made, 1):
        pass


def test_constants_among_the_inputs() -> None:
    made = of(lambda m, h, k: m.a(h) * k, x(3, 4), 2)
    module = optimize(made)
    for k in (2, 2.0, 3, True):
        assert torch.equal(module(made.args[0], k), made.model(made.args[0], k))
    assert n_plans(module) == 4, "2 is not 2.0: another dtype may follow from it"


def test_many_plans_are_warned_of() -> None:
    made = of(lambda m, h, k: m.a(h) * k, x(3, 4), 0)
    module = optimize(made)
    with pytest.warns(UserWarning, match="16 plans"):
        for k in range(1, 16):
            module(made.args[0], k)


# -- other ways to call it ---------------------------------------------------------------------------------------------


def test_function_transforms_and_compilers_run_the_original() -> None:
    made = of(lambda m, h: m.b(m.a(h).tanh()))
    module = optimize(made)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def total(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, made.args).sum()

    assert torch.func.grad(total)(parameters)["a.weight"].shape == (4, 4)
    assert torch.vmap(module)(x(5, 3, 4)).shape == (5, 3, 4)
    assert torch.equal(torch.compile(module, backend="eager")(*made.args), made.model(*made.args))
    other = {name: p * 2 for name, p in parameters.items()}
    assert torch.equal(
        torch.func.functional_call(module, other, made.args), torch.func.functional_call(made.model, other, made.args)
    )


def test_a_models_own_names_come_first() -> None:
    class Named(Of):
        def report(self) -> str:
            return "its own"

    model = Named(lambda m, h: m.original(h), original=nn.Linear(4, 4))
    model.plan = "mine"  # type: ignore[assignment]
    module = optimize(TrainingStep(model, (x(3, 4),)))
    assert (module.plan, module.report()) == ("mine", "its own")  # type: ignore[operator]
    assert isinstance(module.original, nn.Linear) and module(x(3, 4)).shape == (3, 4)


def test_second_derivatives_for_some_inputs_alone() -> None:
    """A gradient penalty of which a backward asks for the parameters' gradients only: it would be lost."""
    made = of(lambda m, h: m.b(m.a(h).tanh()))
    module, q = optimize(made), x(3, 4, grad=True)
    (gradient,) = torch.autograd.grad(module(q).mean(), q, create_graph=True)
    loss = module(*made.args).mean() + (gradient.norm() - 1) ** 2
    with pytest.raises(UsageError, match="differentiated twice"):
        loss.backward(inputs=list(module.parameters()))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_that_changes_buffers(use_reentrant: bool) -> None:
    """Eager runs it twice and counts two batches."""
    run = lambda m, h: m.b(checkpoint(m.norm, m.a(h), use_reentrant=use_reentrant))  # noqa: E731
    refused(of(run, norm=nn.BatchNorm1d(4)), "a checkpoint changes the module")


def test_a_checkpoint_around_a_module_that_updates_buffers() -> None:
    made = of(lambda m, h: m.b(m.norm(m.a(h))), x(3, 4, grad=True), norm=nn.BatchNorm1d(4))
    module = optimize(made)
    with pytest.raises(UsageError, match="a checkpoint around the module"):
        checkpoint(module, *made.args, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
