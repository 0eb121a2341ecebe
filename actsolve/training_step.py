"""What a target's factory returns: one training step, ready to be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


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
    """

    model: torch.nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
