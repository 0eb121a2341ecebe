"""Whether two modules train alike, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch.utils import _pytree as pytree

from actsolve.runtime.trainer import Trainer

Tensors = Sequence[torch.Tensor | None]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest_difference(eager: Trainer, other: Trainer, steps: int = 3) -> float | None:
    """Train both from the random state of now; return the largest relative difference, or None where all bits are equal.

    Compared after each step: the loss, all outputs, gradients, parameters, buffers, and the random state. Each kind is held
    against its own largest magnitude: a gradient that is all rounding, such as a bias's before a batch norm, would say nothing.

    Args:
        eager: The original, on parameters of its own that equal those of `other`.
        other: What should train alike.
        steps: Optimizer steps.
    """
    largest, equal = 0.0, True
    for _ in range(steps):
        before = _random_state(eager.device)
        ours = _observed(eager)
        _set_random_state(before)
        theirs = _observed(other)
        for kind in ours:
            if not all(bitwise_equal(a, b) for a, b in zip(ours[kind], theirs[kind], strict=True)):
                equal = False
                largest = max(largest, relative_difference(ours[kind], theirs[kind]))
    return None if equal else largest


def bitwise_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both are None, or of equal shape, dtype and bits: NaN equals the same NaN, and 0 is not -0."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = _BITS[a.element_size()]
    return torch.equal(a.detach().contiguous().view(bits), b.detach().contiguous().view(bits))


def relative_difference(a: Tensors, b: Tensors) -> float:
    """Return the largest difference over the largest magnitude of ``a``; 1 where they cannot be compared."""
    difference = magnitude = 0.0
    for x, y in zip(a, b, strict=True):
        if x is None and y is None:
            continue
        if x is None or y is None or x.shape != y.shape or not (x.is_floating_point() and y.is_floating_point()):
            if bitwise_equal(x, y):
                continue
            return 1.0
        if x.numel():
            difference = max(difference, float((x.double() - y.double()).abs().nan_to_num(inf).max()))
            magnitude = max(magnitude, float(x.double().abs().max()))
    if difference == inf or magnitude == inf:
        return 1.0
    return difference / magnitude if magnitude > 0 else min(1.0, difference)


def _observed(trainer: Trainer) -> dict[str, Tensors]:
    """Train one step; return copies of all that it left, by kind."""
    trainer.drop_gradients()
    loss, result = trainer.forward()
    outputs = [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [None if p.grad is None else p.grad.clone() for p in trainer.module.parameters()]
    trainer.update()
    return {
        "loss": [loss.detach().clone()],
        "outputs": outputs,
        "gradients": gradients,
        "parameters": [p.detach().clone() for p in trainer.module.parameters()],
        "buffers": [b.clone() for b in trainer.module.buffers()],
        "random state": _random_state(trainer.device),
    }


def _random_state(device: torch.device) -> Tensors:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else ())]


def _set_random_state(state: Tensors) -> None:
    for saved, set_state in zip(state, (torch.set_rng_state, torch.cuda.set_rng_state), strict=False):
        assert saved is not None
        set_state(saved)
