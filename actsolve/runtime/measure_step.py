"""Peak and time of whole training steps that run here, measured so that two of them can be compared.

A step is one function of no arguments: forward, backward and optimizer step. Times are taken in turns within one process, since
on a shared machine two runs that are minutes apart differ by more than what is to be measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from actsolve.runtime.memory_events import measure_peak

Step = Callable[[], object]


def measured_peak(
    step: Step, static_bytes: int, *, before: Step | None = None, device: torch.device | str = "cpu", warmup: int = 1
) -> int:
    """Return the peak of device bytes over one whole step: static bytes, and the most that the allocator held above them.

    Args:
        step: Forward, backward and optimizer step. Its result is dropped.
        static_bytes: What is on the device before the step and stays: parameters, buffers, inputs, optimizer state.
        before: Called before each run, outside the measurement: drops the gradients of the step before, for on CPU frees
            of what was there before are not seen.
        device: Where the step allocates.
        warmup: Runs before the one that is measured. One is needed for the optimizer's state to exist.
    """
    for _ in range(warmup):
        _run(step, before)
    if before is not None:
        before()
    return static_bytes + measure_peak(lambda: _forget(step), device).peak_bytes


def interleaved_times(
    steps: Mapping[str, Step],
    pairs: int,
    *,
    before: Mapping[str, Step] | None = None,
    device: torch.device | str = "cpu",
    warmup: int = 2,
) -> dict[str, list[float]]:
    """Return the seconds of ``pairs`` runs of each step, taken in turns: 1 2 3, 3 2 1, 1 2 3, ...

    The i-th figures of any two steps are a pair. Turning the order round cancels a drift, and what a step leaves in the caches.

    Args:
        steps: By name.
        pairs: How often each runs.
        before: Per step what to call before each run, outside the clock.
        device: Where the steps run: CUDA work is waited for.
        warmup: Runs of each before the first that counts.
    """
    before = before or {}
    for _ in range(warmup):
        for name, step in steps.items():
            _run(step, before.get(name))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(pairs):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            if name in before:
                before[name]()
            times[name].append(_seconds(steps[name], torch.device(device)))
    return times


def median_ratio_ci(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the median of the paired ratios ``a[i] / b[i]``, and the ends of its confidence interval.

    The ends are order statistics: whatever the ratios' distribution, the number of them below the true median is binomial.
    With fewer than six pairs no such interval reaches 95%, and the ends are the least and the greatest ratio.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} figures are no pairs")
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    n = len(ratios)
    outside, cut = 0.5**n, 0  # P(at most `cut` of n fair coins)
    while outside + math.comb(n, cut + 1) * 0.5**n <= (1 - confidence) / 2:
        cut += 1
        outside += math.comb(n, cut) * 0.5**n
    return median(ratios), ratios[cut], ratios[n - 1 - cut]


def _run(step: Step, before: Step | None) -> None:
    if before is not None:
        before()
    step()


def _forget(step: Step) -> None:
    """Run ``step`` and drop its result inside the measurement."""
    step()


def _seconds(step: Step, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
