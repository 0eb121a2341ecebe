"""Replays of random ops: the same numbers again, and the generator as if nothing had been drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rng_state(device: torch.device) -> torch.Tensor:
    """Return a copy of the state of the default generator of ``device``: about 5 KB for a CPU, 16 bytes for a GPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def replay_random(device: torch.device, state: torch.Tensor, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run ``target`` as it ran when the generator of ``device`` was in ``state``; leave the generator as it is now."""
    now = rng_state(device)
    _set_rng_state(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        _set_rng_state(device, now)


def _set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
