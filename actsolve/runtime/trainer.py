"""Whole training steps of a module on one batch: forward, backward, optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actsolve.capture.flat_step import call_step
from actsolve.capture.torch_internals import storage_key
from actsolve.errors import UsageError
from actsolve.runtime.memory_events import measure_peak
from actsolve.training_step import TrainingStep

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer | None]


class Trainer:
    """Trains a module on the batch of a training step.

    Args:
        step: What to train, as it is; or, with `module`, only its inputs.
        make_optimizer: Makes the optimizer of the parameters, or None for none.
        module: An optimized module of that step, which computes the loss itself.
        accumulate: Gradients stay from step to step and are zeroed, not dropped.
    """

    def __init__(
        self,
        step: TrainingStep,
        make_optimizer: MakeOptimizer,
        *,
        module: torch.nn.Module | None = None,
        accumulate: bool = False,
    ) -> None:
        self.module = module if module is not None else step.model
        self._args, self._kwargs = tuple(step.args), dict(step.kwargs)
        self._loss_fn = step.loss_fn if module is None else None
        self._has_loss_fn = step.loss_fn is not None
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(parameters) if parameters else None
        self._accumulate = accumulate

    def drop_gradients(self) -> None:
        """Drop old gradients, or zero them where they accumulate: what comes before a step."""
        self.module.zero_grad(set_to_none=not self._accumulate)

    def forward(self) -> tuple[torch.Tensor, Any]:
        """Return the loss, and all that the step's call returned."""
        result = call_step(self.module, self._loss_fn, self._args, self._kwargs)
        return (result[0] if self._has_loss_fn else scalar_loss(result)), result

    def step(self) -> float:
        """Train one step; return the loss. The call's result is held to the end, as most callers do."""
        loss, _result = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.item()

    def update(self) -> None:
        """Take the optimizer's step, if there is an optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()

    @property
    def device(self) -> torch.device:
        """Where it trains: the first parameter's device."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def static_bytes(self) -> int:
        """Bytes of what is on the device between steps, each storage once.

        Parameters, buffers, inputs, and the optimizer's state as far as it exists; gradients where they accumulate.
        """
        leaves = pytree.tree_leaves((self._args, self._kwargs))
        state = self.optimizer.state.values() if self.optimizer is not None else ()
        tensors = [*self.module.parameters(), *self.module.buffers(), *leaves, *(t for s in state for t in s.values())]
        if self._accumulate:
            tensors += [p.grad for p in self.module.parameters()]
        found = [t for t in tensors if isinstance(t, torch.Tensor)]
        return sum({storage_key(t): t.untyped_storage().nbytes() for t in found}.values())


@dataclass(frozen=True)
class Trained:
    """What training some steps gave.

    Attributes:
        losses: Per step.
        peak_bytes: Static bytes, and the most that the allocator held above them over the second step, or the only one.
        step_s: Median seconds of the other steps; None if there are none.
    """

    losses: list[float]
    peak_bytes: int
    step_s: float | None


def train(trainer: Trainer, steps: int, tell: Callable[[int, float], None] = lambda *_: None) -> Trained:
    """Train ``steps`` steps; call ``tell`` with the number of each, from 1, and its loss."""
    losses, times, peak_bytes = [], [], 0
    for index in range(1, steps + 1):
        trainer.drop_gradients()
        if index == min(2, steps):
            static_bytes = trainer.static_bytes()
            measured = measure_peak(trainer.step, trainer.device)
            peak_bytes = static_bytes + measured.peak_bytes
            losses.append(measured.result)
        else:
            start = time.perf_counter()
            losses.append(trainer.step())
            times.append(time.perf_counter() - start)
        tell(index, losses[-1])
    return Trained(losses, peak_bytes, median(times) if times else None)


def scalar_loss(output: Any) -> torch.Tensor:
    """Return the loss within a module's output: itself, its ``loss``, or its first element, where that is a scalar.

    Raises:
        UsageError: there is no such scalar, or it needs no gradient.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, list | tuple) and output:
        found = output[0]
    if isinstance(found, torch.Tensor) and found.dim() == 0 and found.requires_grad:
        return found
    kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
    raise UsageError(
        "the step cannot be trained: it has no loss",
        why=f"the module returns {kind}, in which no scalar was found to start a backward from",
        try_="TrainingStep(..., loss_fn=...), which maps the output to a scalar",
    )
