"""A real call for an fx node: tensors of exactly the shapes, strides, storages, dtypes and devices of its fake ones.

What a tensor holds matters where it decides how long a kernel runs or whether it runs at all: indices are spread evenly over
what they index, probabilities lie in [0, 1], pooling gets the positions that pooling finds. All else is normal noise, coin
flips for masks and 0 for integers. Tensors that share a storage in the step share one here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from actsolve.capture.torch_internals import storage_key
from actsolve.runtime.kernels import kernel_of

Fill = Callable[[torch.Tensor], None]
"""Writes the whole of a flat tensor."""

_BLOCK = 1 << 18
"""Elements that are drawn; the rest repeats them, for a draw is much slower than a copy."""


@dataclass
class SampleCall:
    """A kernel with arguments to run it on.

    Attributes:
        target: The kernel.
        args: Positional arguments.
        kwargs: Keyword arguments.
        written: Arguments that the kernel writes to, each with its first content.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __call__(self) -> Any:
        return self.target(*self.args, **self.kwargs)

    def reset(self) -> None:
        """Give arguments that the kernel writes their first content back, so that runs do not pile up."""
        for tensor, content in self.written:
            tensor.copy_(content)


def sample_call(node: Node) -> SampleCall:
    """Return a call of ``node``'s kernel on real tensors.

    Raises:
        TypeError: its target or an argument is of a kind that cannot be made up.
        RuntimeError: a tensor cannot be made: no memory, or a dtype that cannot be filled.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise TypeError(f"{target} is no ATen overload")
    samples = _Samples()
    parameters = target._schema.arguments
    named = {p.name: a for p, a in zip(parameters, node.args, strict=False)} | dict(node.kwargs)
    fills = _fills(target, {name: _fake(arg) for name, arg in named.items()})
    real = {name: samples.real(arg, fills.get(name)) for name, arg in named.items()}
    _find_pool_positions(target, real)
    args = tuple(real[p.name] for p in parameters[: len(node.args)])
    kwargs = {name: real[name] for name in node.kwargs}
    written = [p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write]
    tensors = [real[name] for name in written if isinstance(real.get(name), torch.Tensor)]
    return SampleCall(kernel_of(target, node.args), args, kwargs, [(tensor, tensor.clone()) for tensor in tensors])


def storage_bytes(node: Node) -> int:
    """Return the bytes of the distinct storages that a call of ``node`` reads and makes."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _fake(arg: Any) -> Any:
    if isinstance(arg, Node):
        return arg.meta.get("val")
    if isinstance(arg, (list, tuple)):
        return [_fake(a) for a in arg]
    return arg


class _Samples:
    """Real tensors for fake ones, each storage made once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def real(self, arg: Any, fill: Fill | list[Fill | None] | None) -> Any:
        """``arg`` with each node in it replaced by a real tensor."""
        if isinstance(arg, Node):
            value = arg.meta.get("val")
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"argument {arg.name} is no tensor")
            return self._tensor(value, None if isinstance(fill, list) else fill)
        if isinstance(arg, (list, tuple)):
            fills = fill if isinstance(fill, list) else [fill] * len(arg)
            return [self.real(a, f) for a, f in zip(arg, fills, strict=True)]
        return arg

    def _tensor(self, fake: torch.Tensor, fill: Fill | None) -> torch.Tensor:
        key = storage_key(fake)
        if key not in self._storages:
            size = fake.untyped_storage().nbytes()
            flat = torch.empty(-(-size // fake.element_size()), dtype=fake.dtype, device=fake.device)
            (fill or _fill_any)(flat)
            self._storages[key] = flat.untyped_storage()
        made = torch.empty(0, dtype=fake.dtype, device=fake.device)
        shape, stride = [int(n) for n in fake.shape], [int(n) for n in fake.stride()]
        return made.set_(self._storages[key], int(fake.storage_offset()), shape, stride)


# -- what tensors hold -------------------------------------------------------------------------------------------------


def _fill_any(flat: torch.Tensor) -> None:
    if flat.dtype.is_complex:
        _repeat(torch.view_as_real(flat).flatten(), lambda block, g: block.normal_(generator=g))
    elif flat.dtype.is_floating_point:
        _repeat(flat, lambda block, g: block.copy_(torch.randn(len(block), device=block.device, generator=g)))
    elif flat.dtype == torch.bool:
        _repeat(flat, lambda block, g: block.bernoulli_(0.5, generator=g))
    else:
        flat.zero_()


def _repeat(flat: torch.Tensor, draw: Callable[[torch.Tensor, torch.Generator], Any]) -> None:
    """Draw the first block of ``flat`` and copy it over the rest, with a generator of our own: the step's is left alone."""
    block = flat[:_BLOCK]
    draw(block, torch.Generator(flat.device).manual_seed(0))
    for start in range(_BLOCK, len(flat), _BLOCK):
        rest = flat[start : start + _BLOCK]
        rest.copy_(block[: len(rest)])


def _below(bound: int) -> Fill:
    """Integers spread evenly over [0, bound); a mask is left to chance."""

    def fill(flat: torch.Tensor) -> None:
        if flat.dtype == torch.bool or flat.dtype.is_floating_point:
            _fill_any(flat)
        else:
            _repeat(flat, lambda block, g: block.random_(0, max(1, bound), generator=g))

    return fill


def _rising_to(total: int) -> Fill:
    """Where equal stretches of [0, total] start: cumulative lengths, or the offsets of bags."""

    def fill(flat: torch.Tensor) -> None:
        flat.copy_(torch.linspace(0, total, len(flat), device=flat.device))

    return fill


def _fill_unit(flat: torch.Tensor) -> None:
    _repeat(flat, lambda block, g: block.uniform_(generator=g))


def _fill_ones(flat: torch.Tensor) -> None:
    if flat.dtype.is_floating_point:
        _fill_any(flat)
    else:
        flat.fill_(1)


_INDEX_ALONG_DIM = frozenset(
    "gather index_add index_copy index_fill index_reduce index_select scatter scatter_add scatter_reduce".split()  # noqa: SIM905
)
_DIVISIONS = frozenset({"div", "floor_divide", "fmod", "remainder"})
_PROBABILITIES = frozenset({"bernoulli", "binary_cross_entropy", "binary_cross_entropy_backward", "multinomial"})
_CUMULATIVE = frozenset({"cu_seqlens_k", "cu_seqlens_q", "cum_seq_k", "cum_seq_q"})


def _fills(target: torch._ops.OpOverload, named: dict[str, Any]) -> dict[str, Fill | list[Fill | None]]:
    """Return how to fill those arguments of ``target`` that random noise or zeros would not do for."""
    name = target._schema.name.removeprefix("aten::").rstrip("_")
    source: Any = named.get("self")
    if name == "embedding":
        return {"indices": _below(named["weight"].shape[0])}
    if name == "embedding_dense_backward":
        return {"indices": _below(named["num_weights"])}
    if name.startswith("_embedding_bag"):
        rows = named["weight"].shape[0] if "weight" in named else named.get("num_weights", 1)
        return {"indices": _below(rows), "offsets": _rising_to(named["indices"].numel())}
    if name.startswith("nll_loss"):
        return {"target": _below(source.shape[1] if source.dim() > 1 else source.shape[0])}
    if name in _INDEX_ALONG_DIM and source.dim():
        return {"index": _below(source.shape[named["dim"]])}
    if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"):
        return {"indices": _fills_of_indices(source, named["indices"])}
    if name in ("put", "take"):
        return {"index": _below(source.numel())}
    if name in _PROBABILITIES and target._overloadname != "p":
        return dict.fromkeys(("self", "target"), _fill_unit)
    if name in _DIVISIONS:
        return {"other": _fill_ones}
    if name.startswith(("_assert", "_functional_assert")):
        return dict.fromkeys(("self", "cond"), _fill_ones)
    return {key: _rising_to(named["query"].shape[-3]) for key in _CUMULATIVE & named.keys()}


def _fills_of_indices(source: torch.Tensor, indices: list[torch.Tensor | None]) -> list[Fill | None]:
    """Each index tensor runs over the dimension that it stands at; a mask takes as many as it has dimensions.

    Those that share a storage, as the parts of what `torch.where` finds do, have the same content: right for the least dimension.
    """
    bounds: dict[int, int] = {}
    dim = 0
    for index in indices:
        if index is not None:
            bounds[storage_key(index)] = min(bounds.get(storage_key(index), source.shape[dim]), source.shape[dim])
        dim += index.dim() if index is not None and index.dtype == torch.bool else 1
    return [None if index is None else _below(bounds[storage_key(index)]) for index in indices]


def _find_pool_positions(target: torch._ops.OpOverload, real: dict[str, Any]) -> None:
    """Let max pooling's backward scatter to where a forward found the maxima: near, not all over the image."""
    name = target._schema.name.removeprefix("aten::")
    if name.startswith("max_pool") and name.endswith("_with_indices_backward"):
        forward = getattr(torch.ops.aten, name.removesuffix("_backward"))
        keys = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        real["indices"].copy_(forward(*(real[key] for key in keys))[1])
    elif name.startswith("adaptive_max_pool") and name.endswith("_backward"):
        forward = getattr(torch.ops.aten, name.removesuffix("_backward"))
        dims = int(name[-len("d_backward") - 1])
        real["indices"].copy_(forward(real["self"], real["grad_output"].shape[-dims:])[1])
