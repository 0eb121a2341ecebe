"""Copies between device and host, as the calls that a lowered graph makes.

A value is copied as the bytes of its whole storage, whatever its strides. In the order in which a graph calls them::

    lease = engine.lease()                                    # host memory for this forward
    host = engine.copy_out(lease, value, offset, n_bytes)     # queued; saved for the backward
    engine.wait_out(host, value)                              # now the value may be freed
    arriving = engine.copy_back(host, device)                 # queued, into fresh device memory
    value = engine.wait_back(arriving, dtype, size, stride, storage_offset)

Each value has a place of its own in the host memory, which is not used again within a step: with ``retain_graph`` a second
backward copies it back again. What a queued copy reads and writes is held until the copy is done, also where an exception ends
the graph meanwhile. There is one such engine per lowered step; how copies run is for its subclasses to say.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from actsolve.errors import ScheduleError, UsageError
from actsolve.runtime.emulated_link import Delay
from actsolve.runtime.host_arena import HostArena

C = TypeVar("C")


@dataclass(frozen=True)
class CopyOptions:
    """How copies run, for experiments and tests.

    Attributes:
        pageable: Through host memory that is not pinned: the computation waits for each copy.
        speed: Of an emulated link, as a share of that of the problem's.
        delay: Of an emulated link, called before each piece.
    """

    pageable: bool = False
    speed: float = 1.0
    delay: Delay | None = None


@dataclass(frozen=True, slots=True)
class Arriving(Generic[C]):
    """A copy back that is queued, and the bytes that it fills."""

    copy: C
    target: torch.Tensor


class CopyEngine(ABC, Generic[C]):
    """The calls that a graph makes; ``C`` is a copy that is queued.

    Attributes:
        alignment: Each value's place begins at a multiple of it.
        host_bytes: Bytes of host memory that a forward takes.
        largest_bytes: Bytes of the largest value.
    """

    alignment: ClassVar[int]

    def __init__(self) -> None:
        self.host_bytes = 0
        self.largest_bytes = 0
        self._arenas: dict[int, HostArena[C]] = {}  # by address
        self._lock = threading.Lock()

    # -- once per lowered step ----------------------------------------------------------------------------------------

    def place(self, n_bytes: int) -> int:
        """Return the offset of a value of ``n_bytes`` in the host memory of every forward."""
        assert not self._arenas, "the host memory is laid out"
        offset = -(-self.host_bytes // self.alignment) * self.alignment
        self.host_bytes = offset + n_bytes
        self.largest_bytes = max(self.largest_bytes, n_bytes)
        return offset

    def prepare(self) -> None:
        """Take the host memory of the first forward.

        Raises:
            UsageError: the host does not have so much left.
        """
        self._add_arena()

    @property
    def n_arenas(self) -> int:
        """How many forwards have been pending at once, at most; at least 1 once it is prepared."""
        return len(self._arenas)

    # -- called by graphs ---------------------------------------------------------------------------------------------

    def lease(self) -> torch.Tensor:
        """Return host memory for one forward: that of an earlier one that is done, or more.

        Raises:
            UsageError: more is needed, for forwards whose backwards are to come, and the host does not have it.
        """
        with self._lock:
            arena = self._free_arena()
            if arena is None:
                self._settle()  # copies of a step that an exception has ended may be all that holds one
                arena = self._free_arena() or self._add_arena()
            return arena.lease()

    def copy_out(self, lease: torch.Tensor, tensor: torch.Tensor, offset: int, n_bytes: int) -> torch.Tensor:
        """Queue a copy of the whole storage of ``tensor``, of ``n_bytes``; return the place on the host that it fills."""
        storage = tensor.untyped_storage()
        if storage.nbytes() != n_bytes:
            raise ScheduleError(f"a value of {n_bytes} bytes is copied out and has {storage.nbytes()} bytes", where="offloading")
        source = _bytes_of(storage)
        arena = self._arena_of(lease)
        place = slice(offset, offset + n_bytes)
        host = lease[place]
        arena.out[offset] = self._copy_out(source, arena.memory[place], arena.back.get(offset), host)
        return host

    def wait_out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Let the computation go on only when the copy of ``tensor`` to ``host`` has ended, after which it may be freed."""
        self._wait(self._arena_of(host).out[int(host.storage_offset())])

    def copy_back(self, host: torch.Tensor, device: torch.device) -> Arriving[C]:
        """Queue a copy from ``host`` to fresh memory of ``device``; it begins when the copy out has ended."""
        arena, offset, n_bytes = self._arena_of(host), int(host.storage_offset()), host.numel()
        storage = torch.UntypedStorage(n_bytes, device=device)  # type: ignore[no-untyped-call]  # torch.empty may fill it
        target = _bytes_of(storage)
        copy = self._copy_back(arena.memory[offset : offset + n_bytes], target, arena.out[offset], host)
        arena.back[offset] = copy
        return Arriving(copy, target)

    def wait_back(
        self, arriving: Arriving[C], dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int
    ) -> torch.Tensor:
        """Let the computation go on when a copy back has ended; return the tensor, laid out as it was."""
        self._wait(arriving.copy)
        target = arriving.target
        return torch.empty(0, dtype=dtype, device=target.device).set_(target.untyped_storage(), storage_offset, size, stride)

    # -- arenas -------------------------------------------------------------------------------------------------------

    def _free_arena(self) -> HostArena[C] | None:
        return next((arena for arena in self._arenas.values() if arena.free), None)

    def _add_arena(self) -> HostArena[C]:
        arena: HostArena[C] = HostArena(self._new_memory(self.host_bytes))
        self._arenas[arena.address] = arena
        return arena

    def _arena_of(self, host: torch.Tensor) -> HostArena[C]:
        arena = self._arenas.get(host.untyped_storage().data_ptr())
        if arena is None:
            raise UsageError(
                "what the forward has saved on the host is not what the backward is given",
                why="it was replaced meanwhile: by torch.autograd.graph.saved_tensors_hooks, such as save_on_cpu",
                try_="the step without such hooks",
            )
        return arena

    # -- how copies run -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _new_memory(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory for one arena."""

    @abstractmethod
    def _copy_out(self, source: torch.Tensor, target: torch.Tensor, before: C | None, held: torch.Tensor) -> C:
        """Queue a copy to the host.

        Args:
            source: Bytes on the device.
            target: As many on the host.
            before: The last copy back from there, by an earlier step, which has to be done first.
            held: Kept alive until the copy is done, as are the two.
        """

    @abstractmethod
    def _copy_back(self, source: torch.Tensor, target: torch.Tensor, after: C, held: torch.Tensor) -> C:
        """Queue a copy to the device, which begins when ``after`` has ended."""

    @abstractmethod
    def _wait(self, copy: C) -> None:
        """Let the computation go on when ``copy`` has ended; from then on it holds nothing."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait until all copies that are queued have ended, and hold nothing."""


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
