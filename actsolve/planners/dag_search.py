"""Any node again, any number of times: schedules by a program over segments, a global lower bound, and a search around the best.

Several ways, each on what the others left:

- *exhaust*, of a general graph only: all schedules, the cheapest first, where they are few.
- *backwards*, too: from the last run to the first, the most promising of what may be needed before each; *force* where that leads
  on nowhere.
- *shake*, too: a few replays of the best schedule are taken away, and what that leaves is made fit again.
- *prove*: the program that bounds every schedule, with memory counted at a few moments at first, and at more where its schedule
  does not fit. Mostly that ends with a schedule that fits, and meets the bound.
- *whole*: the same for schedules that replay in the order of the nodes and not from too far back, memory counted exactly.
- *around*: that program with all but a stretch of segments fixed to the best schedule so far. It is elastic: as long as nothing
  fits, it lessens what is over the budget.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from actsolve.dag import Dag
from actsolve.planners.backwards import FORCED, Backwards
from actsolve.planners.exhaustive import exhaustive
from actsolve.planners.from_nothing import FromNothing, cannot_be_made, is_general
from actsolve.planners.lp import Array, Limits, Outcome, Solution, solve
from actsolve.planners.neighbourhood import Neighbourhood
from actsolve.planners.options import PlannerOptions
from actsolve.planners.repair import cleaned, repaired
from actsolve.planners.segment_starts import bytes_at, in_order, replays_for, start_of
from actsolve.planners.segments import Moment, Segment, SegmentModel, decoded, segments_of
from actsolve.planners.sequence import Runner, Sequence
from actsolve.planners.shaken import Shaken

STEP_GAP = 0.0005  # of all time: a schedule that near to the bound is optimal
_WIDTHS = (16, 48)  # nearest ancestors that may run again for a node
_ADDED = 4  # moments at a time to the program for the bound
_MOMENTS = 400  # and to the others
_REPAIR_S = 1.0
_SLICE = 0.03  # of the time limit, for one program of those for the bound,
_SLICE_S = 2.0  # but no less; where that was not enough,
_LONGER = 1.5  # times as much for the next
_SMALL, _STATES = 40, 50_000  # nodes of a graph all of whose schedules may be looked at, and states: about a second
_SHAKEN = 0.05  # of the time limit, after each sweep backwards
_IMPOSSIBLE_S = 3.0  # to look for a node that cannot be made within the budget


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

    Ctrl-C takes the best so far.

    Args:
        dag: What is to be run.
        options: When to stop; the solver.
        seed: A schedule to start from, whatever budget it was made for.

    Raises:
        SolverError: the solver asked for is missing or fails.
    """
    if reason := too_large(dag):
        return DagPlan(None, 0.0, reason)
    search = DagSearch(dag, options)
    try:
        search.take(search.runner.run(np.arange(dag.n_nodes)))
        if seed is not None:
            search.take(search.runner.run(seed.nodes))
        search.run()
    except KeyboardInterrupt:  # between two solves: the solver itself returns what it has
        search.interrupted = True
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
        self._counted: set[Moment] = set()  # those of the program for the bound
        self._back = Backwards(FromNothing(dag)) if is_general(dag) else None
        self._shaken = Shaken()
        self.begin = time.perf_counter()
        self.deadline = self.begin + options.time_limit_s

    # -- what was found -----------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence) -> bool:
        """Keep ``sequence`` if it is the best so far; return whether it is."""
        if not sequence.fits:
            self.moments |= self._spread(sequence, self.moments, _MOMENTS)
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
        return gap <= self.options.gap / 2 * self.best.extra_time or gap <= STEP_GAP / 2 * sum(self.dag.time)

    def _until(self, share: float) -> float:
        """Seconds left until a share of the time limit has passed."""
        end = min(self.deadline, self.begin + share * self.options.time_limit_s)
        return max(0.0, end - time.perf_counter())

    def _solve(self, model: SegmentModel, time_limit_s: float, gap: float, start: Array | None = None) -> Solution:
        least = STEP_GAP / 5 * sum(self.dag.time) / model.scale
        limits = Limits(gap, least, max(0.1, time_limit_s), self.options.threads, sub_mips=True)
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
        if self._back is not None:
            self._run_general(self._back)
            return
        self.prove(0.3)
        self.whole(_WIDTHS[0], 0.45)
        self.whole(_WIDTHS[1], 0.55)
        self.around(0.7 if self.best is not None else 0.85)
        self.prove(0.9)
        self.around(1.0)

    def _run_general(self, back: Backwards) -> None:
        """Backwards first: that finds in seconds what the programs do not in a minute, the more so where much runs again."""
        self.exhaust(back, 0.1)
        self.backwards(back, 0.1, first=True)
        if self.best is None:
            self.impossible(back, 0.15)
        self.backwards(back, 0.55, first=True)
        if self.best is None:
            self.force(back, 0.75, 0.4)
        self.prove(0.4)
        self.backwards(back, 0.7)
        self.shake(0.8)
        if self.best is None:
            self.whole(_WIDTHS[0], 0.8)
            self.whole(_WIDTHS[1], 0.85)
        self.around(0.9)
        self.prove(0.97)
        self.around(1.0)

    def exhaust(self, back: Backwards, share: float) -> None:
        """Look at all schedules, if they are few."""
        if self.dag.n_nodes > _SMALL:
            return
        found = exhaustive(back.nothing, _STATES, time.perf_counter() + self._until(share))
        self.bound = max(self.bound, found.bound)
        if found.runs is not None:
            self.take(self.runner.run(np.array(found.runs, dtype=np.int64)))
        elif found.proven:
            self.infeasible = "of all schedules with this order of first runs none fits"

    def impossible(self, back: Backwards, share: float) -> None:
        """Look for a node that nothing can make within the budget."""
        node = cannot_be_made(back.nothing, time.perf_counter() + min(_IMPOSSIBLE_S, self._until(share)))
        if node is not None:
            self.infeasible = f"to make what {self.dag.names[node]} reads takes more, whatever runs again"

    def force(self, back: Backwards, share: float, better: float) -> None:
        """Look for schedules that fit, at whatever cost, each anew and shaken; until ``better`` of the time, if there is one.

        They are improved to quite different ones: the best of a few is much better than the first.
        """
        for sweep in FORCED:
            until_s = self._until(share if self.best is None else better)
            if self.done or until_s <= 0:
                return
            anew = Backwards(back.nothing)
            anew.sweep(sweep, time.perf_counter() + until_s)
            if anew.best:
                runs = self.runner.run(np.array(anew.best, dtype=np.int64))
                self.take(self._shaken_briefly(cleaned(runs, time.perf_counter() + _REPAIR_S)))

    def _shaken_briefly(self, sequence: Sequence) -> Sequence:
        until = time.perf_counter() + min(self._until(1.0), _SHAKEN * self.options.time_limit_s)
        return self._shaken.improve(sequence, lambda _: self.done, until)

    def backwards(self, back: Backwards, share: float, *, first: bool = False) -> None:
        """Look for schedules from their end, among more and more, until one is near the bound; or for the ``first`` that fits."""
        if self.best is not None:
            back.start(self.best.nodes.tolist())
        while not self.done and self._until(share) > 0 and not back.exhausted:
            if first and (self.best is not None or back.wide):
                return
            back.improve(time.perf_counter() + self._until(share))
            if back.best:
                self.take(self.runner.run(np.array(back.best, dtype=np.int64)))
                if not first:  # what may be optimal is proven first
                    self.shake(share, brief=True)
                if self.best is not None:
                    back.start(self.best.nodes.tolist())

    def shake(self, share: float, *, brief: bool = False) -> None:
        """Improve the best schedule for a while, a few replays at a time."""
        if self.best is None or self.done:
            return
        until_s = min(self._until(share), _SHAKEN * self.options.time_limit_s) if brief else self._until(share)

        def near(best: Sequence) -> bool:
            self.best = best
            return self.done

        self.best = self._shaken.improve(self.best, near, time.perf_counter() + until_s)

    def columns(self) -> int:
        """About how many columns the program for the bound has, at first."""
        if not self._counted:
            self._counted = self._spread(self.runner.run(np.arange(self.dag.n_nodes)), set(), _ADDED)
        return 2 * sum(len(s.again) for s in segments_of(self.dag, self._counted, None, ordered=False))

    def whole(self, width: int, share: float) -> None:
        """Solve the program over all segments again and again, with moments wherever its schedule does not fit."""
        while not self.done and self._until(share) > 0:
            best = None if self.best is None else in_order(self.best)
            also = {} if best is None else replays_for(best)
            segments = segments_of(self.dag, self.moments, width, also=also)
            model = SegmentModel(self.dag, segments)
            start = start_of(model, best) if best is not None and best.fits else None
            found = self._solve(model, self._until(share), self.options.gap / 5, start)
            if found.x is None:
                return
            known = set(self.moments)
            self._take_decoded(segments, model.live_after(found.x), model.again_in(found.x))
            if self.moments <= known:
                return

    def _take_decoded(self, segments: list[Segment], live_after: list[set[int]], again: list[set[int]]) -> Sequence:
        """Take the schedule of a solution, repaired if that can be done; return it as it was."""
        sequence = self.runner.run(np.array(decoded(self.dag, segments, live_after, again), dtype=np.int64))
        self.take(sequence)
        if not sequence.fits:
            fixed = repaired(sequence, min(self.deadline, time.perf_counter() + _REPAIR_S))
            if fixed is not None:
                self.take(fixed)
        return sequence

    def prove(self, share: float) -> None:
        """Raise the global bound: moments are added where the schedule of the last program was over the budget most.

        A program with few moments is solved to the end in a second where one with all of them is not in a minute.
        """
        slice_s = max(_SLICE_S, _SLICE * self.options.time_limit_s)
        while not self.done and self._until(share) > 0:
            self.columns()
            segments = segments_of(self.dag, self._counted, None, ordered=False)
            model = SegmentModel(self.dag, segments)
            start = None if self.best is None else start_of(model, self.best)
            found = self._solve(model, min(slice_s, self._until(share)), self.options.gap / 5, start)
            if found.outcome is Outcome.INFEASIBLE:
                n = len(self._counted)
                self.infeasible = f"at {n} of the runs alone every schedule with this order of first runs needs more"
                return
            if found.bound is not None:
                self.bound = max(self.bound, found.bound * model.scale)
            more: set[Moment] = set()
            if found.x is not None:
                sequence = self._take_decoded(segments, model.live_after(found.x), model.again_in(found.x))
                more = self._spread(sequence, self._counted, _ADDED)
            if not more and found.outcome is Outcome.OPTIMAL:
                return
            if found.outcome is not Outcome.OPTIMAL:
                slice_s *= _LONGER
            self._counted |= more

    def _spread(self, sequence: Sequence, known: set[Moment], n: int) -> set[Moment]:
        """Return at most ``n`` moments, not ``known``, at which ``sequence`` is over the budget: the worst of each stretch."""
        memory = {m: b for m, b in bytes_at(sequence).items() if m not in known and b > self.dag.budget_bytes}
        ranked = sorted(memory, key=lambda m: -memory[m])
        if len(ranked) <= n:
            return set(ranked)
        n_stretches = len({m.node for m in memory})
        found: dict[int, Moment] = {}  # per stretch
        place = {node: i for i, node in enumerate(sorted({m.node for m in memory}))}
        for moment in ranked:
            found.setdefault(place[moment.node] * n // n_stretches, moment)
        return set(found.values())

    def around(self, share: float) -> None:
        """Improve stretches of the best schedule, or of the one that exceeds the budget least."""
        at = self.best or self.nearest
        if at is None or self.done:
            return

        def solved(model: SegmentModel, time_limit_s: float, start: Array | None) -> Solution:
            return self._solve(model, time_limit_s, self.options.gap / 5, start)

        near = Neighbourhood(self.dag, at, self.moments, _WIDTHS[0], solved)
        while not self.done and not near.exhausted and self._until(share) > 0:
            if self.take(near.improve(self._until(share))) and self.best is not None:
                near.go_to(self.best)
