"""When one plan serves two calls: a key over all that a trace depends on.

It holds shapes, strides, dtypes, devices and aliasing of the inputs, their nesting and constants; which tensors the module
holds and which of them are trained; the classes, modes and other attributes of every submodule; the hooks inside; and
torch's own modes. What it cannot see: global variables, and what is inside objects that are no plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from actsolve.capture.hooks import hooks_inside
from actsolve.capture.settings import Same, closed_over, settings_key, value_key
from actsolve.capture.state import Place, state_places, submodules
from actsolve.capture.structure import Structure, constant_key


def signature(
    module: torch.nn.Module,
    places: list[Place],
    leaves: list[Any],
    structure: Structure,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    *,
    offsets: bool = False,
) -> Any:
    """Return a key that is equal for calls that one plan serves.

    Args:
        module: What is called.
        places: Where its tensors are.
        leaves: The inputs, taken apart.
        structure: How they were nested.
        loss_fn: The loss that is part of the step.
        offsets: Whether it matters where in its storage an input begins.

    Raises:
        CaptureError: an input can be no part of a key, for it hides tensors.
    """
    storages: dict[int, int] = {}
    objects: dict[int, int] = {}
    for position, (container, key) in enumerate(places):  # an input may be one of the module's own tensors, or a view of one
        objects.setdefault(id(container[key]), position - len(places))
        storages.setdefault(container[key].untyped_storage()._cdata, position - len(places))
    inputs = tuple(
        (
            _tensor_key(leaf),
            objects.setdefault(id(leaf), i),
            _alias_key(leaf, storages, i),
            leaf.storage_offset() if offsets else 0,
        )
        if isinstance(leaf, torch.Tensor)
        else constant_key(leaf)
        for i, leaf in enumerate(leaves)
    )
    state = tuple([(key, _tensor_key(container[key])) for container, key in places])
    children = tuple(map(settings_key, submodules(module)))
    hooks = tuple(map(Same, (hook for *_, hook in hooks_inside(module, loss_inside=loss_fn is not None))))
    return (
        inputs,
        structure.key,
        state,
        children,
        hooks,
        _modes(),
        _loss_key(loss_fn),
    )


def _loss_key(loss_fn: Any) -> tuple[Any, ...]:
    """Return a key of all that a loss function refers to: what a trace has of it stays as it was."""
    if not isinstance(loss_fn, torch.nn.Module):
        return tuple(map(value_key, closed_over(loss_fn)))
    return (*map(settings_key, submodules(loss_fn)), *(Same(container[key]) for container, key in state_places(loss_fn)))


def _tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf, t.is_conj()


def _alias_key(t: torch.Tensor, storages: dict[int, int], position: int) -> Any:
    """Return the position of the first input with the same storage and, if that is another, where ``t`` begins in it."""
    if t.layout is not torch.strided:
        return None
    first = storages.setdefault(t.untyped_storage()._cdata, position)
    return first, t.storage_offset() if first != position else 0


def _modes() -> tuple[Any, ...]:
    """Torch's modes that change which ops a forward is made of."""
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    attention: Any = torch.backends.cuda
    kernels = (attention.flash_sdp_enabled(), attention.math_sdp_enabled(), attention.mem_efficient_sdp_enabled())
    return (
        *autocast,
        *kernels,
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
