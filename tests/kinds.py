"""Small training steps, one for each kind of thing that a model may do: the registry, and what a step is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from actsolve.training_step import TrainingStep

Loss = Callable[[Any], torch.Tensor]


@dataclass
class Kind:
    """A kind of training step.

    Attributes:
        make: Makes one.
        loss: What its backward starts from; None for a sum over all its outputs.
        context: Around its capture and each of its forwards.
    """

    make: Callable[[], TrainingStep]
    loss: Loss | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


KINDS: dict[str, Kind] = {}


def kind(
    name: str, *, loss: Loss | None = None, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[Callable[[], TrainingStep]], Callable[[], TrainingStep]]:
    """Register what is decorated, a function that makes a training step."""

    def register(make: Callable[[], TrainingStep]) -> Callable[[], TrainingStep]:
        assert name not in KINDS, name
        KINDS[name] = Kind(make, loss, context)
        return make

    return register


class Of(nn.Module):
    """A module of a function of (itself, *inputs), with the submodules and tensors that this needs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def x(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An input, of normal noise."""
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def step(model: nn.Module, *args: Any, loss_fn: Loss | None = None, **kwargs: Any) -> TrainingStep:
    return TrainingStep(model, args, kwargs, loss_fn)


def of(run: Callable[..., Any], *args: Any, width: int = 4, **parts: Any) -> TrainingStep:
    """A step of ``run(model, *args)`` for a model with two square linear layers, ``a`` and ``b``, and ``parts``."""
    return TrainingStep(Of(run, a=nn.Linear(width, width), b=nn.Linear(width, width), **parts), args or (x(3, width),))
