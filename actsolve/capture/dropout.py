"""Dropout as eager PyTorch computes it on a CPU, where torch's trace of it differs in the last bit or in what is dropped.

Traced, ``dropout`` becomes ``native_dropout``, which multiplies by ``1 / (1 - p)`` rounded once; eager divides a mask of ones by
``1 - p`` in the tensor's own precision. For most p both give the same number, and ``native_dropout`` is traced, for its mask
takes one byte an element. For the rest (0.15 in float32, and 1, where eager draws nothing) the trace is of what eager does.

Eager draws a mask in the order of memory. A trace has ``bernoulli_`` as ``bernoulli``, which makes a contiguous mask and so draws
in another order where the input is not contiguous; the mask of ``native_dropout`` is right in any layout, and is used instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.fx import GraphModule

from actsolve.capture.torch_internals import annotation, real_tensors
from actsolve.errors import CaptureError

aten = torch.ops.aten


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``aten.dropout``, in the form to be traced."""
    if not _drops(x, p, train):
        return _eager(aten.dropout.default, x, p, train)
    if x.device.type != "cpu" or same_scale(p, x.dtype):
        output: torch.Tensor = aten.native_dropout.default(x, p, train)[0]
        return output
    return x * _scaled_mask(x, p)


def dropout_(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``aten.dropout_``, in the form to be traced."""
    if not _drops(x, p, train):
        return _eager(aten.dropout_.default, x, p, train)
    return x.mul_(_scaled_mask(x, p))


def _drops(x: torch.Tensor, p: float, train: bool) -> bool:
    return train and 0 < p < 1 and x.numel() > 0


def _scaled_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return what eager multiplies by."""
    mask: torch.Tensor = aten.native_dropout.default(x.detach(), p, True)[1]
    return mask.to(x.dtype).div_(1 - p)


def _eager(kernel: torch._ops.OpOverload, *args: object) -> torch.Tensor:
    output: torch.Tensor = kernel._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)
    return output


KERNELS = {aten.dropout.default: dropout, aten.dropout_.default: dropout_}


def refuse_other_layouts(joint: GraphModule) -> None:
    """Refuse any other mask (alpha dropout's) for a tensor that is not contiguous.

    Raises:
        CaptureError: there is one.
    """
    for node in joint.graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        value = node.args[0].meta["val"]
        if not value.is_contiguous():
            origin = annotation(node)
            raise CaptureError(
                "cannot trace a random mask bitwise as eager draws it",
                where=origin.source if origin is not None else None,
                why=f"its tensor is not contiguous (strides {tuple(value.stride())})",
                try_='contiguous inputs, plain dropout, or on_error="original"',
            )


@cache
def same_scale(probability: float, dtype: torch.dtype) -> bool:
    """Whether multiplying by eager's mask, one divided by ``1 - p`` in ``dtype``, gives what ``native_dropout`` gives.

    In half precisions the product is what is rounded, so a full binade of mantissas is tried.
    """
    with real_tensors():
        scale = torch.ones(1, dtype=dtype).div_(1 - probability)
        mantissas = torch.linspace(1, 2, 257, dtype=torch.float32).to(dtype)
        return torch.equal(mantissas * scale, mantissas.mul(1 / (1 - probability)))
