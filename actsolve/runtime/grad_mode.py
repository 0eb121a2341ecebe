"""Kernels that look at autograd's mode: they are called as in a training step, though autograd does not record them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LOOK_AT_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})  # makes the workspace of its backward only then


def looks_at_grad_mode(kernel: Any) -> bool:
    """Whether ``kernel`` gives something else under ``no_grad``."""
    return kernel in _LOOK_AT_GRAD_MODE


def in_training(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``kernel`` with gradients enabled, below autograd."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return kernel(*args, **kwargs)
