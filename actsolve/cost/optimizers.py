"""What optimizers keep and what their step allocates: of those known by name (`optimizer_kinds`), and of an instance at hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from actsolve.cost.optimizer_kinds import optimizer_memory_of
from actsolve.runtime.memory_events import measure_peak
from actsolve.static_memory import OptimizerMemory

_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
_PROBE_ELEMENTS = 2**20  # 4 MiB of parameters, in which an unknown optimizer is tried


def optimizer_memory(optimizer: str | torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> OptimizerMemory:
    """Return what ``optimizer`` keeps and what its step allocates.

    Args:
        optimizer: A name, or an instance: what its step allocates, and what it keeps if it has not stepped before, are
            measured on parameters of the same shapes, with fewer rows where they are large.
        parameters: The parameters that require a gradient, each once; fake tensors do.

    Raises:
        UsageError: an unknown name.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer)
    sizes = [p.numel() * p.element_size() for p in parameters]
    return optimizer_memory_of(optimizer, sizes, loops=all(p.device.type in ("cpu", "meta") for p in parameters))


def new_optimizer(name: str, parameters: list[torch.nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer | None:
    """Return a new optimizer of the kind that `optimizer_memory` knows by this name; None for ``none``.

    Raises:
        UsageError: an unknown name.
    """
    optimizer_memory_of(name, (), loops=True)
    make = _MAKERS.get(name.lower())
    return None if make is None else make(parameters, lr=lr)


def _of_instance(optimizer: torch.optim.Optimizer) -> OptimizerMemory:
    """Step an optimizer of the same kind and settings on parameters of the same shapes, with a share of the rows of each."""
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    total = sum(p.numel() for group in groups for p in group)
    name = type(optimizer).__name__
    if not total:
        return OptimizerMemory(name=name)
    share = min(1.0, _PROBE_ELEMENTS / total)
    with torch.random.fork_rng(devices=[]):
        probes = [[_with_fewer_rows(p, share) for p in group] for group in groups]
    twin = _twin(optimizer, probes)
    for _ in range(2):
        for probe in chain(*probes):
            probe.grad = torch.ones_like(probe)
        measured = measure_peak(twin.step, next(chain(*groups)).device)
    held = sum(
        _state_bytes(optimizer.state[p]) if p in optimizer.state else _state_bytes(twin.state[probe], probe, p)
        for p, probe in zip(chain(*groups), chain(*probes), strict=True)
    )
    return OptimizerMemory(held, math.ceil(measured.peak_bytes / share), name)


def _with_fewer_rows(parameter: torch.Tensor, share: float) -> torch.nn.Parameter:
    shape = list(parameter.shape)
    if shape:
        shape[0] = math.ceil(shape[0] * share)
    return torch.nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=parameter.device))


def _twin(optimizer: torch.optim.Optimizer, probes: list[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    settings: list[dict[str, Any]] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    groups = [{"params": ps, **given} for ps, given in zip(probes, settings, strict=True)]
    return type(optimizer)(groups, **_needed_settings(optimizer, settings[0]))


def _needed_settings(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that the constructor insists on, such as ``lr`` for some; the group's own take precedence anyway."""
    parameters = inspect.signature(type(optimizer).__init__).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {k: v for k, v in settings.items() if k in needed}


def _state_bytes(state: dict[str, Any], probe: torch.Tensor | None = None, parameter: torch.Tensor | None = None) -> int:
    """Return the bytes of one parameter's state; with `probe` that of ``parameter``, which has more rows than the probe."""
    tensors = {t.untyped_storage()._cdata: t for t in state.values() if isinstance(t, torch.Tensor)}
    found = 0
    for tensor in tensors.values():
        held = tensor.untyped_storage().nbytes()
        if probe is not None and parameter is not None and tensor.dim() > 0 and tensor.shape[0] == probe.shape[0]:
            held = held // probe.shape[0] * parameter.shape[0]
        found += held
    return found
