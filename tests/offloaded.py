"""Steps whose values are offloaded at random times, and the modules that carry that out."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import kinds_of_autograd  # noqa: F401  # they register themselves
import kinds_of_layers  # noqa: F401
import kinds_of_state  # noqa: F401
import torch
import torch.nn.functional as F
from alike import made, step_loss
from copies import LINKS, offload_problem, random_schedule
from kinds import of, step, x
from torch import nn

from actsolve.capture.captured import Captured, capture
from actsolve.check import check
from actsolve.compiled import CompiledStep, compile_step
from actsolve.cost.link_speed import EMULATED
from actsolve.links import Links
from actsolve.module import Runtime, optimized_module
from actsolve.problem import Problem
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.exactness import bitwise_equal
from actsolve.schedule import Schedule, StepKind
from actsolve.training_step import TrainingStep

Make = Callable[[], TrainingStep]
PLAIN = CopyOptions()


def mlp(width: int = 16, layers: int = 4) -> TrainingStep:
    parts = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Sigmoid())]
    return step(nn.Sequential(*parts), x(8, width), loss_fn=lambda y: y.square().sum())


def transformer() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(m.norm(h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.3) @ v
        h = h + F.dropout(m.a(mixed.transpose(1, 2).flatten(2)), 0.2)
        return h + F.dropout(m.b(F.gelu(h)), 0.2)

    return of(run, x(2, 5, 16), width=16, qkv=nn.Linear(16, 48), norm=nn.LayerNorm(16))


def conv_skip() -> TrainingStep:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
            self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            first = h
            for conv, norm in zip(self.convs, self.norms, strict=True):
                h = F.relu(norm(conv(h)), inplace=True)
            return torch.cat([h, first], 1).square().mean()

    return step(Skip(), x(2, 4, 8, 8))


def views() -> TrainingStep:
    """Transposed storages, parts of storages, and values of several outputs."""

    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        a, b = m.a(h).transpose(0, 1).exp().split(4, 0)
        c = torch.empty_strided((4, 3), (1, 8)).copy_(a * b)
        values, index = (c.t() + a.t()).sort(-1)
        narrow = m.b(F.pad(values, (2, 2)))[:, 1:5].tanh()
        return (narrow.unflatten(1, (2, 2)).transpose(0, 2) * index.float().mean()).contiguous().view(-1).sigmoid()

    return of(run, x(3, 8), width=8)


MODELS: dict[str, Make] = {"mlp": mlp, "transformer": transformer, "conv_skip": conv_skip, "views": views}


class Trained:
    """A step that carries out a schedule: the module, and the engine that copies for it."""

    def __init__(self, given: TrainingStep, captured: Captured, schedule: Schedule, options: CopyOptions, links: Links) -> None:
        def refuse(*_: Any) -> Any:
            raise AssertionError("inputs or modes differ from those that were captured")

        self.step = given
        self.runtime = Runtime(given.model, given.loss_fn, refuse, "raise")
        self.module = optimized_module(self.runtime)
        planned: Any = SimpleNamespace(schedule=schedule, notes=(EMULATED,), problem=SimpleNamespace(links=links))
        self.runtime.plan_first(given, lambda: compile_step(captured, planned, options=options))

    @property
    def compiled(self) -> CompiledStep:
        assert self.runtime.first is not None
        return self.runtime.first

    @property
    def engine(self) -> CopyEngine[Any]:
        engine = self.compiled.backward.engine
        assert engine is not None
        return engine

    def loss(self) -> torch.Tensor:
        return step_loss(self.step)(self.module(*self.step.args, **self.step.kwargs))

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.module.parameters() if p.grad is not None]


@cache
def captured_of(make: Make) -> Captured:
    return capture(made(make))


def drawn(make: Make, seed: int, *, share: float | None = None) -> tuple[Captured, Problem, Schedule]:
    """A random schedule that offloads something, accepted by the checker."""
    captured = captured_of(make)
    problem = offload_problem(captured.graph)
    rng = random.Random(seed)
    for _ in range(50):
        schedule = random_schedule(problem, rng, share=share)
        if any(s.kind is StepKind.COPY_OUT for s in schedule.steps):
            break
    check(problem, schedule)
    return captured, problem, schedule


def trained(
    make: Make, seed: int = 0, *, share: float | None = 1.0, options: CopyOptions = PLAIN, links: Links = LINKS
) -> Trained:
    captured, _, schedule = drawn(make, seed, share=share)
    return Trained(made(make), captured, schedule, options, links)


def eager_gradients(make: Make, weight: float = 1.0, seed: int = 0) -> list[torch.Tensor]:
    given = made(make)
    torch.manual_seed(seed)
    output = given.model(*given.args)
    loss = step_loss(given)(output if given.loss_fn is None else (given.loss_fn(output), output))
    (loss * weight).backward()
    return [p.grad for p in given.model.parameters() if p.grad is not None]


def assert_bitwise(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) and all(map(bitwise_equal, a, b))


def copy_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("actsolve")]
