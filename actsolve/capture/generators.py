"""Generators of random numbers that a forward draws from, and their states before it did."""

from __future__ import annotations

from collections.abc import Iterable

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
