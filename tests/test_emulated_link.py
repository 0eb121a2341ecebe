"""The emulated link: what it copies, in which order, and that it is never faster than it says."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from actsolve.links import Links
from actsolve.runtime.emulated_link import EmulatedLink

MB = 1_000_000
SLOW = Links(d2h=200 * MB, h2d=100 * MB, d2h_both=150 * MB, h2d_both=50 * MB)
FAST = Links(d2h=1e12, h2d=1e12)


def block(n_bytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((n_bytes,), value, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (700, 301)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_what_goes_out_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape).to(dtype)
    host, again = torch.empty_like(value), torch.empty_like(value)
    with EmulatedLink(FAST) as link:
        out = link.copy_out(value, host)
        link.wait(link.copy_back(host, again, after=out))
    assert out.done and torch.equal(again, value)


def test_it_is_not_faster_than_the_link_and_waits_are_told() -> None:
    blocks = [(block(4 * MB), block(4 * MB)) for _ in range(3)]
    with EmulatedLink(SLOW) as link:
        begin = time.perf_counter()
        copies = [link.copy_out(*pair) for pair in blocks]
        assert time.perf_counter() - begin < 0.05  # queued, not copied
        waited_s = link.wait(copies[-1])
    took_s = copies[-1].ended_s - copies[0].began_s  # type: ignore[operator]
    assert took_s > 0.98 * 12 * MB / SLOW.d2h
    assert waited_s == pytest.approx(took_s, abs=0.05)
    assert [c.began_s for c in copies] == sorted(c.began_s for c in copies)  # type: ignore[type-var]


def test_directions_slow_each_other() -> None:
    with EmulatedLink(SLOW) as link:
        alone = link.copy_back(block(4 * MB), block(4 * MB))
        link.wait(alone)
        out = link.copy_out(block(40 * MB), block(40 * MB))
        beside = link.copy_back(block(4 * MB), block(4 * MB))
        link.wait(beside)
        assert not out.done
        link.wait(out)
    alone_s, beside_s = (c.ended_s - c.began_s for c in (alone, beside))  # type: ignore[operator]
    assert alone_s > 0.98 * 4 * MB / SLOW.h2d
    assert beside_s > 0.9 * 4 * MB / SLOW.h2d_both  # type: ignore[operator]


def test_a_copy_back_waits_for_its_copy_out() -> None:
    value, host, again = block(8 * MB, 7), block(8 * MB, 0), block(8 * MB, 0)
    with EmulatedLink(SLOW) as link:
        out = link.copy_out(value, host)
        back = link.copy_back(host, again, after=out)
        link.wait(back)
    assert back.began_s >= out.ended_s  # type: ignore[operator]
    assert torch.equal(again, value)


def test_what_does_not_fit_is_refused() -> None:
    with EmulatedLink(FAST) as link:
        with pytest.raises(ValueError, match="uint8"):
            link.copy_out(block(3), block(4))
        with pytest.raises(ValueError, match="not contiguous"):
            link.copy_out(torch.ones(4, 4).t(), torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="closed"):
        link.copy_out(block(3), block(3))


def test_a_failed_copy_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the host is out of memory")

    with EmulatedLink(FAST) as link:
        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", fail)
            copy = link.copy_out(block(64), block(64))
            with pytest.raises(RuntimeError, match="64 bytes failed") as error:
                link.wait(copy)
        assert isinstance(error.value.__cause__, OSError)
        target = block(64, 0)
        link.wait(link.copy_out(block(64), target))  # the link goes on
    assert torch.equal(target, block(64))


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("actsolve")]


def test_a_thread_begins_with_the_first_copy_and_ends_when_the_link_is_dropped() -> None:
    gc.collect()  # links of other tests
    link = EmulatedLink(SLOW)
    assert threads() == []
    link.copy_out(block(64), block(64))
    assert threads() == ["actsolve-out"]
    link.copy_back(block(100 * MB), block(100 * MB))
    begin = time.perf_counter()
    del link
    assert threads() == []
    assert time.perf_counter() - begin < 0.5, "what is queued is not copied"


def test_a_copy_back_after_a_copy_out_that_failed_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the host is out of memory")

    with EmulatedLink(FAST) as link:
        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", fail)
            out = link.copy_out(block(64), block(64))
            with pytest.raises(RuntimeError):
                link.wait(out)
        with pytest.raises(RuntimeError, match="64 bytes failed"):
            link.wait(link.copy_back(block(64), block(64), after=out))


def test_what_is_held_is_held_until_the_copy_is_done() -> None:
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    with EmulatedLink(SLOW) as link:
        copy = link.copy_out(block(4 * MB), block(4 * MB), held=held)
        del held
        assert alive() is not None
        link.wait(copy)
        assert alive() is None
