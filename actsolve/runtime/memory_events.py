"""The peak of allocator bytes while something runs, in-op workspace included.

On CPU the truth is the memory events that PyTorch's profiler records at every allocation and free: a dispatch mode sees
storages only, not the scratch memory inside a kernel (100% of the output for a 3x3 convolution's forward), and makes a
compiled module run eagerly. On CUDA it is the caching allocator's own peak counter.

What is not seen on CPU: a free of what was allocated before the measurement began, for the profiler does not know its size.
So measure a whole step, forward and backward in one function, with old gradients dropped before it. Nor is memory seen that
a library takes past PyTorch's allocator (oneDNN's own buffers), nor what other threads allocate, but for autograd's, to which
the profiler follows. So the buffers of an emulated link's worker threads do not count, as they should not.
"""

from __future__ import annotations

import gc
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

_MEMORY_EVENT = "[memory]"
_REGION = "actsolve::region::"
_HUGE = 2**63
_QUIET = "6"  # above USDT (5), the level at which Kineto prints two lines per profile to stderr


@dataclass(frozen=True)
class PeakMeasurement(Generic[T]):
    """What running a function took from the device's allocator.

    Attributes:
        peak_bytes: The most bytes above the start at any moment, at least 0. On CPU, frees of what was
            there before are not seen.
        end_bytes: Bytes above the start when it returned, its result still alive. Negative on CUDA if
            more was freed than allocated.
        result: What it returned.
        timeline: ``(nanoseconds since the start, bytes above the start)`` after each allocation and
            free, in order. Empty on CUDA, whose allocator counts the peak itself.
    """

    peak_bytes: int
    end_bytes: int
    result: T
    timeline: tuple[tuple[int, int], ...] = ()


def measure_peak(fn: Callable[[], T], device: torch.device | str = "cpu") -> PeakMeasurement[T]:
    """Return the peak of allocator bytes on ``device`` while ``fn`` runs once.

    Exact to the byte on CPU. On CUDA it is in the allocator's blocks, multiples of 512 bytes. Costs
    5 to 30 ms besides `fn` itself, and a second or two the first time in a process.

    Args:
        fn: What to run. Its result is alive when `end_bytes` is read.
        device: Where it allocates: ``cpu`` or ``cuda``.
    """
    device = torch.device(device)
    gc.collect()  # else a collection inside fn could free what was there before
    if device.type == "cuda":
        return _measure_cuda(fn, device)
    if device.type != "cpu":
        raise NotImplementedError(f"measuring the peak on {device.type}")
    with MemoryRecorder() as recorder, recorder.region():
        result = fn()
    [timeline] = recorder.timelines()
    return PeakMeasurement(peak_of(timeline), timeline[-1][1] if timeline else 0, result, timeline)


class MemoryRecorder:
    """Records the CPU's memory events of several stretches of code under one profile: cheaper than a profile each.

    >>> with MemoryRecorder() as recorder:
    ...     with recorder.region():
    ...         y = x.exp()
    >>> recorder.timelines()[0]  # (nanoseconds since the region began, bytes above its begin)
    """

    def __init__(self) -> None:
        _silence_kineto()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._n_regions = 0

    def __enter__(self) -> MemoryRecorder:
        self._profile.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.stop()

    @contextmanager
    def region(self) -> Iterator[None]:
        """Record what is allocated and freed inside; counting starts at 0."""
        with record_function(f"{_REGION}{self._n_regions}"):
            self._n_regions += 1
            yield

    def timelines(self) -> list[tuple[tuple[int, int], ...]]:
        """Return the `PeakMeasurement.timeline` of each region, in the order in which they began."""
        kineto = self._profile.profiler
        assert kineto is not None and kineto.kineto_results is not None, "the recorder is still running"
        regions, memory = _events(kineto.kineto_results.events())
        if len(regions) != self._n_regions:
            raise RuntimeError(f"the profiler recorded {len(regions)} of {self._n_regions} regions: is another profiler running?")
        return [_timeline(memory, *regions[index]) for index in range(self._n_regions)]


def peak_of(timeline: Sequence[tuple[int, int]]) -> int:
    """Return the most bytes above the start, at least 0."""
    return max([0, *(live_bytes for _, live_bytes in timeline)])


def _events(events: Iterable[torch._C._autograd._KinetoEvent]) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
    """Return the regions, index -> (start, end) in nanoseconds, and the CPU's memory events, (nanoseconds, bytes), in order."""
    regions: dict[int, tuple[int, int]] = {}
    memory: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if name == _MEMORY_EVENT:
            if event.device_type() == torch._C._autograd.DeviceType.CPU:
                memory.append((event.start_ns(), event.nbytes()))  # type: ignore[attr-defined]  # missing in torch's stub
        elif name.startswith(_REGION):
            start_ns = event.start_ns()
            regions[int(name.removeprefix(_REGION))] = (start_ns, start_ns + event.duration_ns())
    memory.sort(key=lambda event: event[0])  # stable: events of one nanosecond stay in the order recorded
    return regions, memory


def _timeline(memory: list[tuple[int, int]], start_ns: int, end_ns: int) -> tuple[tuple[int, int], ...]:
    live_bytes = 0
    timeline = []
    for at_ns, change_bytes in memory[bisect_left(memory, (start_ns, -_HUGE)) :]:
        if at_ns > end_ns:
            break
        live_bytes += change_bytes
        timeline.append((at_ns - start_ns, live_bytes))
    return tuple(timeline)


def _measure_cuda(fn: Callable[[], T], device: torch.device) -> PeakMeasurement[T]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start_bytes = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    end_bytes = torch.cuda.memory_allocated(device) - start_bytes
    return PeakMeasurement(torch.cuda.max_memory_allocated(device) - start_bytes, end_bytes, result)


def _silence_kineto() -> None:
    """Keep Kineto from printing; works until the first profile of the process, and leaves a user's own setting alone."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
