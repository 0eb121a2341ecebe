"""What a call of a region is given and returns, and what is known of it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from actsolve.capture.answers import Answer
from actsolve.capture.settings import SCALARS
from actsolve.capture.structure import Structure
from actsolve.capture.torch_internals import storage_key
from actsolve.errors import CaptureError


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

    def uses(self, leaves: Sequence[torch.Tensor]) -> tuple[dict[int, int], list[TensorWeakRef]]:
        """Return how many edges of autograd's graph lead to each tensor, and the other leaves of that graph."""
        at: dict[Any, int] = {get_gradient_edge(leaf).node: i for i, leaf in enumerate(leaves) if leaf.requires_grad}
        inputs = {entry: i for i, entry in enumerate(self.entries) if entry is not None}
        at |= inputs
        uses: dict[int, int] = {}
        others: dict[Any, TensorWeakRef] = {}
        seen: set[Any] = set()
        pending: list[Any] = []

        def reach(node: Any) -> None:
            if node in at:
                uses[at[node]] = uses.get(at[node], 0) + 1
            elif getattr(node, "variable", None) is not None:
                others[node] = TensorWeakRef(node.variable)
            if node is not None and node not in inputs:
                pending.append(node)

        for tensor in self.leaves:
            if isinstance(tensor, torch.Tensor):
                reach(tensor.grad_fn)
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                for following, _ in node.next_functions:
                    reach(following)
        return uses, list(others.values())


def uses_hidden(path: str, shape: tuple[int, ...], try_: str) -> CaptureError:
    """The error that a tensor is trained that is neither given to the region nor made in it."""
    return CaptureError(
        f"{path}, which is left in eager, uses a tensor of shape {shape} that is not its own",
        why="it requires a gradient, which would be lost",
        try_=try_,
    )


def refuse_hidden(path: str, others: Sequence[TensorWeakRef]) -> None:
    """Raise if one of ``others``, leaves of autograd's graph that were not given, is still there: the region did not make it."""
    if any(ref() is not None for ref in others):
        gc.collect()
    if hidden := [tuple(t.shape) for ref in others if (t := ref()) is not None]:
        raise uses_hidden(path, hidden[0], "a module around it that holds this tensor, to be left in eager")


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
