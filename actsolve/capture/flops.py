"""Floating point operations of one ATen call, from the shapes of its fake tensors.

Conventions: a multiply-add counts 2, as everywhere in the field. A matrix product is 2*M*N*K, a bias is free. Attention counts
all T*T scores also where a causal mask lets a kernel skip half of them, as torch's own registry does. For all else an
element costs a small constant (`flop_constants`): such ops are bound by memory. Data movement is 0.

Formulas come from torch's `flop_registry`, except where it lacks one or is wrong: attention on CPU is missing, and the weight
gradient of a grouped convolution is counted without its groups (32 to 960 times too much in MobileNet). A call that
nothing is known about gives None, never 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import ceil, log2, prod
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from actsolve.capture.flop_constants import MOVES_DATA, PER_INPUT, PER_OUTPUT

_PRIMS_THAT_MOVE = frozenset({"broadcast_in_dim", "convert_element_type", "iota"})

Formula = Callable[[Sequence[Any], Any], int]
"""FLOPs from positional arguments (fake tensors and constants), defaults filled in, and the result."""


def node_flops(node: Node) -> int | None:
    """Return the FLOPs of one run of ``node``; None if nothing is known about its kernel.

    Args:
        node: A call of an ATen overload, with fake tensors in its and its arguments' ``meta["val"]``.
    """
    target = node.target
    if target is operator.getitem:
        return 0
    args = [_fake(arg) for arg in node.args]
    out = node.meta.get("val")
    if isinstance(target, torch._ops.OpOverload):
        return overload_flops(target, args, {k: _fake(v) for k, v in node.kwargs.items()}, out)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _from_torch(target, args, {k: _fake(v) for k, v in node.kwargs.items()}, out)
    return None


def overload_flops(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return the FLOPs of ``target(*args, **kwargs)`` whose result is ``out``; None if unknown. Tensors may be fake."""
    if target.namespace == "prims" and target._schema.name.removeprefix("prims::") in _PRIMS_THAT_MOVE:
        return 0
    if target.namespace == "aten":
        name = target._schema.name.removeprefix("aten::")
        plain = name[:-1] if name.endswith("_") else name  # the in-place form costs what the other does
        bound = _bound(target, args, kwargs)
        if (formula := _FORMULAS.get(plain)) is not None:
            return formula(bound, out)
        if (known := _from_table(plain, bound, out)) is not None:
            return known
    registered = _from_torch(target.overloadpacket, args, kwargs, out)
    return registered if registered is not None else _from_tags(target, args, out)


def _bound(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """``args`` with the positional arguments that came by keyword or were left to their default."""
    bound = list(args)
    for argument in target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        bound.append(kwargs.get(argument.name, argument.default_value))
    return bound


def _from_table(name: str, args: Sequence[Any], out: Any) -> int | None:
    if name in MOVES_DATA:
        return 0
    if name in PER_INPUT:
        return PER_INPUT[name] * _elements(args[:1])
    if name in PER_OUTPUT:
        return PER_OUTPUT[name] * _elements(_first(out))
    return None


def _from_torch(target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    formula = flop_registry.get(target)
    if formula is None:
        return None
    flops: int = formula(*args, **kwargs, out_val=out)
    return int(flops)


def _from_tags(target: torch._ops.OpOverload, args: Sequence[Any], out: Any) -> int | None:
    if torch.Tag.pointwise in target.tags:
        return max((_elements([t]) for t in tree_leaves(out)), default=0)
    reduction = getattr(torch.Tag, "reduction", None)  # since torch 2.12
    if reduction is not None and reduction in target.tags:
        return _elements(args[:1])
    return None


def _fake(arg: Any) -> Any:
    """``arg`` with each fx node replaced by its value."""
    if isinstance(arg, Node):
        return arg.meta.get("val")
    if isinstance(arg, (list, tuple)):
        return [_fake(a) for a in arg]
    return arg


def _elements(values: Any) -> int:
    return sum(int(leaf.numel()) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _first(out: Any) -> Any:
    """The main result of a call: its output, or the first of several that is there."""
    return next((leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), None)


def _shape(tensor: torch.Tensor) -> list[int]:
    return [int(n) for n in tensor.shape]


# -- matrix and vector products --------------------------------------------------------------------------------------


def _mv(args: Sequence[Any], out: Any) -> int:
    return 2 * _elements(args[0])


def _addmv(args: Sequence[Any], out: Any) -> int:
    return 2 * _elements(args[1])


def _addbmm(args: Sequence[Any], out: Any) -> int:
    (b, m, k), (_, _, n) = _shape(args[1]), _shape(args[2])
    return 2 * b * m * k * n


def _outer(args: Sequence[Any], out: Any) -> int:
    return 2 * _elements(out)  # addr: a multiply-add for each element of the outer product


def _linear(args: Sequence[Any], out: Any) -> int:
    return 2 * _elements(out) * _shape(args[1])[-1]


def _linear_backward(args: Sequence[Any], out: Any) -> int:
    _source, grad, weight, mask = args[:4]
    return 2 * _elements(grad) * _shape(weight)[-1] * (int(mask[0]) + int(mask[1])) + _elements(grad) * int(mask[2])


def _int_mm(args: Sequence[Any], out: Any) -> int:
    return 2 * _elements(out) * _shape(args[0])[-1]


def _cdist(args: Sequence[Any], out: Any) -> int:
    return 3 * _elements(out) * _shape(args[0])[-1]


def _recurrent(weights: slice, times: int) -> Formula:
    """Layers of an RNN: every weight does one multiply-add for each token; the backward does two."""

    def flops(args: Sequence[Any], out: Any) -> int:
        tokens: int = prod(_shape(args[0])[:-1])
        return times * 2 * tokens * _elements(args[weights])

    return flops


def _fourier(each: float) -> Formula:
    """The usual count for an n-point transform: 5 n log2 n, and half of it where one side is real."""

    def flops(args: Sequence[Any], out: Any) -> int:
        larger = out if _elements(out) >= _elements(args[0]) else args[0]
        points = prod(_shape(larger)[d] for d in args[1])
        return round(each * _elements(larger) * log2(max(2, points)))

    return flops


# -- convolution -----------------------------------------------------------------------------------------------------


def _conv_backward(args: Sequence[Any], out: Any) -> int:
    """Each of the two products costs what the forward does; the bias gradient is a sum. Honours the output mask."""
    grad, source, weight, _bias, _stride, _padding, _dilation, transposed, _out_padding, _groups, mask = args
    forward = int(conv_flop_count(_shape(source), _shape(weight), _shape(grad), transposed=transposed))
    return forward * (int(mask[0]) + int(mask[1])) + _elements(grad) * int(mask[2])


# -- attention -------------------------------------------------------------------------------------------------------


def _attention(args: Sequence[Any], out: Any) -> int:
    return int(sdpa_flop_count(*map(_shape, args[:3])))  # type: ignore[no-untyped-call]


def _attention_backward(args: Sequence[Any], out: Any) -> int:
    return int(sdpa_backward_flop_count(*map(_shape, args[:4])))  # type: ignore[no-untyped-call]


# -- windows, losses and scatters ------------------------------------------------------------------------------------


def _window(dims: int) -> Formula:
    """Pooling: each output element reads one window."""

    def flops(args: Sequence[Any], out: Any) -> int:
        return _elements(_first(out)) * _window_size(args[1], dims)

    return flops


def _window_backward(dims: int) -> Formula:
    """Average pooling's gradient: each incoming element is spread over one window."""

    def flops(args: Sequence[Any], out: Any) -> int:
        return _elements(args[0]) * _window_size(args[2], dims)

    return flops


def _window_size(kernel: Any, dims: int) -> int:
    sizes = [kernel] if isinstance(kernel, int) else list(kernel)
    return int(prod(sizes * dims if len(sizes) == 1 else sizes))


def _per_element_of(position: int) -> Formula:
    return lambda args, out: _elements(args[position])


def _rows(args: Sequence[Any], out: Any) -> int:
    """Rows of a table added up: one addition for each element that is looked up."""
    return _elements(args[1]) * _shape(args[0])[-1]


def _renormed_rows(args: Sequence[Any], out: Any) -> int:
    return 3 * _rows(args, out)


def _accumulated(args: Sequence[Any], out: Any) -> int:
    """``index_put``: an addition for each element that comes in, if it accumulates."""
    return _elements(args[2]) if args[3] else 0


def _sort(args: Sequence[Any], out: Any) -> int:
    """Comparisons, n log2 n along a dimension of unknown place: the longest, so that it is never too few."""
    longest = max(_shape(args[0]), default=1)
    return _elements(args[0]) * max(1, ceil(log2(max(2, longest))))


_FORMULAS: dict[str, Formula] = {
    "mv": _mv,
    "dot": _mv,
    "vdot": _mv,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "addr": _outer,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "mkldnn_linear": _linear,
    "_int_mm": _int_mm,
    "mkldnn_rnn_layer": _recurrent(slice(1, 3), 1),
    "mkldnn_rnn_layer_backward": _recurrent(slice(1, 3), 2),
    "_cudnn_rnn": _recurrent(slice(1, 2), 1),
    "_cudnn_rnn_backward": _recurrent(slice(1, 2), 2),
    "_fft_c2c": _fourier(5),
    "_fft_r2c": _fourier(2.5),
    "_fft_c2r": _fourier(2.5),
    "_cdist_forward": _cdist,
    "_euclidean_dist": _cdist,
    "convolution_backward": _conv_backward,
    "convolution_backward_overrideable": _conv_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_attention_math": _attention,
    "_scaled_dot_product_attention_math_for_mps": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "avg_pool1d": _window(1),
    "avg_pool2d": _window(2),
    "avg_pool3d": _window(3),
    "max_pool2d_with_indices": _window(2),
    "max_pool3d_with_indices": _window(3),
    "avg_pool2d_backward": _window_backward(2),
    "avg_pool3d_backward": _window_backward(3),
    "nll_loss_forward": _per_element_of(1),
    "nll_loss2d_forward": _per_element_of(1),
    "nll_loss_backward": _per_element_of(2),
    "nll_loss2d_backward": _per_element_of(2),
    "index_add": _per_element_of(3),
    "index_put": _accumulated,
    "_index_put_impl": _accumulated,
    "_unsafe_index_put": _accumulated,
    "scatter_add": _per_element_of(3),
    "scatter_reduce": _per_element_of(3),
    "index_reduce": _per_element_of(3),
    "segment_reduce": _per_element_of(0),
    "_embedding_bag": _rows,
    "_embedding_bag_forward_only": _rows,
    "embedding_renorm": _renormed_rows,
    "_unsafe_masked_index_put_accumulate": _per_element_of(3),
    "sort": _sort,
    "topk": _sort,
    "argsort": _sort,
    "msort": _sort,
    "kthvalue": _sort,
    "unique_dim": _sort,
    "_unique2": _sort,
}
