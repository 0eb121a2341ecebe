"""Two queues of copies, one per direction, in time: what a link does while a device computes.

Each direction works off its queue in order, at the speed that `Links` gives it: alone, or beside the other one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from actsolve.links import Links


@dataclass
class QueuedCopy:
    """A copy that was queued.

    Attributes:
        value: What is copied.
        out: From device to host, or back.
        remaining_bytes: What has not arrived yet.
        queued_s: When it was queued.
        began_s, ended_s: When its first byte left and its last byte arrived; None while that is to come.
    """

    value: int
    out: bool
    remaining_bytes: float
    queued_s: float
    began_s: float | None = None
    ended_s: float | None = None


class CopyQueues:
    """Both directions of a link.

    Attributes:
        now_s: The time up to which both queues have been worked off.
        copies: All that were queued, in order.
    """

    def __init__(self, links: Links) -> None:
        self.now_s = 0.0
        self.copies: list[QueuedCopy] = []
        self._links = links
        self._out: deque[QueuedCopy] = deque()
        self._back: deque[QueuedCopy] = deque()

    def queue(self, value: int, n_bytes: int, *, out: bool, at_s: float) -> QueuedCopy:
        """Queue a copy of ``n_bytes`` bytes at ``at_s``, which is not before `now_s`."""
        self.advance(at_s)
        copy = QueuedCopy(value, out, float(n_bytes), at_s)
        self.copies.append(copy)
        queue = self._out if out else self._back
        queue.append(copy)
        self._begin()
        return copy

    def wait(self, copy: QueuedCopy, at_s: float) -> float:
        """Return when ``copy`` has ended, or ``at_s`` if that is later; the queues are worked off until then."""
        self.advance(at_s)
        while copy.ended_s is None:
            self._advance_to_next_end()
        return max(at_s, copy.ended_s)

    def advance(self, to_s: float) -> None:
        """Work off the queues until ``to_s``."""
        while self.now_s < to_s and (self._out or self._back):
            if not self._advance_to_next_end(to_s):
                return
        self.now_s = max(self.now_s, to_s)

    def _advance_to_next_end(self, limit_s: float = float("inf")) -> bool:
        """Work until a copy ends, but not beyond ``limit_s``; return whether one did."""
        running = [queue[0] for queue in (self._out, self._back) if queue]
        beside = len(running) == 2
        speeds = [self._links.out(beside=beside) if copy.out else self._links.back(beside=beside) for copy in running]
        needed_s = [copy.remaining_bytes / speed for copy, speed in zip(running, speeds, strict=True)]
        first_s = min(needed_s)
        ends = self.now_s + first_s <= limit_s
        passed_s = first_s if ends else limit_s - self.now_s
        self.now_s = self.now_s + first_s if ends else limit_s
        for copy, speed, needed in zip(running, speeds, needed_s, strict=True):
            copy.remaining_bytes = max(0.0, copy.remaining_bytes - passed_s * speed)
            if ends and needed == first_s:
                copy.remaining_bytes, copy.ended_s = 0.0, self.now_s
                (self._out if copy.out else self._back).popleft()
        self._begin()
        return ends

    def _begin(self) -> None:
        for queue in (self._out, self._back):
            if queue and queue[0].began_s is None:
                queue[0].began_s = self.now_s
