"""Gradients that are added to those that are there as soon as they are made.

Torch's AOT backward returns all gradients at its end, where autograd adds them to ``.grad``: until then a step that accumulates
holds both. A planned backward adds each when it is done with it, as autograd would.
"""

from __future__ import annotations

import torch

from actsolve.capture.torch_engine import accumulates_into


def accumulated(index: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add ``gradient`` to the ``.grad`` of a leaf; return it where that is left to autograd, else None.

    It is left to autograd where there is no gradient yet or another layout, where a hook wants to see the gradient, and where it
    is not accumulated at all but returned, as by ``torch.autograd.grad``.

    Args:
        index: Of the leaf among the inputs of the planned step.
        gradient: Of this backward.
    """
    leaf = accumulates_into(index)
    if leaf is None or leaf.grad is None or not _alike(leaf.grad, gradient):
        return gradient
    leaf.grad.add_(gradient)
    return None


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout is b.layout is torch.strided and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
