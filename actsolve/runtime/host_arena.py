"""Host memory for what one forward offloads, used again by every later one.

A forward gets a *lease*: a tensor whose storage is its own and whose bytes are the arena's. What is saved for the backward are
views of it; when the last one is gone, be it after the backward or because nobody asked for one, the arena is free again.
Copies do not write through the lease but through `HostArena.memory`: autograd would take their writes, which come after the
forward has saved its tensors, for a change of what was saved.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

C = TypeVar("C")


class HostArena(Generic[C]):
    """One block of host memory.

    Attributes:
        memory: All of it, for copies.
        out: By offset, the latest copy out to there.
        back: By offset, the latest copy back from there.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = torch.from_numpy(memory)
        self.out: dict[int, C] = {}
        self.back: dict[int, C] = {}
        self._array = memory
        self._leased: StorageWeakRef | None = None

    @property
    def address(self) -> int:
        """Where it begins: that of each lease's storage."""
        return self.memory.data_ptr()

    @property
    def free(self) -> bool:
        """Whether no tensor of a lease is left."""
        return self._leased is None or self._leased.expired()  # type: ignore[no-untyped-call]

    def lease(self) -> torch.Tensor:
        """Return all of it as a tensor with a storage of its own."""
        assert self.free
        leased = torch.from_numpy(self._array)
        self._leased = StorageWeakRef(leased.untyped_storage())  # type: ignore[no-untyped-call]
        return leased
