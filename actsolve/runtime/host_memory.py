"""How much memory the host can still give, and memory of it for what is offloaded.

What is available is the least of what the kernel says of the machine (``MemAvailable``) and what each control group of this
process leaves under its limit, version 1 or 2. Page cache that is not in use counts as available, as it does for the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actsolve.errors import UsageError
from actsolve.units import format_bytes

# Per version: the limit, what is in use, and how memory.stat calls the page cache that is not in use.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes of host memory this process can still take, at least 0.

    Where there is no ``/proc/meminfo`` it is all memory of the machine.

    Args:
        proc: Where the kernel tells of processes.
        cgroups: Where control groups are mounted.
    """
    return max(0, min([_machine_bytes(proc), *_left_in_cgroups(proc, cgroups)]))


def new_host_memory(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return ``n_bytes`` of host memory: it begins with a page, shares none with other memory, and is there already.

    Raises:
        UsageError: the host does not have so much left.
    """
    available = available_host_bytes()
    if n_bytes > available:
        raise UsageError(
            f"{format_bytes(n_bytes)} of host memory are needed for what is offloaded",
            why=f"{format_bytes(available)} ({available} bytes) are available",
            try_=f"a host budget of at most {format_bytes(available)}",
        )
    page = os.sysconf("SC_PAGE_SIZE")
    whole = np.empty(-(-n_bytes // page) * page + page, dtype=np.uint8)
    start = -whole.ctypes.data % page
    memory: npt.NDArray[np.uint8] = whole[start : start + n_bytes]
    memory.fill(0)  # takes the pages now: the first copy into them is as fast as the others
    return memory


def _machine_bytes(proc: Path) -> int:
    meminfo = proc / "meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each group that this process is in, and each group above it, leaves under its limit."""
    membership = proc / "self" / "cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path is often that of the host, and does not exist here: the mount's root is then our group.
        for directory in (group, *(d for d in group.parents if d.is_relative_to(root))):
            left = _left_in(directory, *names)
            if left is not None:
                yield left


def _left_in(directory: Path, limit_file: str, usage_file: str, cache: str) -> int | None:
    """Return what is left under the limit of one group; None where it has none."""
    if not (directory / limit_file).exists() or not (directory / usage_file).exists():
        return None
    limit = (directory / limit_file).read_text().strip()
    if limit == "max":
        return None
    stat = directory / "memory.stat"
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(limit) - int((directory / usage_file).read_text()) + int(fields.get(cache, 0))
