"""Hooks on modules: Python that runs around a forward, of which a trace would keep only what it does to tensors.

Those of the module that is optimized run at each call, around the planned step. A hook on a submodule would run once, in the
trace, and never again: it is refused, except where a library is known to do all with tensors (torch's weight norm, spectral norm
and pruning, what transformers and peft do so that frozen embeddings get gradients).
Hooks on tensors that require a gradient are no matter: autograd calls them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from actsolve.errors import CaptureError

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ONLY_COMPUTE = ("torch.nn.utils.", "transformers.", "peft.")
_AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")  # these see what the forward returns


def hooks_inside(module: torch.nn.Module, *, loss_inside: bool) -> tuple[tuple[str, str, Any], ...]:
    """Return (module path, kind, hook) of each hook that a trace of ``module`` would swallow.

    Args:
        module: What is optimized.
        loss_inside: Whether a loss is computed from its output inside the step: then its own hooks
            would see ``(loss, output)`` instead of the output.
    """
    found = [
        (path, kind, hook) for path, child in _with_hooks(module) for kind in _KINDS for hook in getattr(child, kind).values()
    ]
    if loss_inside:
        found += [("", kind, hook) for kind in _AFTER for hook in getattr(module, kind).values()]
    for kind in ("_global" + kind for kind in _KINDS):
        found += [("", kind, hook) for hook in getattr(nn_module, kind).values()]
    return tuple(entry for entry in found if not only_computes(entry[2]))


def only_computes(hook: Any) -> bool:
    """Whether ``hook`` is known to do nothing but to compute with tensors."""
    named = hook if isinstance(hook, FunctionType) else type(hook)
    return f"{named.__module__}.".startswith(_ONLY_COMPUTE)


def _with_hooks(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Submodules, not the module itself, that have a hook."""
    return [
        (path, child)
        for path, child in module.named_modules()
        if child is not module
        and (child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks)
    ]


def refuse_hooks(module: torch.nn.Module, *, loss_inside: bool) -> None:
    """Raise if a hook would not run at each step, or a module has yet to make its parameters in one."""
    for path, child in module.named_modules():
        if any(map(is_lazy, (*child._parameters.values(), *child._buffers.values()))):
            raise CaptureError(
                f"{path or 'the module'} ({type(child).__name__}) has no parameters yet",
                why="a lazy module makes them in its first call",
                try_="call the module once before optimizing it",
            )
    for path, kind, hook in hooks_inside(module, loss_inside=loss_inside):
        what = kind.removeprefix("_global_").removeprefix("_").removesuffix("s").replace("_", " ")
        raise CaptureError(
            f"{'every module' if kind.startswith('_global') else path or 'the module'} has a {what}",
            where=getattr(hook, "__qualname__", type(hook).__name__),
            why="it would run once, while the model is traced, and never again",
            try_='remove it, return what it collects from the forward, or on_error="original"',
        )


@contextlib.contextmanager
def only_torch_saves() -> Iterator[None]:
    """Raise if a forward within this context sets hooks on what is saved for the backward: a trace does not run them.

    Those of torch itself change no value: `torch.utils.checkpoint`, `save_on_cpu`. Ours save nothing.

    Raises:
        CaptureError: it sets others.
    """
    enter = saved_tensors_hooks.__enter__

    def enter_if_torch(hooks: saved_tensors_hooks) -> None:
        of_torch = type(hooks) is not saved_tensors_hooks and type(hooks).__module__.partition(".")[0] == "torch"
        if not of_torch and not getattr(hooks.pack_hook, "__module__", "").startswith("actsolve."):
            raise CaptureError(
                "the forward sets hooks on the tensors that are saved for its backward",
                where=getattr(hooks.pack_hook, "__qualname__", type(hooks.pack_hook).__name__),
                why="a planned step saves other tensors than eager does, and would not run them",
                try_='them around the call of the module, or on_error="original"',
            )
        enter(hooks)

    with mock.patch.object(saved_tensors_hooks, "__enter__", enter_if_torch):
        yield


@contextlib.contextmanager
def nothing_saved(refusal: Callable[[], CaptureError]) -> Iterator[None]:
    """Drop at once what autograd would save within this context; a backward that asks for it raises ``refusal()``."""

    def refuse(_: None) -> torch.Tensor:
        raise refusal()

    with saved_tensors_hooks(lambda _: None, refuse):
        yield
