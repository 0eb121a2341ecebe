"""Random state: of replays, which draw the same numbers again and leave the generator alone, and of forwards begun anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def random_state() -> list[bytes]:
    """Return the states of torch's own generators: the CPU's, and those of the GPUs in use. They take no device memory."""
    return [generator.get_state().numpy().tobytes() for generator in _generators()]


def set_random_state(states: list[bytes]) -> None:
    """Set what `random_state` returned."""
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generators() -> list[torch.Generator]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *(torch.cuda.default_generators if in_use else ())]


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
