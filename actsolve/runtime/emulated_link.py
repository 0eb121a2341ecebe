"""A link between device and host that a machine without one has: copies that run beside the computation, at a given speed.

One worker thread per direction copies into other memory, in order and a piece at a time, and waits after each piece until as
much time has passed as a link of that speed takes. So overlap, stalls, late copies and races are real. While the other direction
is busy, too, a piece takes as long as `Links` says.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch

from actsolve.links import Links

_PIECE_BYTES = 256 << 10
_NAP_S = 2e-4  # sleeping is rougher than this: what is missing is waited for with the next piece


@dataclass
class Copy:
    """One copy, queued or done.

    Attributes:
        n_bytes: How many it copies.
        began_s, ended_s: `time.perf_counter` when it began and when the last byte had arrived; None before.
    """

    n_bytes: int
    began_s: float | None = None
    ended_s: float | None = None
    _source: torch.Tensor | None = field(default=None, repr=False)
    _target: torch.Tensor | None = field(default=None, repr=False)
    _after: Copy | None = field(default=None, repr=False)
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether all of it has arrived."""
        return self._done.is_set()


class EmulatedLink:
    """Copies in both directions, each first in, first out.

    >>> with EmulatedLink(Links(d2h=25e9, h2d=25e9)) as link:
    ...     copy = link.copy_out(value, host)
    ...     link.wait(copy)
    """

    def __init__(self, links: Links) -> None:
        self._out = _Direction("actsolve-out", lambda: links.out(beside=self._back.busy))
        self._back = _Direction("actsolve-back", lambda: links.back(beside=self._out.busy))

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        """Queue a copy from device to host. The source must not change or be freed before it is done."""
        return self._out.queue(source, target, None)

    def copy_back(self, source: torch.Tensor, target: torch.Tensor, after: Copy | None = None) -> Copy:
        """Queue a copy from host to device. It begins when ``after``, the copy out of the same value, is done."""
        return self._back.queue(source, target, after)

    def wait(self, copy: Copy) -> float:
        """Wait until ``copy`` is done; return the seconds that took.

        Raises:
            RuntimeError: it failed; the cause is attached.
        """
        start = time.perf_counter()
        copy._done.wait()
        if copy._error is not None:
            raise RuntimeError(f"a copy of {copy.n_bytes} bytes failed") from copy._error
        return time.perf_counter() - start

    def close(self) -> None:
        """End the worker threads, once the queues are empty."""
        self._out.close()
        self._back.close()

    def __enter__(self) -> EmulatedLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Direction:
    """A queue of copies and the thread that works it off."""

    def __init__(self, name: str, bytes_per_s: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._waiting: deque[Copy] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._due_s = 0.0  # when the link would be done with what it has copied
        self.busy = False  # a copy is on its way; read by the other direction
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def queue(self, source: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(f"a copy of {source.dtype}{list(source.shape)} to {target.dtype}{list(target.shape)}")
        if not source.is_contiguous() or not target.is_contiguous():
            raise ValueError("a copy between tensors that are not contiguous: pass their storages as flat tensors")
        copy = Copy(source.numel() * source.element_size(), _source=source, _target=target, _after=after)
        with self._wake:
            if self._closed:
                raise RuntimeError("the link is closed")
            self._waiting.append(copy)
            self._wake.notify()
        return copy

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                copy = self._waiting.popleft()
            try:
                if copy._after is not None:
                    copy._after._done.wait()
                self.busy = True
                self._run(copy)
            except BaseException as error:  # told to whoever waits, for nobody else sees this thread
                copy._error = error
            finally:
                self.busy = False
                copy._source = copy._target = copy._after = None
                copy._done.set()

    def _run(self, copy: Copy) -> None:
        assert copy._source is not None and copy._target is not None
        source = copy._source.detach().view(-1).view(torch.uint8)
        target = copy._target.detach().view(-1).view(torch.uint8)
        copy.began_s = time.perf_counter()
        self._due_s = max(self._due_s, copy.began_s)
        for start in range(0, copy.n_bytes, _PIECE_BYTES):
            piece = slice(start, min(start + _PIECE_BYTES, copy.n_bytes))
            target[piece].copy_(source[piece])
            self._due_s += (piece.stop - piece.start) / self._bytes_per_s()
            missing_s = self._due_s - time.perf_counter()
            if missing_s > _NAP_S:
                time.sleep(missing_s)
        copy.ended_s = time.perf_counter()
