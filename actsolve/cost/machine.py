"""This machine: what it is called, what else timings depend on, and how much memory is free."""

from __future__ import annotations

import platform
from math import inf
from pathlib import Path

import torch

from actsolve.errors import UsageError
from actsolve.runtime import kernels


def device_name(device: torch.device) -> str:
    """Return the model of ``device``, such as ``NVIDIA A100-SXM4-80GB`` or ``AMD EPYC 7B13``."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def require_device(device: torch.device) -> None:
    """Raise `UsageError` unless kernels can be measured on ``device`` here."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"cannot measure on {device}", why="only cpu and cuda can be measured", try_="--hardware with a profile's name"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"cannot measure on {device}", why="it is not here", try_="--hardware with a profile's name")


def environment(device: torch.device) -> str:
    """Return all that a measured figure depends on besides the op: device, torch, threads and torch's global settings."""
    settings = [
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        f"cpu {torch.backends.cpu.get_cpu_capability()}",
        f"float32 matmul {torch.get_float32_matmul_precision()}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"mkldnn {torch.backends.mkldnn.enabled}",
        f"kernels {kernels.VERSION}",
    ]
    if device.type == "cuda":
        settings += [
            f"cuda {torch.version.cuda}",
            f"cudnn benchmark {torch.backends.cudnn.benchmark}, tf32 {torch.backends.cudnn.allow_tf32}",
        ]
    return "; ".join([f"{device.type} {device_name(device)}", *settings])


def free_bytes(device: torch.device) -> float:
    """Return how much more memory can be taken on ``device``; infinite if it cannot be told.

    On a CPU the container's limit counts (cgroup v2, or v1) as well as what the host has.
    """
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = [inf]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for group, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        numbers = [line for name in (limit, used) for line in _lines(f"{group}/{name}")[:1]]
        if len(numbers) == 2 and all(n.isdigit() for n in numbers):  # "max" where there is no limit
            cached = [int(line.split()[1]) for line in _lines(f"{group}/memory.stat") if line.startswith("inactive_file ")]
            free.append(int(numbers[0]) - int(numbers[1]) + sum(cached))  # the kernel gives up cached files when asked
    return max(0.0, min(free))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
