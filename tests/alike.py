"""Whether a module that carries out a schedule trains as the original does in eager mode, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from replayed_often import random_replays
from torch import nn

from actsolve.capture.captured import Captured
from actsolve.capture.structure import Made, take_apart
from actsolve.check import check
from actsolve.compiled import compile_step
from actsolve.cost.layout_check import capture_as_laid_out
from actsolve.graph import Graph
from actsolve.module import Runtime, optimized_module
from actsolve.problem import Costs, Problem
from actsolve.replays import replaying_schedule
from actsolve.runtime.exactness import bitwise_equal
from actsolve.schedule import Schedule, build_schedule
from actsolve.training_step import TrainingStep

Loss = Callable[[Any], torch.Tensor]


def required(graph: Graph) -> frozenset[int]:
    """The decidable values that must be kept: their op cannot be replayed."""
    return frozenset(v for v in graph.decidable if not graph.ops[graph.values[v].producer].replayable)  # type: ignore[index]


def kept_sets(graph: Graph, *, seeds: int = 2) -> Iterator[tuple[str, frozenset[int]]]:
    """Keep-all, the least, and random sets between, by name."""
    least = required(graph)
    yield "keep all", frozenset(graph.decidable) - {v for v in graph.decidable if graph.values[v].name.endswith(".rng_state")}
    yield "keep nothing", least
    yield "keep random states", least | {v for v in graph.decidable if graph.values[v].name.endswith(".rng_state")}
    for seed in range(seeds):
        draw = random.Random(seed)
        yield f"random {seed}", least | {v for v in graph.decidable if draw.random() < 0.5}


def checked_schedule(graph: Graph, kept: frozenset[int]) -> Schedule:
    """The schedule that keeps just ``kept``, accepted by the checker."""
    return checked(graph, build_schedule(graph, kept))


def checked(graph: Graph, schedule: Schedule) -> Schedule:
    """``schedule``, accepted by the checker."""
    ones = Costs((1.0,) * len(graph.ops), (1.0,) * len(graph.ops), (0,) * len(graph.ops))
    check(Problem(graph, ones, 1 << 62, 0), schedule)
    return schedule


def planned_module(step: TrainingStep, captured: Captured, schedule: Schedule) -> nn.Module:
    """``step.model`` as a module that carries out ``schedule``; any other inputs are refused."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("inputs or modes differ from those that were captured")

    runtime = Runtime(step.model, step.loss_fn, refuse, "raise")
    module = optimized_module(runtime)
    planned: Any = SimpleNamespace(schedule=schedule, notes=())
    runtime.plan_first(step, lambda: compile_step(captured, planned))
    return module


def assert_trains_alike(
    make: Callable[[], TrainingStep],
    *,
    loss: Loss | None = None,
    steps: int = 3,
    seeds: int = 2,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    capture: Callable[[TrainingStep], Captured] = capture_as_laid_out,
) -> Captured:
    """Train what ``make`` returns in eager mode and as planned, for several plans; compare all that can be observed.

    Args:
        make: Makes the step to train, the same each time under one seed.
        loss: What the backward starts from, of what a call returns; its sum of squares if that is left out.
        steps: Steps of AdamW.
        seeds: How many random plans, besides keeping all and nothing.
        context: Around each forward, and the capture: autocast.
        capture: How the step is traced.
    """
    step, original = made(make), made(make)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with context():
        captured = capture(step)
    assert torch.equal(before, torch.get_rng_state()), "capture has drawn random numbers"
    assert_same_state(step.model, original.model, "capture")
    schedules = [(name, build_schedule(captured.graph, kept)) for name, kept in kept_sets(captured.graph, seeds=seeds)]
    often = random_replays(captured.graph, len(schedules), drop=0.3)
    schedules.append(("replay often", replaying_schedule(captured.graph, often)))
    anywhere = random_replays(captured.graph, len(schedules), drop=0.2, anywhere=True)
    schedules.append(("replay anywhere", replaying_schedule(captured.graph, anywhere)))
    for name, schedule in schedules:
        reference, ours = made(make), made(make)
        checked(captured.graph, schedule)
        with context():
            module = planned_module(ours, captured, schedule)
        assert_equal_training(reference, ours, module, loss or step_loss(step), steps, context, name)
    return captured


def made(make: Callable[[], TrainingStep]) -> TrainingStep:
    torch.manual_seed(3)
    return make()


def step_loss(step: TrainingStep) -> Loss:
    return (lambda output: output[0]) if step.loss_fn is not None else sum_of_squares


def sum_of_squares(output: Any) -> torch.Tensor:
    """A loss that reaches every output with a gradient, each with a weight of its own."""
    leaves = [leaf for leaf in take_apart(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    terms = [part.float().square().mean() * (i + 1) for i, part in enumerate(parts)]
    return torch.stack(terms).sum() if len(terms) != 1 else terms[0]


def assert_equal_training(
    reference: TrainingStep,
    ours: TrainingStep,
    module: nn.Module,
    loss: Loss,
    steps: int,
    context: Callable[[], AbstractContextManager[Any]],
    plan: str,
) -> None:
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) if list(m.parameters()) else None for m in (reference.model, module)]
    for number in range(steps):
        where = f"{plan}, step {number}"
        seen = []
        for step, call in ((reference, eager(reference)), (ours, module)):
            torch.manual_seed(number)
            with context():
                output = call(*step.args, **step.kwargs)
                value = loss(output)
            value.backward()
            seen.append((output, torch.get_rng_state()))
        (expected, rng), (got, our_rng) = seen
        assert_same(expected, got, f"{where}: output")
        assert torch.equal(rng, our_rng), f"{where}: the random states differ"
        for (name, p), q in zip(reference.model.named_parameters(), module.parameters(), strict=True):
            assert bitwise_equal(p.grad, q.grad), f"{where}: gradients of {name} differ"
        for i, (a, b) in enumerate(zip(*(take_apart((s.args, s.kwargs))[0] for s in (reference, ours)), strict=True)):
            if isinstance(a, torch.Tensor):
                assert bitwise_equal(a, b), f"{where}: input {i} differs"
                assert bitwise_equal(a.grad, b.grad) if a.is_leaf else True, f"{where}: the gradient of input {i} differs"
        assert_same_state(reference.model, module, where)
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 2 == 0)
        assert_same_state(reference.model, module, f"{where}, after the optimizer")


def eager(step: TrainingStep) -> Callable[..., Any]:
    if step.loss_fn is None:
        return step.model

    def call(*args: Any, **kwargs: Any) -> Any:
        assert step.loss_fn is not None
        output = step.model(*args, **kwargs)
        return step.loss_fn(output), output

    return call


def assert_same(expected: Any, got: Any, where: str) -> None:
    """Both are nested alike and hold equal constants, and tensors of equal bits and flags."""
    a, structure_a = take_apart(expected, Made([]))
    b, structure_b = take_apart(got, Made([]))
    assert structure_a.key == structure_b.key, f"{where}: nested differently"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, torch.Tensor):
            assert bitwise_equal(x, y), f"{where} {i}: the bits differ"
            assert (x.requires_grad, x.stride()) == (y.requires_grad, y.stride()), f"{where} {i}: other flags"
        else:
            assert x == y, f"{where} {i}: other constant"


def assert_same_state(a: nn.Module, b: nn.Module, where: str) -> None:
    """All parameters and buffers have equal bits, and all modules equal modes."""
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (name, x), (_, y) in zip(named(a), named(b), strict=True):
            assert bitwise_equal(x, y), f"{where}: {name} differs"
    assert [m.training for m in a.modules()] == [m.training for m in b.modules()], f"{where}: modes differ"
