"""A link between device and host that a machine without one has: copies that run beside the computation, at a given speed.

One worker thread per direction copies into other memory, in order and a piece at a time, and waits after each piece until as
much time has passed as a link of that speed takes. So overlap, stalls, late copies and races are real. While the other direction
is busy, too, a piece takes as long as `Links` says.

A thread begins with the first copy in its direction, and ends when the link is closed or dropped: it refers to its queue, not to
the link. What is queued when a link is dropped is not copied, for nobody can wait for it any more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from actsolve.links import Links

_PIECE_BYTES = 256 << 10
_NAP_S = 2e-4  # sleeping is rougher than this: what is missing is waited for with the next piece

Delay = Callable[[], float]
"""Seconds to wait before a piece is copied: for tests, of copies that come late."""


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
    _held: object = field(default=None, repr=False)
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

    def __init__(self, links: Links, delay: Delay | None = None) -> None:
        self._out = out = _Direction("actsolve-out", delay)
        self._back = back = _Direction("actsolve-back", delay)
        out.bytes_per_s = lambda: links.out(beside=back.busy)
        back.bytes_per_s = lambda: links.back(beside=out.busy)
        weakref.finalize(self, _drop, out, back)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, *, held: object = None) -> Copy:
        """Queue a copy from device to host. The source must not change or be freed before it is done.

        Args:
            source: On the device.
            target: On the host.
            held: What is kept alive until the copy is done, besides the two.
        """
        return self._out.queue(source, target, None, held)

    def copy_back(self, source: torch.Tensor, target: torch.Tensor, after: Copy | None = None, *, held: object = None) -> Copy:
        """Queue a copy from host to device. It begins when ``after``, the copy out of the same value, is done."""
        return self._back.queue(source, target, after, held)

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

    def settle(self) -> None:
        """Wait until both queues are empty."""
        self._out.settle()
        self._back.settle()

    def close(self) -> None:
        """End the worker threads, once the queues are empty."""
        self._out.close()
        self._back.close()

    def __enter__(self) -> EmulatedLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _drop(*directions: _Direction) -> None:
    for direction in directions:
        direction.discard()
    for direction in directions:
        direction.join()


class _Direction:
    """A queue of copies and the thread that works it off.

    Attributes:
        bytes_per_s: The speed of now.
        busy: A copy is on its way; read by the other direction.
    """

    def __init__(self, name: str, delay: Delay | None) -> None:
        self.bytes_per_s: Callable[[], float] = lambda: float("inf")
        self.busy = False
        self._name = name
        self._delay = delay
        self._waiting: deque[Copy] = deque()
        self._last: Copy | None = None
        self._wake = threading.Condition()
        self._closed = self._dropped = False
        self._due_s = 0.0  # when the link would be done with what it has copied
        self._thread: threading.Thread | None = None

    def queue(self, source: torch.Tensor, target: torch.Tensor, after: Copy | None, held: object) -> Copy:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(f"a copy of {source.dtype}{list(source.shape)} to {target.dtype}{list(target.shape)}")
        if not source.is_contiguous() or not target.is_contiguous():
            raise ValueError("a copy between tensors that are not contiguous: pass their storages as flat tensors")
        n_bytes = source.numel() * source.element_size()
        copy = Copy(n_bytes, _source=source, _target=target, _after=after, _held=held)
        with self._wake:
            if self._closed:
                raise RuntimeError("the link is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._waiting.append(copy)
            self._last = copy
            self._wake.notify()
        return copy

    def settle(self) -> None:
        if self._last is not None:
            self._last._done.wait()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self.join()

    def discard(self) -> None:
        """End after the piece that is being copied."""
        with self._wake:
            self._closed = self._dropped = True
            self._waiting.clear()
            self._wake.notify()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():  # the garbage collector may run in any thread
            thread.join()

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
                    if copy._after._error is not None:
                        raise RuntimeError("the copy out of the same value failed") from copy._after._error
                self.busy = True
                self._run(copy)
            except BaseException as error:  # told to whoever waits, for nobody else sees this thread
                copy._error = error
            finally:
                self.busy = False
                copy._source = copy._target = copy._after = copy._held = None
                copy._done.set()
            del copy

    def _run(self, copy: Copy) -> None:
        assert copy._source is not None and copy._target is not None
        source, target = _bytes_of(copy._source), _bytes_of(copy._target)
        copy.began_s = time.perf_counter()
        self._due_s = max(self._due_s, copy.began_s)
        for start in range(0, copy.n_bytes, _PIECE_BYTES):
            if self._dropped:
                raise RuntimeError("the link was dropped")
            if self._delay is not None:
                time.sleep(self._delay())
            piece = slice(start, min(start + _PIECE_BYTES, copy.n_bytes))
            np.copyto(target[piece], source[piece])  # one thread's work: torch would share it out, and stop the computation's
            self._due_s += (piece.stop - piece.start) / self.bytes_per_s()
            missing_s = self._due_s - time.perf_counter()
            if missing_s > _NAP_S:
                time.sleep(missing_s)
        copy.ended_s = time.perf_counter()


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()
