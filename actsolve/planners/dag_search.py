"""Any node again, any number of times: schedules by a program over segments, a global lower bound, and a search around the best.

Three ways, each on what the others left:

- *whole*: the program over all segments, with moments added where its schedule is over the budget, until it fits. Its optimum is
  that of its class. Where all nodes may run again anywhere and memory is counted at first runs only, its bound is global.
- *around*: the same program with all but a stretch of segments fixed to the best schedule so far. It is elastic: as long as nothing
  fits, it lessens what is over the budget.
- *global*: the program that bounds every schedule, with as many moments as time allows.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np

from actsolve.dag import Dag
from actsolve.planners.lp import Array, Limits, Outcome, Solution, solve
from actsolve.planners.neighbourhood import Neighbourhood
from actsolve.planners.options import PlannerOptions
from actsolve.planners.repair import cleaned, repaired
from actsolve.planners.segment_starts import in_order, moments_over, replays_for, start_of
from actsolve.planners.segments import Moment, Segment, SegmentModel, decoded, segments_of
from actsolve.planners.sequence import Runner, Sequence

STEP_GAP = 0.0005  # of all time: a schedule that near to the bound is optimal
_WIDTHS = (16, 48)  # nearest ancestors that may run again for a node
_SMALL = 6000  # columns of a program that is solved as a whole, all ancestors allowed
_GLOBAL = 20_000  # columns of the program for the bound
_REPAIR_S = 1.0


@dataclass(frozen=True)
class DagPlan:
    """What was found.

    Attributes:
        sequence: The best schedule that fits, or None.
        bound: Proven least time of replays, over all schedules with this order of first runs.
        infeasible: Why no schedule can fit, if that is proven.
        interrupted: Whether the user stopped it.
    """

    sequence: Sequence | None
    bound: float
    infeasible: str = ""
    interrupted: bool = False


def plan_dag(dag: Dag, options: PlannerOptions, seed: Sequence | None = None) -> DagPlan:
    """Return the schedule of least time that was found within the budget, and the least time that is proven to be needed.

    Args:
        dag: What is to be run.
        options: When to stop; the solver.
        seed: A schedule to start from.

    Raises:
        SolverError: the solver asked for is missing or fails.
    """
    search = DagSearch(dag, options)
    if reason := too_large(dag):
        return DagPlan(None, 0.0, reason)
    search.take(search.runner.run(np.arange(dag.n_nodes)))
    if seed is not None:
        search.take(seed)
    search.run()
    return DagPlan(search.best, search.bound, search.infeasible, search.interrupted)


def too_large(dag: Dag) -> str:
    """Return which node's own run does not fit, if one does not; else nothing."""
    worst = max(range(dag.n_nodes), key=dag.needs, default=None)
    if worst is None or dag.needs(worst) <= dag.budget_bytes:
        return ""
    return f"{dag.names[worst]} alone needs {dag.needs(worst)} bytes: what it reads, makes, and what is there anyway"


class DagSearch:
    """A search for the schedule of least time.

    Attributes:
        best: The best schedule that fits.
        bound: Proven least time of replays.
        infeasible: Why nothing fits, if that is proven.
    """

    def __init__(self, dag: Dag, options: PlannerOptions) -> None:
        self.dag, self.options = dag, options
        self.runner = Runner(dag)
        self.best: Sequence | None = None
        self.nearest: Sequence | None = None  # what exceeds the budget least, until something fits
        self.bound = 0.0
        self.infeasible = ""
        self.interrupted = False
        self.moments: set[Moment] = set()
        self.begin = time.perf_counter()
        self.deadline = self.begin + options.time_limit_s
        self._draw = random.Random(0)

    # -- what was found -----------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence) -> bool:
        """Keep ``sequence`` if it is the best so far; return whether it is."""
        if not sequence.fits:
            self.moments |= moments_over(sequence)
            if self.nearest is None or sequence.excess < self.nearest.excess:
                self.nearest = sequence
                return self.best is None
            return False
        if self.best is not None and sequence.extra_time >= self.best.extra_time:
            return False
        self.best = cleaned(sequence, min(self.deadline, time.perf_counter() + _REPAIR_S))
        return True

    @property
    def done(self) -> bool:
        """Whether the best is near enough to the bound, or nothing can fit, or time is up."""
        if self.interrupted or self.infeasible or time.perf_counter() > self.deadline:
            return True
        if self.best is None:
            return False
        gap = self.best.extra_time - self.bound
        return gap <= self.options.gap / 10 * self.best.extra_time or gap <= STEP_GAP / 5 * sum(self.dag.time)

    def _until(self, share: float) -> float:
        """Seconds left until a share of the time limit has passed."""
        return max(0.0, self.begin + share * self.options.time_limit_s - time.perf_counter())

    def _solve(self, model: SegmentModel, time_limit_s: float, gap: float, start: Array | None = None) -> Solution:
        limits = Limits(gap, 1e-6, max(0.1, time_limit_s), self.options.threads, sub_mips=True)
        found = solve(model.model, self.options.solver, limits, start, None)
        self.interrupted |= found.interrupted
        if self.options.progress is not None:
            extra = None if self.best is None else self.best.extra_time
            self.options.progress(time.perf_counter() - self.begin, extra, self.bound)
        return found

    # -- the search ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Search until it is `done`."""
        if self.done or not self.moments:
            return
        if self._columns(self._first_moments(), None) <= _SMALL:
            self.prove(0.2)
        self.whole(_WIDTHS[0], 0.45)
        self.whole(_WIDTHS[1], 0.55)
        self.around(0.7 if self.best is not None else 0.85)
        self.prove(0.9)
        self.around(1.0)

    def _first_moments(self) -> set[Moment]:
        return {m for m in self.moments if m.replay is None}

    def _columns(self, moments: set[Moment], width: int | None) -> int:
        """About how many columns the program over these moments has."""
        return 2 * sum(len(s.again) for s in segments_of(self.dag, moments, width))

    def whole(self, width: int, share: float) -> None:
        """Solve the program over all segments again and again, with moments wherever its schedule does not fit."""
        while not self.done and self._until(share) > 0:
            best = None if self.best is None else in_order(self.best)
            also = {} if best is None else replays_for(best)
            segments = segments_of(self.dag, self.moments, width, also=also)
            model = SegmentModel(self.dag, segments)
            start = start_of(model, best) if best is not None and best.fits else None
            found = self._solve(model, self._until(share), self.options.gap / 10, start)
            if found.x is None:
                return
            if not self._take_decoded(model, segments, found.x):
                return

    def _take_decoded(self, model: SegmentModel, segments: list[Segment], x: Array) -> bool:
        """Take the schedule of a solution, repaired if that can be done; return whether there are new moments."""
        sequence = self.runner.run(np.array(decoded(self.dag, segments, model.live_after(x)), dtype=np.int64))
        before = set(self.moments)
        self.take(sequence)
        if not sequence.fits:
            fixed = repaired(sequence, min(self.deadline, time.perf_counter() + _REPAIR_S))
            if fixed is not None:
                self.take(fixed)
        return not self.moments <= before

    def prove(self, share: float) -> None:
        """Raise the global bound, with more and more moments."""
        n_moments = 8
        while not self.done and self._until(share) > 0:
            moments = self._most_needed(n_moments)
            segments = segments_of(self.dag, moments | {m for m in self.moments if m.replay is not None}, None, ordered=False)
            model = SegmentModel(self.dag, segments)
            start = None if self.best is None else start_of(model, self.best)
            found = self._solve(model, self._until(share), STEP_GAP / 10, start)
            if found.outcome is Outcome.INFEASIBLE:
                self.infeasible = f"memory at {len(moments)} of the first runs alone is too much for every schedule"
                return
            if found.bound is not None:
                self.bound = max(self.bound, found.bound * model.scale)
            if found.x is None:
                return
            more = self._take_decoded(model, segments, found.x)
            if not more and (moments >= self._first_moments() or self._columns(moments, None) > _GLOBAL):
                return
            n_moments *= 2

    def _most_needed(self, n: int) -> set[Moment]:
        """The moments at first runs that exceed the budget most without replays, no two beside each other while there are others."""
        memory = self.runner.run(np.arange(self.dag.n_nodes)).memory
        ranked = sorted(self._first_moments(), key=lambda m: -memory[m.node])
        if n >= len(ranked):
            return set(ranked)
        apart = max(1, len(ranked) // n)
        chosen: list[Moment] = []
        for moment in ranked:
            if all(abs(moment.node - other.node) >= apart for other in chosen):
                chosen.append(moment)
        chosen += [m for m in ranked if m not in chosen]
        return set(chosen[:n])

    def around(self, share: float) -> None:
        """Improve stretches of the best schedule, or of the one that exceeds the budget least."""
        at = self.best or self.nearest
        if at is None or self.done:
            return

        def solved(model: SegmentModel, time_limit_s: float, start: Array | None) -> Solution:
            return self._solve(model, time_limit_s, self.options.gap / 10, start)

        near = Neighbourhood(self.dag, at, self.moments, _WIDTHS[0], solved)
        while not self.done and self._until(share) > 0:
            if self.take(near.improve(self._until(share))) and self.best is not None:
                near.go_to(self.best)
