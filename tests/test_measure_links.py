"""Measuring a link: the arithmetic on a clock of its own, and the whole of it on the emulated link."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actsolve.copy_queues import CopyQueues, QueuedCopy
from actsolve.cost import measure_links as module
from actsolve.cost.measure_links import Blocks, CopySeconds, copy_seconds, measure_links
from actsolve.cost.measured_cache import MeasuredCache
from actsolve.errors import UsageError
from actsolve.links import Links
from actsolve.runtime.emulated_link import EmulatedLink

SPEED = st.floats(1e6, 1e11)
MB = 1_000_000


def blocks(n_bytes: int) -> Blocks:
    return Blocks(*(torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(4)))


class Fluid:
    """A link in simulated time, of which each third copy is late."""

    def __init__(self, links: Links, late_s: float = 0.0) -> None:
        self.queues, self.now_s, self.late_s, self.n_waits = CopyQueues(links), 0.0, late_s, 0

    def clock(self) -> float:
        return self.now_s

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> QueuedCopy:
        return self.queues.queue(0, source.numel(), out=True, at_s=self.now_s)

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> QueuedCopy:
        return self.queues.queue(0, source.numel(), out=False, at_s=self.now_s)

    def wait(self, copy: QueuedCopy) -> None:
        self.now_s = self.queues.wait(copy, self.now_s)
        self.n_waits += 1
        self.now_s += self.late_s if self.n_waits % 3 == 0 else 0.0


def measured(links: Links, late_s: float = 0.0) -> Links:
    fluid = Fluid(links, late_s)
    return copy_seconds(fluid, blocks(MB), clock=fluid.clock).links(MB)


@given(SPEED, SPEED, st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_the_speeds_of_a_fluid_are_found(d2h: float, h2d: float, out_share: float, back_share: float) -> None:
    links = Links(d2h, h2d, d2h * out_share, h2d * back_share)
    found = measured(links)
    assert (found.d2h, found.h2d) == pytest.approx((d2h, h2d))
    assert (found.d2h_both, found.h2d_both) == pytest.approx((links.d2h_both, links.h2d_both), rel=1e-3)


def test_a_link_of_which_nothing_is_known_is_found_to_be_shared() -> None:
    found = measured(Links(4e9, 4e9))
    assert (found.d2h, found.h2d, found.d2h_both, found.h2d_both) == pytest.approx((4e9, 4e9, 2e9, 2e9))


def test_a_copy_that_is_late_now_and_then_does_not_count() -> None:
    assert measured(Links(24e9, 25e9, 20e9, 11e9), late_s=1.0).d2h == pytest.approx(24e9)


def test_noise_gives_no_impossible_speed() -> None:
    """Faster beside each other than alone; or one direction stands still until the other has ended, and longer."""
    assert CopySeconds(1.0, 1.0, 0.9, 0.9).links(100) == Links(100, 100, 100, 100)
    assert CopySeconds(1.0, 1.0, 1.0, 2.5).links(100) == Links(100, 100, 100, 1)
    assert CopySeconds(1.0, 2.0, 4.0, 2.0).links(100) == Links(100, 50, 1, 50)


def test_the_emulated_link_is_measured() -> None:
    """Slow, so that its threads sleep for most of the time; a busy machine makes it slower yet, never faster."""
    true = Links(d2h=80 * MB, h2d=60 * MB, d2h_both=50 * MB, h2d_both=30 * MB)
    with EmulatedLink(true) as link:
        found = copy_seconds(link, blocks(3 * MB), repeats=5).links(3 * MB)
    for name, tolerance in (("d2h", 0.25), ("h2d", 0.25), ("d2h_both", 0.35), ("h2d_both", 0.35)):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=tolerance), name


def test_blocks_are_copied() -> None:
    some = blocks(1000)
    some.device_out.fill_(3)
    some.host_back.fill_(5)
    with EmulatedLink(Links(1e12, 1e12)) as link:
        copy_seconds(link, some, repeats=1)
    assert some.host_out.eq(3).all() and some.device_back.eq(5).all()


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a fluid here: 24 and 25 GB/s, and pageable memory the same."""
    links, asked = Links(24e9, 25e9, 20e9, 11e9), []

    def fluid_seconds(_link: object, some: Blocks, *, beside: bool) -> CopySeconds:
        asked.append(beside)
        fluid = Fluid(links)
        return copy_seconds(fluid, blocks(module._BLOCK_BYTES), beside=beside, clock=fluid.clock)

    monkeypatch.setattr(module, "require_device", lambda _: None)
    monkeypatch.setattr(module, "device_name", lambda _: "a fluid")
    monkeypatch.setattr(module, "undisturbed", lambda _: EmulatedLink(links))  # any context will do
    monkeypatch.setattr(module, "_cuda_link", lambda _: EmulatedLink(links))
    monkeypatch.setattr(module, "_blocks", lambda _, pinned: blocks(8))
    monkeypatch.setattr(module, "_BLOCK_BYTES", MB)
    monkeypatch.setattr(module, "copy_seconds", fluid_seconds)
    cache = MeasuredCache("a fluid", tmp_path)
    first = measure_links(torch.device("cpu"), cache=cache)
    assert asked == [True, False]
    begin = time.perf_counter()
    assert measure_links(torch.device("cpu"), cache=cache) == first and asked == [True, False]
    assert time.perf_counter() - begin < 5
    assert first.pinned.h2d_both == pytest.approx(11e9, rel=1e-3) and first.pageable.d2h == pytest.approx(24e9)
    assert first.source == "measured on a fluid; 24 GB/s out and 25 GB/s back without pinning"
    cache.path.write_text("{")  # rebuilt
    assert measure_links(torch.device("cpu"), cache=cache) == first and asked == [True, False] * 2


def test_a_device_that_is_not_here_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(UsageError, match="it is not here"):
        measure_links(torch.device("cuda"))
