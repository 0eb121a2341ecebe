"""What a forward does with random number generators outside of the graph: it would be done once, in the trace."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.random
from torch.utils._python_dispatch import TorchDispatchMode

from actsolve.capture.hooks import only_torch_saves
from actsolve.capture.replay import draws
from actsolve.capture.torch_internals import reentrant_checkpoints_run_once, within_unpreserved_checkpoints
from actsolve.errors import CaptureError

_SEEDERS = ("manual_seed", "seed", "set_rng_state")
_TORCH_ITSELF = str(Path(torch.__file__).parent / "_dynamo")  # sets the state back after a trace


class _Lifted(threading.local):
    now = False


_LIFTED = _Lifted()


@contextlib.contextmanager
def as_if_not_traced() -> Iterator[None]:
    """Within this context, in this thread, nothing is refused that only a trace would lose: what runs here runs at each step."""
    before, _LIFTED.now = _LIFTED.now, True
    try:
        yield
    finally:
        _LIFTED.now = before


def is_lifted() -> bool:
    """Whether this is within `as_if_not_traced`."""
    return _LIFTED.now


@contextlib.contextmanager
def only_in_graph(once: Any = contextlib.nullcontext) -> Iterator[None]:
    """Raise if random numbers are drawn outside of the graph within this context, or torch's generator is set.

    And if hooks are set on what is saved (`only_torch_saves`), which a trace would leave out too. The states of Python's and
    NumPy's generators are set back.

    Raises:
        CaptureError: they changed, or torch's was to be set.
    """
    before = python_states()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_torch_saves())
            stack.enter_context(within_unpreserved_checkpoints(_RefuseDraws, once))
            stack.enter_context(reentrant_checkpoints_run_once(_RefuseDraws, once))
            for module in (torch, torch.random):
                for name in _SEEDERS:
                    stack.enter_context(mock.patch.object(module, name, _refusing(getattr(module, name))))
            yield
    finally:
        changed = [name for name, state in python_states().items() if name in before and state != before[name]]
        put_python_states({name: before[name] for name in changed})
    if changed:
        error = drawn_in_python(changed[0])
        error.draws = True
        raise error


def drawn_in_python(generator: str, which: str = "forward") -> CaptureError:
    """The error that a forward or backward draws from ``generator``."""
    return CaptureError(
        f"the {which} draws from {generator}",
        why="a planned step runs no Python: what was drawn in the trace would stay",
        try_="torch's random functions on tensors, draw outside and pass it as an input, or eager=[...] with a method",
    )


class _RefuseDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a kernel draws."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and draws(func, args, kwargs or {}):
            raise CaptureError(
                "a checkpoint with preserve_rng_state=False draws random numbers",
                where=str(func),
                why="its backward would draw others: its gradients are not those of its forward, and a trace has one run of it",
                try_="preserve_rng_state=True, or no checkpoint: a plan decides what is computed again",
            )
        return func(*args, **(kwargs or {}))


def _refusing(setter: Any) -> Any:
    def refuse(*args: Any) -> Any:
        if _LIFTED.now or sys._getframe(1).f_code.co_filename.startswith(_TORCH_ITSELF):
            return setter(*args)
        raise CaptureError(
            f"the forward calls torch.{setter.__name__}",
            why="a planned step runs no Python: the generator would be set once, in the trace",
            try_="a torch.Generator of its own",
        )

    return refuse


def python_states() -> dict[str, bytes]:
    """Return the states of Python's generator, and of NumPy's where it is loaded."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy.random"] = sys.modules["numpy"].random.get_state(legacy=False)
    return {name: pickle.dumps(state) for name, state in states.items()}


def put_python_states(states: Mapping[str, bytes]) -> None:
    """Give the generators the states that `python_states` returned."""
    for name, state in states.items():
        setter: Any = random.setstate if name == "Python's random" else sys.modules["numpy"].random.set_state
        setter(pickle.loads(state))
