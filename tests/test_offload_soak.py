"""Offloading for long: many runs with late copies, many steps, and an interrupt from the keyboard."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch
from copies import LINKS
from offloaded import MODELS, assert_bitwise, copy_threads, eager_gradients, mlp, trained, transformer

from actsolve.links import Links
from actsolve.runtime.copy_engine import CopyOptions

N_RUNS = 300


@pytest.mark.slow
def test_three_hundred_runs_with_random_delays_are_bitwise_equal() -> None:
    """Each is another random schedule; each piece of a copy is held up for a random while, drawn from the run's seed."""
    names = list(MODELS)
    expected = {name: eager_gradients(MODELS[name]) for name in names}
    n_delays = 0
    for seed in range(N_RUNS):
        draw = random.Random(seed)

        def delay(draw: random.Random = draw) -> float:
            nonlocal n_delays
            n_delays += 1
            return draw.choice((0.0, 0.0005, 0.002))

        name = names[seed % len(names)]
        ours = trained(MODELS[name], seed, share=0.6, options=CopyOptions(delay=delay))
        torch.manual_seed(0)
        ours.loss().backward()
        assert_bitwise(ours.gradients(), expected[name])
    assert n_delays > N_RUNS


@pytest.mark.slow
def test_memory_is_flat_over_five_hundred_steps() -> None:
    ours = trained(transformer, 3)

    def steps(n: int) -> int:
        for _ in range(n):
            ours.module.zero_grad()
            ours.loss().backward()
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    before = steps(50)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert steps(450) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < 4 << 10
    assert ours.engine.n_arenas == 1


def test_an_interrupt_from_the_keyboard_leaves_nothing_behind() -> None:
    """It comes while the computation waits for a slow copy."""
    ours = trained(mlp, links=Links(d2h=1e5, h2d=1e5))
    pressed = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    pressed.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            ours.loss().backward()
    pressed.join()
    ours.module.zero_grad()
    ours.loss().backward()
    assert_bitwise(ours.gradients(), eager_gradients(mlp))
    assert ours.engine.n_arenas == 1
    del ours
    gc.collect()
    end = time.monotonic() + 10
    while copy_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert copy_threads() == []


def test_a_module_dropped_between_forward_and_backward_leaves_no_thread() -> None:
    ours = trained(mlp, links=LINKS)
    loss = ours.loss()
    del ours, loss
    gc.collect()
    assert copy_threads() == []
