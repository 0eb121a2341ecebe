"""`actsolve.backend`: torch.compile within a memory budget, bit for bit as Inductor trains by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import actsolve
from actsolve.errors import ActsolveError, CaptureError, InfeasibleBudget, UsageError
from actsolve.inductor.torch_inductor import passing_through
from models_zoo.vgg import VGG

Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread_and_a_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "costs"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """Norm, wide layer, dropout: reductions, products and random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


class Mixed(nn.Module):
    """Convolutions with batch norm, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.blocks = nn.Sequential(Block(8), Block(8), Block(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.blocks(x.flatten(2).transpose(1, 2))


class Mean(nn.Module):
    """A loss of a model's output, in the same graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def trained(module: nn.Module, run: Callable[..., Any], *inputs: torch.Tensor, steps: int = 2) -> Tensors:
    """Train by SGD; return losses, gradients, parameters, buffers and what the generator gives next."""
    torch.manual_seed(0)
    seen: Tensors = []
    for _ in range(steps):
        module.zero_grad()
        loss = run(*inputs)
        loss.backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
        seen += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
    return [*seen, *(t.detach().clone() for t in module.state_dict().values()), torch.rand(4)]


def assert_trains_as_inductor_does(model: nn.Module, x: torch.Tensor, backend: Any, *, exact: bool = True) -> None:
    """``exact``: to the bit; else a difference may be there if the backend has told of it."""
    stock = copy.deepcopy(model)
    compiled = torch.compile(Mean(model), backend=backend, dynamic=False)
    own = torch.compile(Mean(stock), options=backend.options, dynamic=False)
    ours, theirs = trained(model, compiled, x), trained(stock, own, x)
    (graph,) = backend.graphs
    assert graph.compared and (graph.difference is None or not exact)
    if graph.difference is None:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert graph.stock_bytes is not None and graph.peak_bytes <= graph.budget_bytes
    assert graph.peak_bytes < graph.stock_bytes and graph.extra_s > 0 and graph.tried
    assert "bitwise" in backend.report() or graph.difference is not None


def test_a_plan_trains_as_inductor_does_within_the_budget() -> None:
    """With dropout: loss, gradients and random state are bitwise equal, and memory is saved."""
    torch.manual_seed(0)
    backend = actsolve.backend("80%", optimizer="sgd", hardware="a100", time_limit_s=5, rounds=2)
    assert backend.report() == "nothing was compiled for training yet"
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))]
    assert_trains_as_inductor_does(nn.Sequential(*layers), torch.randn(512, 16), backend)


def test_a_budget_that_inductor_meets_is_left_to_it() -> None:
    """And planning leaves gradients and the random state alone."""
    model, x, backend = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8), actsolve.backend("1GiB")
    kept = model[0].weight.grad = torch.ones(8, 8)
    state = torch.get_rng_state()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    output = compiled(x)
    torch.set_rng_state(state)
    assert torch.equal(output, compiled(x))
    assert model[0].weight.grad is kept and torch.equal(kept, torch.ones(8, 8))
    (graph,) = backend.graphs
    assert graph.predicted_bytes is None and graph.peak_bytes == graph.stock_bytes and graph.tried == ()
    with torch.no_grad():
        assert compiled(x).shape == (4, 8)  # without a backward nothing is planned
    assert backend.graphs == [graph]


def test_what_does_not_fit_is_said_in_our_words() -> None:
    """torch.compile lets our errors through, with what fits; the message is what `InfeasibleBudget` says elsewhere."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    compiled = torch.compile(model, backend=actsolve.backend(70_000, hardware="a100", time_limit_s=5, rounds=1), dynamic=False)
    with pytest.raises(InfeasibleBudget, match=r"no compiled step fits 68\.36 KiB") as caught:
        compiled(torch.randn(256, 64)).sum().backward()
    assert caught.value.smallest_bytes is not None and caught.value.smallest_bytes > 70_000
    assert f"a budget of {caught.value.smallest_bytes} bytes" in str(caught.value)


def test_a_second_graph_is_refused_with_a_budget_in_bytes() -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).relu()
        torch._dynamo.graph_break()
        return (y @ weight).sum()

    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with pytest.raises(UsageError, match="the step is more than one graph"):
        torch.compile(broken, backend=actsolve.backend("1GiB"), dynamic=False)(x, weight)
    torch._dynamo.reset()
    backend = actsolve.backend("100%")
    torch.compile(broken, backend=backend, dynamic=False)(x, weight).backward()
    assert len(backend.graphs) == 2


def test_symbolic_shapes_are_refused() -> None:
    compiled = torch.compile(nn.Linear(8, 8), backend=actsolve.backend("60%"), dynamic=True)
    with pytest.raises(CaptureError, match="the step's shapes are symbolic"):
        compiled(torch.randn(5, 8))


def test_the_users_own_checkpoints_are_refused() -> None:
    layer = nn.Linear(8, 8)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False).sum()

    with pytest.raises(CaptureError, match=r"recomputes by torch\.utils\.checkpoint"):
        torch.compile(run, backend=actsolve.backend("60%"), dynamic=False)(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mem_budget": "lots"}, "cannot read"),
        ({"mem_budget": 1.5}, "a share"),
        ({"mem_budget": "60%", "optimizer": "adamm"}, "adamm"),
        ({"mem_budget": "60%", "rounds": 0}, "rounds=0"),
        ({"mem_budget": "60%", "options": {"_pre_fusion_custom_pass": None}}, "_pre_fusion_custom_pass"),
        ({"mem_budget": "60%", "rounds": True}, "rounds=True"),
        ({"mem_budget": "60%", "hardware": "abacus"}, "abacus"),
    ],
)
def test_wrong_arguments_are_told_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        actsolve.backend(**arguments)


def test_errors_pass_as_what_they_are() -> None:
    error = InfeasibleBudget("nothing fits", where="here", smallest_bytes=7)
    through = passing_through(error)
    assert isinstance(through, InfeasibleBudget) and str(through) == str(error)
    assert (through.smallest_bytes, through.where, through.exit_code) == (7, "here", 3)
    assert isinstance(through, ActsolveError)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "min"])
def test_convolutions_and_deep_models_train_as_inductor_does(budget: str) -> None:
    """Batch norm too: its buffers are updated once. At the smallest budget fused chains may round otherwise, and that is told."""
    torch.manual_seed(0)
    exact, images = budget != "min", torch.randn(8, 3, 16, 16)
    backend = actsolve.backend(budget, optimizer="sgd", time_limit_s=10)
    assert_trains_as_inductor_does(Mixed(), images, backend, exact=exact)
    deep = nn.Sequential(*(Block(64) for _ in range(4)))
    assert_trains_as_inductor_does(deep, torch.randn(512, 64), actsolve.backend(budget, time_limit_s=10), exact=exact)


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", [False, True])
def test_the_weights_of_convolutions_that_inductor_lays_out_anew(everywhere: bool) -> None:
    """They are as large as what the layers make: a plan that did not count them would be far from what is measured.

    Whether the backward is laid out with channels last is for Inductor's options to say, not for what is replayed there.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())]
    options = {"force_layout_optimization": everywhere}
    backend = actsolve.backend("85%", optimizer="sgd", time_limit_s=10, options=options)
    assert_trains_as_inductor_does(nn.Sequential(*layers), torch.randn(4, 64, 16, 16), backend)
    (graph,) = backend.graphs
    assert graph.predicted_bytes is not None and 0.98 < graph.peak_bytes / graph.predicted_bytes < 1.02


class Shared(nn.Module):
    """A convolution's weight that is read by two convolutions and by a sum; images come out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.frozen = nn.Conv2d(16, 16, 3, padding=1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.first, self.again, self.frozen, self.again, self.frozen):
            x = nn.functional.gelu(conv(x))
        return x + self.again.weight.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["75%", "min"])
def test_images_come_out_as_inductor_lays_them_out_and_sums_keep_their_order(budget: str) -> None:
    torch.manual_seed(0)
    model, images = Shared(), torch.randn(4, 3, 16, 16)
    outputs = []
    for run in ("inductor", actsolve.backend(budget, optimizer="sgd", time_limit_s=5)):
        outputs.append(torch.compile(model, backend=run, dynamic=False)(images))
        torch._dynamo.reset()
    assert torch.equal(*outputs) and outputs[0].stride() == outputs[1].stride() == (4096, 256, 16, 1)
    model.frozen.requires_grad_()
    assert_trains_as_inductor_does(model, images, actsolve.backend(budget, optimizer="sgd", time_limit_s=5))


def test_parameters_that_the_forward_changes_are_put_back_after_a_trial() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return self.layer(x)

    torch.manual_seed(0)
    model, x = Halving(), torch.randn(4, 8)
    stock = copy.deepcopy(model)
    ours = trained(model, torch.compile(Mean(model), backend=actsolve.backend("100%"), dynamic=False), x)
    theirs = trained(stock, torch.compile(Mean(stock), dynamic=False), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Drawing(nn.Module):
    """Draws in the middle of layers, and goes on with what it drew."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.layers = draw, nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.draw(torch.tanh(layer(x)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", "rrelu", "dropout as in eager"])
def test_ops_that_draw_by_themselves_are_not_replayed(kind: str) -> None:
    """Inductor calls them, and sets no generator back: a replay would draw others."""
    draws = {
        "poisson": lambda h: h * torch.poisson(h.detach().abs() + 1),
        "rrelu": lambda h: nn.functional.rrelu(h, training=True),
        "dropout as in eager": lambda h: nn.functional.dropout(h, 0.3),
    }
    options = {"fallback_random": True} if kind == "dropout as in eager" else {}
    torch.manual_seed(0)
    model, x = Drawing(draws[kind]), torch.randn(256, 64)
    stock = copy.deepcopy(model)
    backend = actsolve.backend("min", optimizer="sgd", time_limit_s=5, options=options)
    ours = trained(model, torch.compile(Mean(model), backend=backend, dynamic=False), x)
    torch._dynamo.reset()
    theirs = trained(stock, torch.compile(Mean(stock), dynamic=False, options=options), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["80%", "min"])
@pytest.mark.parametrize("changed", ["weights", "images"])
def test_what_is_saved_and_changed_before_the_backward_is_noticed(changed: str, budget: str) -> None:
    """Gradients are those of the tensors as they were, from copies as of stock Inductor's, or torch raises as in eager."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())]
    model, images = Mean(nn.Sequential(*layers)), torch.randn(4, 16, 16, 16)
    expected = torch.autograd.grad(model(images), list(model.parameters()))
    compiled = torch.compile(model, backend=actsolve.backend(budget, optimizer="sgd", time_limit_s=5), dynamic=False)
    loss = compiled(images)
    with torch.no_grad():
        for tensor in model.parameters() if changed == "weights" else [images]:
            tensor.add_(1)
    try:
        found = torch.autograd.grad(loss, list(model.parameters()))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_what_comes_from_another_graph_may_be_written_into() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            torch._dynamo.graph_break()
            return self.b(h.relu_())

    torch.manual_seed(0)
    model, x = Broken(), torch.randn(8, 16)
    stock = copy.deepcopy(model)
    ours = trained(model, torch.compile(Mean(model), backend=actsolve.backend("100%", optimizer="sgd"), dynamic=False), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, trained(stock, torch.compile(Mean(stock), dynamic=False), x), strict=True))


@pytest.mark.slow
def test_the_smallest_is_at_most_inductors_own() -> None:
    torch.manual_seed(0)
    backend = actsolve.backend("min", optimizer="sgd", time_limit_s=5)
    torch.compile(Mean(nn.Linear(64, 64)), backend=backend, dynamic=False)(torch.randn(64, 64)).backward()
    (graph,) = backend.graphs
    assert graph.stock_bytes is not None and graph.peak_bytes <= graph.stock_bytes and graph.budget_bytes >= graph.peak_bytes


@pytest.mark.slow
def test_what_reads_a_buffer_comes_after_what_writes_into_it() -> None:
    """Max pool's gradients are added into a buffer, which torch 2.13's Inductor on a CPU reads before that."""
    torch.manual_seed(0)
    vgg = VGG(depth=16, width=16, hidden=128, classes=10, dropout=0.0)
    model = Mean(nn.Sequential(*vgg.features[-14:], vgg.avgpool, nn.Flatten(), vgg.classifier))
    images = torch.randn(16, 64, 12, 12)
    for budget in ("100%", "90%"):
        compiled = torch.compile(model, backend=actsolve.backend(budget, optimizer="sgd", time_limit_s=10), dynamic=False)
        (ours, eager) = (torch.autograd.grad(run(images), list(model.parameters())) for run in (compiled, model))
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
        torch._dynamo.reset()
