"""What a compiled step really takes: run once on its own inputs, forward and backward.

The parameters are used as they are, put back if the step writes into them, and keep their gradients; all other inputs are copied,
for the step may write into them, and the random state is put back. So it takes the memory of a real step without the optimizer's
state, and a copy of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from actsolve.capture.generators import Drawn, own_generators
from actsolve.capture.torch_internals import n_mutations, storage_key
from actsolve.inductor.torch_inductor import real_run
from actsolve.runtime.exactness import bitwise_equal, relative_difference
from actsolve.runtime.memory_events import measure_peak

Tensors = list[torch.Tensor | None]


@dataclass(frozen=True)
class Trial:
    """What one run took and gave.

    Attributes:
        peak_bytes: The most that was allocated at once above the inputs.
        end_bytes: What is left at its end: outputs and gradients.
        results: Outputs; gradients; the inputs that it may have written into; states of the random generators: on the CPU.
    """

    peak_bytes: int
    end_bytes: int
    results: tuple[Tensors, ...]

    def difference(self, other: Trial) -> float | None:
        """Return the largest relative difference between the results of two runs, or None where all bits are equal.

        Each kind is held against its own largest magnitude.
        """
        kinds = list(zip(self.results, other.results, strict=True))
        if all(bitwise_equal(a, b) for ours, theirs in kinds for a, b in zip(ours, theirs, strict=True)):
            return None
        return max(relative_difference(ours, theirs) for ours, theirs in kinds)


def trial(compiled: Callable[..., Any], inputs: Sequence[Any]) -> Trial:
    """Run forward and backward of a compiled step, twice: the first run may compile, the second is measured."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    drawn = Drawn()
    with real_run(), _put_back([t for t in tensors if t.requires_grad and t.is_leaf]), torch.enable_grad():
        drawn.note(own_generators())
        for _ in range(2):
            given, leaves = _given(inputs)
            try:
                measured = measure_peak(lambda given=given, leaves=leaves: _step(compiled, given, leaves), device)  # type: ignore[misc]
                states = [generator.get_state() for generator in own_generators()]
            finally:
                drawn.put_back()
            written: Tensors = [t for t in given if isinstance(t, torch.Tensor) and not t.requires_grad]
            results = tuple(_on_cpu(kind) for kind in (*measured.result, written, states))
        return Trial(measured.peak_bytes, measured.end_bytes, results)


def _on_cpu(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    return [None if t is None else t.detach().cpu().clone() for t in tensors]


@contextmanager
def _put_back(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Give tensors that are written into within this context what they held before; it is kept on the host meanwhile."""
    with torch.no_grad():
        kept = [(t, n_mutations(t), t.detach().to("cpu", copy=True)) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before, held in kept:
                if n_mutations(tensor) != before:
                    tensor.copy_(held)


def _given(inputs: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Return inputs of a run, and the leaves that get gradients.

    Leaves share the memory of the user's: parameters. What another graph has made is no leaf here either, for the step may write
    into it; it is copied as all that needs no gradient is.
    """
    copies: dict[int, Any] = {}
    given: list[Any] = []
    leaves: list[torch.Tensor] = []
    for one in inputs:
        if not isinstance(one, torch.Tensor):
            given.append(one)
        elif one.requires_grad:
            leaf = one.detach() if one.is_leaf else one.detach().clone()
            leaves.append(leaf.requires_grad_())
            given.append(leaf if one.is_leaf else leaf.clone())
        else:
            if storage_key(one) not in copies:
                copies[storage_key(one)] = one.untyped_storage().clone()  # type: ignore[no-untyped-call]
            shared = torch.empty(0, dtype=one.dtype, device=one.device)
            given.append(shared.set_(copies[storage_key(one)], one.storage_offset(), one.size(), one.stride()))
    return given, leaves


def _step(compiled: Callable[..., Any], given: list[Any], leaves: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    outputs: Tensors = [t for t in compiled(*given) if isinstance(t, torch.Tensor)]
    started = [t for t in outputs if t is not None and t.requires_grad]
    tangents = [torch.ones_like(t) if t.dim() == 0 else torch.randn_like(t) for t in started]
    gradients = torch.autograd.grad(started, leaves, tangents, allow_unused=True)
    return outputs, list(gradients)
