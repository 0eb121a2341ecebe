"""How kernels lay out their results where torch's meta functions, which a trace relies on, say otherwise.

Batch norm on a CPU returns contiguous memory for a transposed input, a fold allocates its padding too, an LSTM layer has a
workspace of unknown size, the statistics of a bf16 layer norm with fp32 weights are fp32. A trace that believes otherwise plans
with wrong sizes, and may hold a ``view`` that fails, or an ``as_strided`` that reads other elements. Which kernels do so differs
between devices and versions. So each kernel of a trace is run once (`actsolve.cost.layout_check`), and where its result differs
this is noted here; the next trace has it right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Layout:
    """Where a tensor's elements lie, how many bytes its storage has, and of which dtype they are; None for the traced one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    dtype: torch.dtype | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        nbytes = int(tensor.untyped_storage().nbytes())
        return Layout(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), nbytes, tensor.dtype)

    def differs(self, other: Layout) -> bool:
        """Whether it matters: strides of dimensions of size 1, and of empty tensors, do not."""
        if self.shape != other.shape or self.storage_bytes != other.storage_bytes or self.dtype not in (None, other.dtype):
            return True
        strides = zip(self.shape, self.stride, other.stride, strict=True)
        return 0 not in self.shape and (self.offset != other.offset or any(a != b for size, a, b in strides if size > 1))


Noted = list[Layout | None]
"""Per tensor of a result, in order: its real layout, or None where the meta function is right."""

_NOTED: dict[Any, dict[str, Noted]] = {}  # kernel -> description of the call -> layouts


def note(kernel: Any, call: str, layouts: Noted) -> None:
    """Remember the real layouts of the results of a call, described by `describe_call`."""
    _NOTED.setdefault(kernel, {})[call] = layouts


def corrected(kernel: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return ``result``, the fake tensors of a call, as the kernel lays it out."""
    noted = _NOTED[kernel].get(describe_call(kernel, args, kwargs)) if kernel in _NOTED else None
    if noted is None:
        return result
    leaves, spec = tree_flatten(result)
    tensors = iter(noted)
    return tree_unflatten([_laid_out(leaf, next(tensors)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def _laid_out(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    if layout is None:
        return tensor
    with tensor.fake_mode:  # type: ignore[attr-defined]
        made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype or tensor.dtype, device=tensor.device)
        made.untyped_storage().resize_(layout.storage_bytes)
        return made.as_strided(layout.shape, layout.stride, layout.offset) if layout.offset else made


def describe_call(kernel: Any, args: Any, kwargs: Any) -> str:
    """Return a text that is equal for calls that cost the same: kernel, shapes, strides, dtypes, devices and constants."""

    def describe(arg: Any) -> str:
        if isinstance(arg, torch.Tensor):
            dtype = str(arg.dtype).removeprefix("torch.")
            return f"{dtype}{list(arg.shape)}@{list(arg.stride())}:{arg.device}"
        if isinstance(arg, (list, tuple)):
            return "[" + ",".join(map(describe, arg)) + "]"
        return repr(arg)

    described = [describe(a) for a in args] + [f"{k}={describe(v)}" for k, v in kwargs.items()]
    return f"{kernel}({', '.join(described)})"
