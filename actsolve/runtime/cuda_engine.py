"""Copies on a CUDA device: a stream per direction, ordered against the computation by events.

The computation does not wait on the host but in its own stream. So when `CopyEngine.wait_out` returns, the copy has perhaps not
begun; but memory that is freed from then on is given only to kernels that are queued behind the wait. This is why
``record_stream``, which keeps memory until the host sees that a stream is done, is not needed. Until a copy is waited for, its
tensors are held here, or longer: where an exception ends a graph, until its event has come.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from actsolve.errors import UsageError
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.host_memory import new_host_memory
from actsolve.units import format_bytes


@dataclass(eq=False, slots=True)
class CudaCopy:
    """A copy that is queued: its event, and the tensors that it needs until then."""

    event: torch.cuda.Event
    held: tuple[torch.Tensor, ...]


class CudaEngine(CopyEngine[CudaCopy]):
    """Copies from and to pinned host memory, which is registered at its exact size: torch's own would be a power of two."""

    alignment: ClassVar[int] = 512  # as the device's allocator has it

    def __init__(self, device: torch.device, options: CopyOptions) -> None:
        super().__init__()
        self._device = device
        self._pageable = options.pageable
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_flight: dict[CudaCopy, None] = {}
        weakref.finalize(self, _wait_for_all, self._in_flight)

    def _new_memory(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        memory = new_host_memory(n_bytes)
        return memory if self._pageable else _pinned(memory, self._device)

    def _copy_out(self, source: torch.Tensor, target: torch.Tensor, before: CudaCopy | None, held: torch.Tensor) -> CudaCopy:
        self._out.wait_stream(torch.cuda.current_stream(self._device))  # the source is made there
        if before is not None:
            self._out.wait_event(before.event)
        return self._queued(self._out, source, target, held)

    def _copy_back(self, source: torch.Tensor, target: torch.Tensor, after: CudaCopy, held: torch.Tensor) -> CudaCopy:
        self._back.wait_stream(torch.cuda.current_stream(self._device))  # what had the target's memory before is done there
        self._back.wait_event(after.event)
        return self._queued(self._back, source, target, held)

    def _queued(self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, held: torch.Tensor) -> CudaCopy:
        self._forget_done()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        copy = CudaCopy(stream.record_event(), (source, target, held))
        self._in_flight[copy] = None
        return copy

    def _wait(self, copy: CudaCopy) -> None:
        torch.cuda.current_stream(self._device).wait_event(copy.event)
        self._forget(copy)

    def _settle(self) -> None:
        _wait_for_all(self._in_flight)
        self._forget_done()

    def _forget_done(self) -> None:
        for copy in list(self._in_flight):
            if copy.event.query():  # type: ignore[no-untyped-call]
                self._forget(copy)

    def _forget(self, copy: CudaCopy) -> None:
        self._in_flight.pop(copy, None)
        copy.held = ()


def _wait_for_all(copies: dict[CudaCopy, None]) -> None:
    for copy in list(copies):
        copy.event.synchronize()


def _pinned(memory: npt.NDArray[np.uint8], device: torch.device) -> npt.NDArray[np.uint8]:
    """Pin ``memory`` for as long as it exists."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    with torch.cuda.device(device):
        code = int(cudart.cudaHostRegister(address, memory.nbytes, 1))  # for all devices
    if code != 0:
        raise UsageError(
            f"{format_bytes(memory.nbytes)} of host memory cannot be pinned",
            where=f"cudaHostRegister on {device}",
            why=f"CUDA error {code}",
            try_="a smaller host budget",
        )
    weakref.finalize(memory, _unpin, cudart, address, device)
    return memory


def _unpin(cudart: Any, address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy that the host has not waited for may still run
    cudart.cudaHostUnregister(address)
