"""Replays of random ops: the same numbers again, and the generator as if nothing had been drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rng_state() -> torch.Tensor:
    """Return a copy of the state of the default CPU generator: uint8, about 5 KB."""
    return torch.get_rng_state()


def replay_random(state: torch.Tensor, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``target`` as it ran when the generator was in ``state``; leave the generator as it is now."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        torch.set_rng_state(now)
