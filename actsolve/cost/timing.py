"""How long a call takes here.

A run allocates its outputs and frees them, as in the step; its inputs stay warm in cache. With one thread, the sum over a joint
graph came to 0.93 to 1.05 of that graph's own time from its fifth run on (VGG, Llama, MobileNet, U-Net). Flushing the cache
before each run gave 1.1 to 1.4, and giving freed memory back to the system 2 to 3: a step, too, reuses its pages.

The figure is the third fastest run, not the median: on a machine whose cores are shared, most runs of a kernel of several
threads can be 10 times too slow, and the slow ones say nothing about the kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import nsmallest

import torch

from actsolve.cost.sample_call import SampleCall

logger = logging.getLogger(__name__)

COPY_BYTES = 64 << 20
"""Bytes that `copy` reads, and as many that it writes."""

_LEAST_RUNS, _MOST_RUNS = 5, 300
_ENOUGH_S = 0.03  # of runs, once they have settled
_GIVE_UP_S = 0.25  # of runs that do not settle
_LONG_S = 0.5  # of fewer than five runs; an op of 0.25 s or more is run twice
_SETTLED = 1.1  # the third fastest run takes at most this times the fastest
_BUSY = 1.5  # the median run takes more than this times the figure


@dataclass
class Spread:
    """How far the runs of signatures lie apart, to tell a busy machine."""

    settled_s: float = 0.0
    median_s: float = 0.0

    def add(self, found: Timed) -> None:
        self.settled_s += found.seconds
        self.median_s += found.median_s

    def warn_if_busy(self) -> None:
        if self.median_s > _BUSY * self.settled_s:
            logger.warning(
                "this machine is busy: half of the runs took over %.1f times as long as the fastest; measured costs are rough",
                self.median_s / self.settled_s,
            )


@dataclass(frozen=True)
class Timed:
    """What one run takes.

    Attributes:
        seconds: The third fastest of at least five runs, or of fewer long ones the faster half's slowest.
        median_s: The median run.
    """

    seconds: float
    median_s: float

    @property
    def rough(self) -> bool:
        """Whether the runs lie so far apart that the figure is not worth keeping for good."""
        return self.median_s > _BUSY * self.seconds


def timed(call: SampleCall, device: torch.device) -> Timed:
    """Return what one run takes.

    Args:
        call: What to run. Arguments that it writes are given their first content before each run.
        device: Where it runs: ``cpu``, or a ``cuda`` device that is timed by its own events.
    """
    times: list[float] = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run = _cuda_timer(call, device) if device.type == "cuda" else _cpu_timer(call)
        run()  # loads code, makes caches
        while not _enough(times):
            times.append(run())
    return Timed(nsmallest(3, times)[min(2, (len(times) - 1) // 2)], sorted(times)[len(times) // 2])


def _enough(times: Sequence[float]) -> bool:
    total = sum(times)
    if len(times) < _LEAST_RUNS:
        return len(times) >= 2 and total >= _LONG_S
    if total >= _GIVE_UP_S or len(times) >= _MOST_RUNS:
        return True
    fastest = nsmallest(3, times)
    return total >= _ENOUGH_S and fastest[-1] <= _SETTLED * fastest[0]


def _cpu_timer(call: SampleCall) -> Callable[[], float]:
    def run() -> float:
        call.reset()
        start = time.perf_counter()
        result = call()
        del result  # freeing is part of the step too
        return time.perf_counter() - start

    return run


def _cuda_timer(call: SampleCall, device: torch.device) -> Callable[[], float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def run() -> float:
        call.reset()
        torch.cuda.synchronize(device)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return float(start.elapsed_time(end)) / 1e3

    return run


# -- calls that are no op of the step ------------------------------------------------------------------------------------


def get_state(device: torch.device) -> SampleCall:
    """Return the call that saves a generator's state."""
    return SampleCall(torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state, (), {})


def restore_state(device: torch.device) -> SampleCall:
    """Return what a replay of a random op does around it: save the state, set the saved one, set the first back."""
    generator = torch.cuda if device.type == "cuda" else torch

    def run() -> None:
        state = generator.get_rng_state()
        generator.set_rng_state(state)
        generator.set_rng_state(state)

    return SampleCall(run, (), {})


def copy(device: torch.device) -> SampleCall:
    """Return a copy of `COPY_BYTES` within the memory of ``device``."""
    source, target = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
    return SampleCall(target.copy_, (source,), {})
