"""Which engine copies, for a device."""

from __future__ import annotations

from typing import Any

import torch

from actsolve.errors import ScheduleError, UsageError
from actsolve.links import Links
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.cuda_engine import CudaEngine
from actsolve.runtime.emulated_engine import EmulatedEngine


def new_engine(device: torch.device, links: Links | None, options: CopyOptions) -> CopyEngine[Any]:
    """Return an engine for values on ``device``.

    Args:
        device: A CUDA device, or the CPU, whose link is emulated.
        links: How fast an emulated link is.
        options: For experiments and tests.

    Raises:
        UsageError: there is no engine for such a device, or it cannot do what `options` ask for.
        ScheduleError: a link is to be emulated and none is known.
    """
    if device.type == "cuda":
        if options.speed != 1 or options.delay is not None:
            raise UsageError(f"the link of {device} cannot be slowed down", why="speed and delay are of emulated links")
        return CudaEngine(device, options)
    if device.type != "cpu":
        raise UsageError(f"nothing can be offloaded from {device}", why="there are copy engines for CUDA and CPU only")
    if links is None:
        raise ScheduleError("a schedule copies, and no link is known", where=str(device))
    return EmulatedEngine(links, options)
