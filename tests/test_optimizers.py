"""What an optimizer keeps and allocates, against steps that ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actsolve.cost.optimizers import new_optimizer, optimizer_memory
from actsolve.errors import UsageError
from actsolve.runtime.memory_events import measure_peak

SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6)
NAMES = ["sgd", "sgd-momentum", "adam", "adamw", "adagrad", "rmsprop"]
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam with decay": partial(torch.optim.Adam, weight_decay=0.1, amsgrad=True),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "centered rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "factored": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


def parameters(shapes: Sequence[Sequence[int]]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(*shape)) for shape in shapes]


def stepped(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and the most that its second step allocated."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    peak_bytes = measure_peak(optimizer.step).peak_bytes
    kept = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()), peak_bytes


@pytest.mark.parametrize("name", NAMES)
@given(SIZES)
@settings(deadline=None, max_examples=5)
def test_a_known_optimizer_takes_what_it_is_said_to(name: str, shapes: list[tuple[int, int]]) -> None:
    ps = parameters(shapes)
    said = optimizer_memory(name, ps)
    optimizer = new_optimizer(name, ps)
    assert optimizer is not None
    state_bytes, peak_bytes = stepped(optimizer)
    assert said.state_bytes == state_bytes
    assert peak_bytes <= said.temporary_bytes <= peak_bytes + 16


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "shapes", [[(300, 500), (1200, 30), (40, 7)], [(2000, 700), (900, 900), (700, 30)]], ids=["small", "large"]
)
def test_any_other_is_measured(make: Callable[[Any], torch.optim.Optimizer], shapes: list[tuple[int, int]]) -> None:
    said = optimizer_memory(make(parameters(shapes)), parameters(shapes))
    state_bytes, peak_bytes = stepped(make(parameters(shapes)))
    assert said.state_bytes == state_bytes
    assert peak_bytes * 0.99 <= said.temporary_bytes <= peak_bytes * 1.25 + 64  # Muon works on squares of the rows


def test_state_that_exists_is_counted_as_it_is() -> None:
    ps = parameters([(30, 40), (7, 7)])
    optimizer = torch.optim.SGD(ps, lr=0.1, momentum=0.9)
    ps[0].grad = torch.ones_like(ps[0])
    optimizer.step()  # the other parameter has no momentum yet
    assert optimizer_memory(optimizer, ps).state_bytes == (30 * 40 + 7 * 7) * 4


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="adamm"):
        optimizer_memory("adamm", [])
