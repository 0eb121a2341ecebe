"""A schedule that fits, improved by taking a few of its replays away, and making what that leaves fit again.

That is worth it where much runs again, several times, in no order: there a program over segments says little.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from actsolve.planners.repair import cleaned, repaired
from actsolve.planners.sequence import Sequence

_FEW = (1, 1, 1, 2, 2, 3, 5)  # replays taken away at once
_TRY_S = 1.0  # to make one fit
_CLEANED = 1.1  # times the extra time of the best: as much is looked at for what it can do without
_PATIENCE = 200  # tries in vain


class Shaken:
    """The surroundings of the best schedule; draws are the same each time."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def improve(self, sequence: Sequence, done: Callable[[Sequence], bool], deadline: float) -> Sequence:
        """Return the best that was found from ``sequence``, which fits, until ``done``, the deadline, or many tries in vain.

        What takes as long is gone on from as well.
        """
        vain = 0
        while sequence.again.any() and vain < _PATIENCE and not done(sequence) and time.perf_counter() < deadline:
            new = self._tried(sequence, min(deadline, time.perf_counter() + _TRY_S))
            vain += 1
            if new is not None and new.extra_time <= sequence.extra_time:
                vain = 0 if new.extra_time < sequence.extra_time else vain
                sequence = new
        return sequence

    def _tried(self, sequence: Sequence, deadline: float) -> Sequence | None:
        again = np.flatnonzero(sequence.again)
        few = self._draw.choice(_FEW)
        if self._draw.random() < 0.5:
            gone = self._draw.sample(again.tolist(), min(few, len(again)))
        else:
            first = self._draw.randrange(len(again))
            gone = again[first : first + few].tolist()
        noise = self._draw.choice((0.0, 1.0))
        new = repaired(sequence.runner.run(np.delete(sequence.nodes, gone)), deadline, noise, self._draw)
        return None if new is None or new.extra_time > _CLEANED * sequence.extra_time else cleaned(new, deadline)
