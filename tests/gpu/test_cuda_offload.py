"""Offloading on a CUDA device: exact, pinned at its exact size, overlapping, and within what is simulated."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alike import step_loss
from copies import offload_problem, prompt_copies, random_schedule
from torch import nn
from torch.utils._pytree import tree_map

import models_zoo
from actsolve.capture.captured import Captured, capture
from actsolve.check import check
from actsolve.compiled import compile_step
from actsolve.cost.link_speed import EMULATED
from actsolve.cost.optimizers import new_optimizer
from actsolve.experiments import late_out, on_demand, synchronous
from actsolve.links import Links
from actsolve.module import Runtime, optimized_module
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.exactness import bitwise_equal, largest_difference
from actsolve.runtime.trainer import Trainer
from actsolve.schedule import Schedule, StepKind
from actsolve.training_step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ADAMW = partial(new_optimizer, "adamw")
LINKS = Links(d2h=25e9, h2d=25e9)
PLAIN = CopyOptions()
MODELS = ["gpt-mini", "bert-mini", "resnet18-mini", "unet-mini"]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_device(name: str) -> TrainingStep:
    torch.manual_seed(0)
    return moved(models_zoo.get(name)())


def moved(step: TrainingStep) -> TrainingStep:
    args, kwargs = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, (step.args, step.kwargs))
    return replace(step, model=step.model.cuda(), args=args, kwargs=kwargs)


def wide(layers: int = 8) -> TrainingStep:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(2048, 2048), nn.Sigmoid())]
    return moved(TrainingStep(nn.Sequential(*parts), (torch.randn(8192, 2048),), loss_fn=lambda y: y.square().sum()))


def compiled(step: TrainingStep, captured: Captured, schedule: Schedule, options: CopyOptions = PLAIN) -> Any:
    """The module, and the engine that copies for it."""
    runtime = Runtime(step.model, step.loss_fn, lambda *_: pytest.fail("planned anew"), "raise")
    module = optimized_module(runtime)
    planned: Any = SimpleNamespace(schedule=schedule, notes=(EMULATED,), problem=SimpleNamespace(links=LINKS))
    runtime.plan_first(step, lambda: compile_step(captured, planned, options=options))
    assert runtime.first is not None
    return module, runtime.first.backward.engine


def drawn(step: TrainingStep, seed: int, share: float) -> tuple[Captured, Schedule]:
    captured = capture(step)
    problem = replace(offload_problem(captured.graph), min_offload_bytes=4096)  # smaller ones may be on the CPU: random states
    schedule = random_schedule(problem, random.Random(seed), share=share)
    check(problem, schedule)
    return captured, schedule


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_eager_does(name: str, seed: int) -> None:
    step = on_device(name)
    captured, schedule = drawn(step, seed, 0.7)
    module, _ = compiled(step, captured, schedule)
    assert largest_difference(Trainer(on_device(name), ADAMW), Trainer(step, ADAMW, module=module)) is None


@pytest.mark.parametrize("change", [synchronous, late_out, on_demand])
@pytest.mark.parametrize("pageable", [False, True])
def test_experiments_train_as_eager_does(change: Any, pageable: bool) -> None:
    step = on_device("gpt-mini")
    captured, schedule = drawn(step, 1, 1.0)
    module, _ = compiled(step, captured, change(captured.graph, schedule), CopyOptions(pageable=pageable))
    assert largest_difference(Trainer(on_device("gpt-mini"), ADAMW), Trainer(step, ADAMW, module=module)) is None


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_two_pending_forwards_and_a_second_backward() -> None:
    step = wide()
    captured, schedule = drawn(step, 0, 1.0)
    module, engine = compiled(step, captured, schedule)
    first, second = (step_loss(step)(module(*step.args)) for _ in range(2))
    seen = []
    for loss, retain in ((second, False), (first, True), (first, False)):
        module.zero_grad()
        loss.backward(retain_graph=retain)
        seen.append(gradients(module))
    module.zero_grad()
    output = module.original(*step.args)
    step.loss_fn(output).backward()  # type: ignore[misc]
    for got in seen:
        assert all(map(bitwise_equal, got, gradients(module)))
    assert engine.n_arenas == 2


def test_an_exception_with_copies_in_flight_spoils_nothing() -> None:
    step = wide()
    captured, schedule = drawn(step, 0, 1.0)
    calls = 0

    def failing(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("on purpose")
        return wait(self, *args)

    wait = CopyEngine.wait_out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyEngine, "wait_out", failing)
        module, engine = compiled(step, captured, schedule)
    with pytest.raises(RuntimeError, match="on purpose"):
        step_loss(step)(module(*step.args)).backward()
    module.zero_grad()
    junk = [torch.full((8192, 2048), float("nan"), device="cuda") for _ in range(8)]  # reuses what was freed
    del junk
    step_loss(step)(module(*step.args)).backward()
    ours = gradients(module)
    module.zero_grad()
    step.loss_fn(module.original(*step.args)).backward()  # type: ignore[misc]
    assert all(map(bitwise_equal, ours, gradients(module)))
    assert engine.n_arenas == 1


def test_device_memory_is_freed_and_host_memory_is_of_the_exact_size() -> None:
    step = wide()
    captured, schedule = drawn(step, 0, 1.0)
    module, engine = compiled(step, captured, schedule)
    sizes = [captured.graph.values[s.value].size_bytes for s in schedule.steps if s.kind is StepKind.COPY_OUT]  # type: ignore[index]
    assert sum(sizes) <= engine.host_bytes < sum(sizes) + 512 * len(sizes)
    [arena] = engine._arenas.values()
    assert arena.memory.is_pinned()
    step_loss(step)(module(*step.args)).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        module.zero_grad()
        step_loss(step)(module(*step.args)).backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    del module, engine, arena
    gc.collect()


def test_copies_overlap_the_computation() -> None:
    """Synchronous copies take longer than those that are queued early: by a good part of what the copies take."""
    step = wide()
    captured = capture(step)
    schedule = prompt_copies(captured.graph, replace(offload_problem(captured.graph), min_offload_bytes=4096))
    times = {}
    for name, other in (("planned", schedule), ("synchronous", synchronous(captured.graph, schedule))):
        module, _ = compiled(step, captured, other)
        for _ in range(3):
            step_loss(step)(module(*step.args)).backward()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            step_loss(step)(module(*step.args)).backward()
        torch.cuda.synchronize()
        times[name] = time.perf_counter() - begin
    assert times["planned"] < 0.95 * times["synchronous"], times
