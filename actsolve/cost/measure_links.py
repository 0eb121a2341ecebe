"""How fast this machine copies to and from its device: each direction alone, and both beside each other.

A copy is timed from the call that queues it until it was waited for, so that the same code measures a CUDA device, and the
emulated link that stands for one in tests. Medians: a copy that something else delayed says nothing about the link. Kept on
disk beside the costs of ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from actsolve.cost.machine import device_name, environment, require_device
from actsolve.cost.measure import undisturbed
from actsolve.cost.measured_cache import Measured, MeasuredCache
from actsolve.links import Links
from actsolve.units import format_speed

_BLOCK_BYTES = 64 << 20  # 2.6 ms at 25 GB/s: the 20 us of queueing and waiting are under 1% of it
_REPEATS = 7
_LEAST_SHARE = 0.01  # of its speed alone that a direction is taken to have beside the other, whatever the clock's noise


class Link(Protocol):
    """What queues copies, in order for each direction, and waits for one."""

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Any: ...

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> Any: ...

    def wait(self, copy: Any) -> Any: ...


@dataclass(frozen=True)
class Blocks:
    """The memory that is copied: two blocks on the device and two on the host, of the same size."""

    device_out: torch.Tensor
    host_out: torch.Tensor
    host_back: torch.Tensor
    device_back: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of each."""
        return self.device_out.numel() * self.device_out.element_size()


@dataclass(frozen=True)
class CopySeconds:
    """What copies of one block took.

    Attributes:
        out, back: Each direction alone.
        out_beside, back_beside: Both begun at once: until the copy out, and the copy back, had ended.
    """

    out: float
    back: float
    out_beside: float
    back_beside: float

    def links(self, size_bytes: int) -> Links:
        """Return the speeds that blocks of ``size_bytes`` were copied at.

        Until the first of two that were begun at once ended, both ran at the speed that they have beside each other; what was
        left of the second one then went at its speed alone.
        """
        d2h, h2d = size_bytes / self.out, size_bytes / self.back
        first_s, apart_s = min(self.out_beside, self.back_beside), abs(self.out_beside - self.back_beside)
        faster = size_bytes / first_s
        if self.out_beside <= self.back_beside:
            d2h_both, h2d_both = faster, (size_bytes - apart_s * h2d) / first_s
        else:
            d2h_both, h2d_both = (size_bytes - apart_s * d2h) / first_s, faster
        return Links(d2h, h2d, _within(d2h_both, d2h), _within(h2d_both, h2d))


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured.

    Attributes:
        pinned: Copies from and to pinned host memory, which is what offloading uses.
        pageable: From and to ordinary memory, one direction at a time, for reports: how much pinning is worth.
        source: What was measured, for reports.
    """

    pinned: Links
    pageable: Links
    source: str


def measure_links(device: torch.device, *, cache: MeasuredCache | None = None) -> MeasuredLinks:
    """Return the speeds of copies between the host and ``device``, a CUDA device that is here.

    Args:
        device: What to measure.
        cache: What was measured before; the user's cache on disk if left out.

    Raises:
        UsageError: the device is not here.
    """
    require_device(device)
    cache = cache or MeasuredCache(environment(device))
    known = cache.read()
    seconds = {}
    for pinned in (True, False):
        found = _read(known, pinned)
        if found is None:
            with undisturbed([device]), _cuda_link(device) as link:
                found = copy_seconds(link, _blocks(device, pinned=pinned), beside=pinned)
            cache.add(_written(found, pinned))
        seconds[pinned] = found
    fast, slow = (seconds[pinned].links(_BLOCK_BYTES) for pinned in (True, False))
    without = f"{format_speed(slow.d2h)} out and {format_speed(slow.h2d)} back without pinning"
    return MeasuredLinks(fast, slow, f"measured on {device_name(device)}; {without}")


def copy_seconds(
    link: Link,
    blocks: Blocks,
    *,
    beside: bool = True,
    repeats: int = _REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> CopySeconds:
    """Return the median seconds of copies over ``link``, having tried each once before.

    Args:
        link: What copies; idle now.
        blocks: What is copied.
        beside: Whether both directions can run at once; if not, they are taken to share one link.
        repeats: How often each is timed.
        clock: Seconds, such as `time.perf_counter`.
    """

    def out() -> Any:
        return link.copy_out(blocks.device_out, blocks.host_out)

    def back() -> Any:
        return link.copy_back(blocks.host_back, blocks.device_back)

    def took(first: Callable[[], Any], other: Callable[[], Any] | None = None) -> float:
        """Seconds until ``first`` has ended, begun at once with ``other``; the median."""
        times = []
        for _ in range(1 + repeats):
            start = clock()
            copy = first()
            copies = [copy] if other is None else [copy, other()]
            link.wait(copy)
            times.append(clock() - start)
            for left in copies[1:]:
                link.wait(left)
        return median(times[1:])

    out_s, back_s = took(out), took(back)
    if not beside:
        return CopySeconds(out_s, back_s, out_s + back_s, out_s + back_s)
    return CopySeconds(out_s, back_s, took(out, back), took(back, out))


def _within(speed: float, alone: float) -> float:
    """Noise can make a direction faster beside the other one than alone, or leave it nothing."""
    return min(max(speed, _LEAST_SHARE * alone), alone)


# -- kept on disk as the seconds of one block each ------------------------------------------------------------------------


def _name(field: str, pinned: bool) -> str:
    return f"actsolve.link:{field}:{'pinned' if pinned else 'pageable'}:{_BLOCK_BYTES}"


def _read(known: Mapping[str, Measured], pinned: bool) -> CopySeconds | None:
    found = [known.get(_name(field, pinned)) for field in CopySeconds.__dataclass_fields__]
    seconds = [m.seconds for m in found if m is not None and m.seconds > 0]
    return CopySeconds(*seconds) if len(seconds) == len(found) else None


def _written(found: CopySeconds, pinned: bool) -> dict[str, Measured]:
    return {_name(field, pinned): Measured(seconds=getattr(found, field)) for field in CopySeconds.__dataclass_fields__}


# -- a CUDA device --------------------------------------------------------------------------------------------------------


class _CudaLink:
    """One stream per direction; a copy is the event at its end."""

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        return self._queue(self._out, source, target)

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        return self._queue(self._back, source, target)

    def wait(self, copy: torch.cuda.Event) -> None:
        copy.synchronize()

    def _queue(self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event


@contextmanager
def _cuda_link(device: torch.device) -> Iterator[_CudaLink]:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        try:
            yield _CudaLink(device)
        finally:
            torch.cuda.synchronize(device)  # no copy is left behind


def _blocks(device: torch.device, *, pinned: bool) -> Blocks:
    """Memory that has been written once, so that no copy waits for the system to provide it."""

    def host() -> torch.Tensor:
        return torch.ones(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)

    def on_device() -> torch.Tensor:
        block = torch.ones(_BLOCK_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # written on another stream than the copies run on
        return block

    return Blocks(on_device(), host(), host(), on_device())
