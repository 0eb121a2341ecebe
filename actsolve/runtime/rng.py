"""Random state: of replays, which draw the same numbers again and leave the generator alone, and of forwards begun anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Drawn:
    """Generators that a forward draws from, and the state that each had before. The states take no device memory."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[torch.Generator, bytes]] = {}

    def note(self, generators: Iterable[torch.Generator]) -> None:
        """Note the state of each that is not known yet."""
        for generator in generators:
            if id(generator) not in self._states:
                self._states[id(generator)] = (generator, generator.get_state().numpy().tobytes())

    def put_back(self) -> None:
        """Give each the state that it had."""
        for generator, state in self._states.values():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def own_generators() -> list[torch.Generator]:
    """Return torch's own generators: the CPU's, and those of the GPUs in use."""
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
