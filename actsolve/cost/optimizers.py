"""What optimizers keep and what their step allocates, for those known by name, and for an instance at hand.

Per element of a parameter, in the parameter's dtype, as torch.optim keeps it; and per parameter one float32 step counter where
there is one. Temporaries are those of the default implementation: on a CPU a loop over parameters, so that the largest
parameter counts; on CUDA the foreach one, which works on all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from actsolve.errors import UsageError
from actsolve.runtime.memory_events import measure_peak
from actsolve.static_memory import OptimizerMemory


@dataclass(frozen=True)
class _Kind:
    state: int  # copies of a parameter that stay
    loop: int  # copies alive at once in the step, of one parameter
    foreach: int  # the same, of all parameters
    counts_steps: bool
    make: Callable[..., torch.optim.Optimizer] | None


_KINDS = {
    "none": _Kind(0, 0, 0, False, None),
    "sgd": _Kind(0, 0, 0, False, torch.optim.SGD),
    "sgd-momentum": _Kind(1, 0, 0, False, partial(torch.optim.SGD, momentum=0.9)),
    "adam": _Kind(2, 2, 1, True, torch.optim.Adam),
    "adamw": _Kind(2, 2, 1, True, torch.optim.AdamW),
    "adagrad": _Kind(1, 2, 1, True, torch.optim.Adagrad),
    "rmsprop": _Kind(1, 1, 1, True, torch.optim.RMSprop),
}
_STEP_BYTES = 4
_SCALAR_BYTES = 12  # Python numbers that kernels wrap in tensors beside the other temporaries


def optimizer_memory(optimizer: str | torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> OptimizerMemory:
    """Return what ``optimizer`` keeps and what its step allocates.

    Args:
        optimizer: A name, or an instance: its state is counted exactly if it has stepped before, and measured on small
            parameters if not.
        parameters: The parameters that require a gradient, each once; fake tensors do.

    Raises:
        UsageError: an unknown name.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer)
    kind = _KINDS.get(optimizer.lower())
    if kind is None:
        _unknown(optimizer)
    sizes = [p.numel() * p.element_size() for p in parameters]
    on_cpu = all(p.device.type in ("cpu", "meta") for p in parameters)
    temporary = kind.loop * max(sizes, default=0) if on_cpu else kind.foreach * sum(sizes)
    temporary += _SCALAR_BYTES if kind.state and sizes else 0
    state = kind.state * sum(sizes) + (_STEP_BYTES * len(sizes) if kind.counts_steps else 0)
    return OptimizerMemory(state, temporary, optimizer.lower())


def new_optimizer(name: str, parameters: list[torch.nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer | None:
    """Return a new optimizer of the kind that `optimizer_memory` knows by this name; None for ``none``.

    Raises:
        UsageError: an unknown name.
    """
    if name.lower() not in _KINDS:
        _unknown(name)
    make = _KINDS[name.lower()].make
    return None if make is None else make(parameters, lr=lr)


def _unknown(name: str) -> NoReturn:
    raise UsageError(f"no optimizer is called {name!r}", try_="one of " + ", ".join(_KINDS) + ", or --static-bytes")


def _of_instance(optimizer: torch.optim.Optimizer) -> OptimizerMemory:
    """Measure small parameters of two sizes: state grows with the sum of sizes, temporaries with the largest or with the sum."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in parameters]
    if not parameters:
        return OptimizerMemory(name=type(optimizer).__name__)
    small, large = _probe(optimizer, parameters[0], [4096, 8192]), _probe(optimizer, parameters[0], [8192])
    per_byte = large[1] / (8192 * parameters[0].element_size())
    works_on_all = small[1] > 1.25 * large[1]
    temporary = int(per_byte * (sum(sizes) if works_on_all else max(sizes)))
    held = _state_bytes(optimizer)
    if held == 0:
        state_per_byte = (small[0] - large[0]) // (4096 * parameters[0].element_size())
        constant = large[0] - state_per_byte * 8192 * parameters[0].element_size()
        held = state_per_byte * sum(sizes) + constant * len(sizes)
    return OptimizerMemory(held, temporary, type(optimizer).__name__)


def _probe(optimizer: torch.optim.Optimizer, like: torch.Tensor, sizes: list[int]) -> tuple[int, int]:
    """Return the state and temporary bytes of an optimizer of the same kind and settings on parameters of ``sizes`` elements."""
    with torch.random.fork_rng(devices=[]):
        probes = [torch.nn.Parameter(torch.ones(n, dtype=like.dtype, device=like.device)) for n in sizes]
    settings: dict[str, Any] = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    twin = type(optimizer)([{"params": probes, **settings}], **_needed_settings(optimizer, settings))
    for _ in range(2):
        for p in probes:
            p.grad = torch.ones_like(p)
        measured = measure_peak(twin.step, like.device)
    return _state_bytes(twin), measured.peak_bytes


def _needed_settings(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that the constructor insists on, such as ``lr`` for some; the group's own take precedence anyway."""
    import inspect

    parameters = inspect.signature(type(optimizer).__init__).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {k: v for k, v in settings.items() if k in needed}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
