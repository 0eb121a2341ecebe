"""What a call of a region is given and returns, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actsolve.capture.answers import Answer
from actsolve.capture.settings import SCALARS
from actsolve.capture.structure import Structure
from actsolve.capture.torch_internals import storage_key


@dataclass(frozen=True)
class Taken:
    """What one run of a region takes.

    Attributes:
        seconds: Of a run.
        peak_bytes: The most that it has allocated at once, its results included.
        flops: Of all kernels that are known, as those of other ops (`actsolve.capture.flops`).
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Learned:
    """What is known of a region's call.

    Attributes:
        structure: Of what it returns.
        constants: What of that is no tensor, by position.
        differentiable: Which of its tensors require a gradient.
        strides: Of the gradients that its backward returns, by the position of the tensor.
        uses: How often it reads each tensor, as far as its gradient is a sum of so many.
        forward: What its forward takes.
        backward: What its backward takes.
    """

    structure: Structure
    constants: dict[int, Any]
    differentiable: tuple[bool, ...]
    strides: dict[int, tuple[int, ...]]
    uses: dict[int, int]
    forward: Taken
    backward: Taken

    def restored(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the module returns, with ``tensors`` for its tensors."""
        rest = iter(tensors)
        n_leaves = self.structure.n_leaves
        return self.structure.restore([self.constants[i] if i in self.constants else next(rest) for i in range(n_leaves)])


class Returned(list[torch.Tensor]):
    """Tensors that a region returns, and a token: the states that the generators had.

    Attributes:
        answer: All else that Python goes on with: shapes, what is no tensor, what requires a gradient, what shares memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], answer: Answer) -> None:
        super().__init__(tensors)
        self.answer = answer


@dataclass(frozen=True)
class Constant:
    """An input that is no tensor."""

    value: Any


@dataclass(frozen=True)
class Called:
    """What a region returned.

    Attributes:
        leaves: Tensors, and what is none.
        structure: How they were nested.
        flat: The tensors that it was given.
        entries: What autograd's graph began from, for each.
        changed: Which of them are copies, of its own to write to.
    """

    leaves: list[Any]
    structure: Structure
    flat: list[torch.Tensor]
    entries: list[Any]
    changed: frozenset[int]

    @property
    def shared(self) -> tuple[int, ...]:
        """For each tensor how many of those before it, given ones included, are in the same memory."""
        keys = [storage_key(t) for i, t in enumerate(self.flat) if i not in self.changed]
        found = []
        for tensor in (t for t in self.leaves if isinstance(t, torch.Tensor)):
            found.append(keys.count(storage_key(tensor)))
            keys.append(storage_key(tensor))
        return tuple(found)

    @property
    def answer(self) -> tuple[Any, ...]:
        """All that Python goes on with."""
        leaves = tuple(
            (tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad)
            if isinstance(t, torch.Tensor)
            else (t if type(t) in SCALARS else type(t).__name__)
            for t in self.leaves
        )
        return (*leaves, self.shared, str(self.structure.key))


def own_memory(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors``, none of which is in memory of another or of one of ``others``."""
    taken = set(map(storage_key, others))
    own = []
    for tensor in tensors:
        plain = tensor.detach() if tensor.requires_grad else tensor
        if storage_key(plain) in taken:
            plain = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device).copy_(plain)
        taken.add(storage_key(plain))
        own.append(plain)
    return own
