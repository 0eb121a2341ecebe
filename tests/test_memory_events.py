"""Known allocations are measured to the byte."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import torch
import torch.nn.functional as F

from actsolve.runtime.memory_events import MemoryRecorder, measure_peak, peak_of

KIB = 1024


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_peak_and_end_of_known_allocations() -> None:
    def run() -> torch.Tensor:
        first = block(3 * KIB)
        second = block(5 * KIB)
        del first
        third = block(KIB)
        del second
        return third

    measured = measure_peak(run)
    assert measured.peak_bytes == 8 * KIB
    assert measured.end_bytes == KIB
    assert measured.result.numel() == KIB
    assert [live for _, live in measured.timeline] == [3 * KIB, 8 * KIB, 5 * KIB, 6 * KIB, KIB]


def test_frees_of_what_was_there_before_are_not_seen() -> None:
    """A limit of the profiler, which callers must know: it holds sizes only of what it saw allocated.

    A large block, for the profiler does not forget an address that it saw in an earlier measurement.
    """
    held = [block(64 * KIB * KIB)]

    def run() -> torch.Tensor:
        held.clear()
        return block(KIB)

    measured = measure_peak(run)
    assert (measured.peak_bytes, measured.end_bytes) == (KIB, KIB)


def test_nothing_allocated() -> None:
    measured = measure_peak(lambda: 7)
    assert (measured.peak_bytes, measured.end_bytes, measured.result, measured.timeline) == (0, 0, 7, ())


def test_autograd_backward_is_seen() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    loss = (x * x).sum()
    measured = measure_peak(loss.backward)
    assert x.grad is not None
    assert measured.peak_bytes >= x.grad.nbytes
    assert measured.end_bytes >= x.grad.nbytes


def test_workspace_inside_a_kernel_is_seen() -> None:
    x, weight = torch.randn(2, 16, 32, 32), torch.randn(16, 16, 3, 3)
    measured = measure_peak(lambda: F.conv2d(x, weight, padding=1))
    assert measured.end_bytes == measured.result.nbytes
    assert measured.peak_bytes > measured.end_bytes


def test_regions_of_one_profile_start_at_zero_each() -> None:
    kept = []
    with MemoryRecorder() as recorder:
        for size in (100, 7, 3000):
            block(size)  # outside
            with recorder.region():
                kept.append(block(size))
                block(size)
    assert [peak_of(t) for t in recorder.timelines()] == [200, 14, 6000]
    assert [t[-1][1] for t in recorder.timelines()] == [100, 7, 3000]


def test_measures_again_after_an_error() -> None:
    def fail() -> None:
        block(10)
        raise ValueError("on purpose")

    with contextlib.suppress(ValueError):
        measure_peak(fail)
    assert measure_peak(lambda: block(10)).peak_bytes == 10


def test_prints_nothing() -> None:
    code = "import torch\nfrom actsolve.runtime.memory_events import measure_peak\nmeasure_peak(lambda: torch.empty(10))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
