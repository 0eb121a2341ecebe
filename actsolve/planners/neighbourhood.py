"""Large neighbourhood search: the program over segments with all but a stretch of them fixed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from actsolve.dag import Dag
from actsolve.planners.lp import Array, Outcome, Solution
from actsolve.planners.segment_starts import cuts_for, in_order, moments_over, replays_for, start_of
from actsolve.planners.segments import Moment, SegmentModel, decoded, segments_of
from actsolve.planners.sequence import Sequence

_STRETCH = 12  # segments that are free at first
_NARROWEST = 4
_SUB_S = 4.0  # seconds for one stretch

Solve = Callable[[SegmentModel, float, Array | None], Solution]


class Neighbourhood:
    """The surroundings of one schedule.

    Args:
        dag: What is run.
        sequence: Where to start; it need not fit.
        moments: At which memory is counted; more are added where a schedule is over the budget.
        width: Nearest ancestors that may run again for a node.
        solve: Solves a program within so many seconds, from a start.
    """

    def __init__(self, dag: Dag, sequence: Sequence, moments: set[Moment], width: int, solve: Solve) -> None:
        self.dag, self.moments, self.width, self._solve = dag, set(moments), width, solve
        self.sequence = in_order(sequence)
        self.exhausted = False  # whether all segments at once gave nothing better
        self._stretch = _STRETCH
        self._draw = random.Random(0)
        self._model: SegmentModel | None = None

    def go_to(self, sequence: Sequence) -> None:
        """Go on from ``sequence``, if it is better when its replays are in order."""
        sequence = in_order(sequence)
        if _worth(sequence) < _worth(self.sequence):
            self.sequence, self._model = sequence, None

    def improve(self, time_limit_s: float) -> Sequence:
        """Solve one stretch; return the schedule that it gives, better or not. `sequence` is the better one."""
        if self._model is None:
            self._build()
        if self._model is None:
            self.exhausted = True  # what its own schedule replays no model allows
            return self.sequence
        model = self._model.model
        lower, upper = model.column_lower, model.column_upper
        first, last = self._free()
        free = (self._spans[:, 1] >= first) & (self._spans[:, 0] <= last)
        model.column_lower = np.where(free, lower, np.maximum(lower, self._x)).tolist()
        model.column_upper = np.where(free, upper, np.minimum(np.maximum(self._x, lower), upper)).tolist()
        allowed_s = min(_SUB_S, time_limit_s)
        found = self._solve(self._model, allowed_s, self._x)
        model.column_lower, model.column_upper = lower, upper
        if found.outcome is not Outcome.OPTIMAL:
            self._stretch = max(_NARROWEST, self._stretch - 1)
        else:
            self._stretch = min(len(self._model.segments), self._stretch + 1)
        before = _worth(self.sequence)
        new = self.sequence if found.x is None else self._take(self._model, found.x)
        settled = self._model is not None and found.outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE)
        self.exhausted = settled and bool(free.all()) and _worth(self.sequence) == before
        return new

    def _take(self, model: SegmentModel, x: Array) -> Sequence:
        runner = self.sequence.runner
        nodes = decoded(self.dag, model.segments, model.live_after(x), model.again_in(x))
        new = runner.run(np.array(nodes, dtype=np.int64))
        more = moments_over(new) - self.moments
        better = _worth(new) <= _worth(self.sequence)  # also where it is only another one: a way out of where it is stuck
        if better:
            self.sequence = new
        if more:
            self.moments |= more
            self._model = None
        elif better:
            self._restart(model)
        return new

    def _build(self) -> None:
        for _ in range(2):
            segments = segments_of(self.dag, self.moments, self.width, also=replays_for(self.sequence))
            self._model = model = SegmentModel(self.dag, segments, elastic=True)
            self._spans = model.spans()
            self._restart(model)
            if self._model is not None:
                return
            self.moments |= cuts_for(model, self.sequence)

    def _restart(self, model: SegmentModel) -> None:
        x = start_of(model, self.sequence)
        if x is None:
            self._model = None  # what was better replays what this model has no column for
        else:
            self._x = x

    def _free(self) -> tuple[int, int]:
        """Return the first and last segment of the stretch: where the budget is exceeded most, or anywhere."""
        assert self._model is not None
        n = len(self._model.segments)
        over = [s for s, column in self._model.over.items() if self._x[column] > 1e-9]
        if over and self._draw.random() < 0.5:
            excess = [float(self._x[self._model.over[s]]) for s in over]
            centre = over[excess.index(max(excess))]
        elif over:
            centre = self._draw.choice(over)
        else:
            centre = self._draw.randrange(n)
        first = max(0, centre - self._draw.randint(0, self._stretch))
        return first, min(n - 1, first + self._stretch)


def _worth(sequence: Sequence) -> tuple[float, float]:
    """Less is better: bytes over the budget first, then time."""
    return sequence.excess, sequence.extra_time
