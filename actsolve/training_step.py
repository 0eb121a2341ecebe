"""What a target's factory returns: one training step, ready to be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from actsolve.eager_parts import Parts, is_called
from actsolve.errors import UsageError


@dataclass
class TrainingStep:
    """One training step: a module, the inputs of one batch, and a loss.

    Args:
        model: The module to train, on the device and in the mode (train or
            eval) in which it is to be trained.
        args: Positional inputs of one batch, as ``model(*args, **kwargs)``.
        kwargs: Keyword inputs of one batch.
        loss_fn: Maps the module's output to a 0-d tensor. With it the loss is
            part of the optimized step and a call returns ``(loss, output)``;
            without it the module's own output is taken as it is, and memory
            outside the module is not budgeted.
        eager: Names of what is not traced but left in eager (`actsolve.eager_parts`).
    """

    model: torch.nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    eager: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """What it runs on: the first device among its parameters, buffers and inputs that is no CPU."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *tree_leaves((self.args, self.kwargs))]
        devices = (t.device for t in tensors if isinstance(t, torch.Tensor))
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def verify(self) -> None:
        """Raise a UsageError if a field is not of its type: the trace would fail on it far from where it was given."""
        for name, right, try_ in (
            ("model", isinstance(self.model, torch.nn.Module), "a torch.nn.Module; a function can be the forward of one"),
            ("args", isinstance(self.args, Sequence) and not isinstance(self.args, str), "a tuple of inputs: args=(x,)"),
            ("kwargs", isinstance(self.kwargs, Mapping), 'a dict of inputs: kwargs={"mask": mask}'),
            ("loss_fn", self.loss_fn is None or callable(self.loss_fn), "a function of the model's output, or None"),
        ):
            if not right:
                given = getattr(self, name)
                kind = f"that of a class, {given.__name__}" if isinstance(given, type) else type(given).__name__
                raise UsageError(f"cannot use this {name}", why=f"its type is {kind}", try_=try_)
        parts = Parts(self.model, self.loss_fn)
        if not isinstance(self.eager, tuple) or any(not isinstance(p, str) or parts.at(p) is None for p in self.eager):
            named = sorted(path for path, module in parts.named_modules() if path and is_called(module))
            raise UsageError(
                f"cannot use eager={self.eager!r}",
                why="it is not a list of names of submodules or methods that are called, or of loss_fn",
                try_=f"some of {', '.join(named[:3])}, ...",
            )
