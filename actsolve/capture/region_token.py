"""What a second run of a region goes on from, as bytes in a tensor that the graph carries: among it the states of generators."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from actsolve.capture.generators import own_generators
from actsolve.capture.randomness import put_python_states, python_states

_TOKEN_BYTES = 1 << 14
_LENGTH_BYTES = 8


def token_of(settings: int) -> torch.Tensor:
    """Return a token: a key of the region's settings, and the states of torch's, Python's and NumPy's generators as they are."""
    return _packed((settings, _states()))


def settings_in(token: torch.Tensor) -> int:
    """Return the key of the settings that a token was made with."""
    settings: int = _unpacked(token)[0]
    return settings


def _states() -> tuple[list[bytes], dict[str, bytes]]:
    return [g.get_state().numpy().tobytes() for g in own_generators()], python_states()


def _put(states: tuple[list[bytes], dict[str, bytes]]) -> None:
    for generator, state in zip(own_generators(), states[0], strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    put_python_states(states[1])


def _packed(content: Any) -> torch.Tensor:
    data = pickle.dumps(content)
    token = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
    framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    token[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    return token


def _unpacked(token: torch.Tensor) -> Any:
    data = token.numpy().tobytes()
    return pickle.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")])


@contextlib.contextmanager
def generators_at(token: torch.Tensor) -> Iterator[None]:
    """Within this context the generators go on from the states in ``token``, and afterwards from where they were."""
    before = _states()
    _put(_unpacked(token)[1])
    try:
        yield
    finally:
        _put(before)
