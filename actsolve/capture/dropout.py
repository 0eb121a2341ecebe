"""Dropout as eager PyTorch computes it on a CPU, where torch's trace of it differs in the last bit.

Traced, ``dropout`` becomes ``native_dropout``, which multiplies by ``1 / (1 - p)`` rounded once; eager divides a mask of ones by
``1 - p`` in the tensor's own precision. For most p both give the same number, and ``native_dropout`` is traced, for its mask
takes one byte an element. For the rest (0.15 in float32, and 1, where eager draws nothing) the trace is of what eager does.
"""

from __future__ import annotations

from functools import cache

import torch

from actsolve.capture.torch_internals import real_tensors

aten = torch.ops.aten


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``aten.dropout``, in the form to be traced."""
    if train and 0 < p < 1 and x.numel() > 0 and (x.device.type != "cpu" or same_scale(p, x.dtype)):
        output: torch.Tensor = aten.native_dropout.default(x, p, train)[0]
        return output
    return aten.dropout.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, x, p, train)  # type: ignore[no-any-return]


@cache
def same_scale(probability: float, dtype: torch.dtype) -> bool:
    """Whether multiplying by eager's mask, one divided by ``1 - p`` in ``dtype``, gives what ``native_dropout`` gives.

    In half precisions the product is what is rounded, so a full binade of mantissas is tried.
    """
    with real_tensors():
        scale = torch.ones(1, dtype=dtype).div_(1 - probability)
        mantissas = torch.linspace(1, 2, 257, dtype=torch.float32).to(dtype)
        return torch.equal(mantissas * scale, mantissas.mul(1 / (1 - probability)))
