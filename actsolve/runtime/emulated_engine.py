"""Copies on a machine without an accelerator: over an emulated link, at the speed of a real one."""

from __future__ import annotations

import threading
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from actsolve.links import Links
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.emulated_link import Copy, EmulatedLink
from actsolve.runtime.host_memory import new_host_memory


class EmulatedEngine(CopyEngine[Copy]):
    """Worker threads that copy while the computation goes on.

    As with a driver's copies from pageable memory, with `CopyOptions.pageable` the computing thread copies each value once
    more, through a buffer, and waits for the link meanwhile.
    """

    alignment: ClassVar[int] = 64  # a cache line

    def __init__(self, links: Links, options: CopyOptions) -> None:
        super().__init__()
        self._link = EmulatedLink(links.scaled(options.speed), options.delay)
        self._pageable = options.pageable
        self._buffer: torch.Tensor | None = None
        self._buffer_in_use = threading.Lock()

    def _new_memory(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        if self._pageable and self._buffer is None:
            self._buffer = torch.from_numpy(new_host_memory(self.largest_bytes))
        return new_host_memory(n_bytes)

    def _copy_out(self, source: torch.Tensor, target: torch.Tensor, before: Copy | None, held: torch.Tensor) -> Copy:
        if self._buffer is None:
            return self._link.copy_out(source, target, held=held)
        with self._buffer_in_use:
            buffer = self._buffer[: len(source)]
            buffer.copy_(source)
            copy = self._link.copy_out(buffer, target, held=held)
            self._link.wait(copy)
        return copy

    def _copy_back(self, source: torch.Tensor, target: torch.Tensor, after: Copy, held: torch.Tensor) -> Copy:
        if self._buffer is None:
            return self._link.copy_back(source, target, after, held=held)
        with self._buffer_in_use:
            buffer = self._buffer[: len(source)]
            copy = self._link.copy_back(source, buffer, after, held=held)
            self._link.wait(copy)
            target.copy_(buffer)
        return copy

    def _wait(self, copy: Copy) -> None:
        self._link.wait(copy)

    def _settle(self) -> None:
        self._link.settle()
