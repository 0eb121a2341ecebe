"""Passes of the MILP over wider and wider windows, each seeded with the best plan so far."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

from actsolve.plan import Status
from actsolve.planners.improve import Candidate
from actsolve.planners.lp import Outcome
from actsolve.planners.model import COARSE
from actsolve.planners.one_pass import PassOutcome, Patience, solve_windows, status_of
from actsolve.planners.options import PlannerOptions
from actsolve.planners.slots import Grid
from actsolve.planners.windows import Windows, windows
from actsolve.problem import Problem

_EPSILON_S = 1e-9
_NARROWEST = 12  # backward ops: about half a transformer layer
_WIDENING = 1.5
_DEMANDS = 4000  # step columns of a model that is solved only in the hope of a better plan
_IN_VAIN = 2  # such passes in a row gain nothing: no more,
_FINE = (Grid(128, whole=0.0), Grid(128, whole=0.5))  # of the others, in turn
_ROUGH_AFTER = 0.2  # of the time limit
_SIMPLER = 0.15  # of the time limit, for what only recomputes, and for what only offloads
LAST_S = 0.5  # for the local improvement, once time is up
_CHEAP_S = 2.0  # if all together have taken this long
_PATIENCE_S = 5.0  # with a pass that finds nothing better


class Search:
    """The passes over wider and wider windows, each seeded with the best plan so far.

    Narrow windows are solved first: mostly they give the same plans as wide ones in a tenth of the time, but not on nets with
    long skips (8% dearer on a U-Net) and not on tight budgets. Small steps pay there: the best plan of windows of 12 ops, then
    of 18, took 9 s on a vision transformer where 48 at once took a minute.
    """

    def __init__(self, problem: Problem, options: PlannerOptions, seed: Candidate | None, begin: float) -> None:
        self.problem, self.options = problem, options
        self.best = seed
        self.bound_s: float | None = None
        self.proven_infeasible = False
        self.begin = begin
        self.deadline = begin + options.time_limit_s - min(LAST_S, 0.1 * options.time_limit_s)
        self._solved = 0  # passes that were not infeasible
        self._in_vain = 0  # the last of them, that found no plan better by more than the gap
        self.interrupted = False

    def begin_with_simpler_plans(self) -> None:
        """Take the best plans that only recompute, and only offload, if they are better: small models, soon solved."""
        ops = tuple(replace(op, replayable=False, why_not="only offload") for op in self.problem.graph.ops)
        simpler: list[tuple[Problem, int | None]] = [(replace(self.problem, links=None), None)]
        if not self.problem.pinned_recompute:
            simpler.append((replace(self.problem, graph=replace(self.problem.graph, ops=ops)), 1 + len(_FINE)))
        limited = replace(self.options, time_limit_s=_SIMPLER * self.options.time_limit_s)
        for problem, passes in simpler:
            search = Search(problem, limited, None, time.perf_counter())
            search.run(passes)
            if search.best is not None and (self.best is None or search.best.extra_s < self.best.extra_s):
                self.best = search.best
            if search.interrupted:
                self.interrupted = True
                return

    def run(self, passes: int | None = None) -> None:
        """Solve until wider windows promise no better plan, or time, or the number of ``passes``, is up."""
        n_backward = len(self.problem.graph.ops) - self.problem.graph.n_forward
        width = self.options.window or _NARROWEST
        for number in itertools.count(1):
            found = windows(self.problem, width if width < n_backward else None)
            if self._over(found):
                return
            grid = COARSE if number == 1 else _FINE[number % len(_FINE)]
            limits = (self.deadline, self._patience())
            self._take(found, solve_windows(self.problem, self.options, found, grid, self.best, *limits))
            if number == passes or (found.whole and (number > len(_FINE) or not self.problem.offloadable)):
                return
            if number % 2 == 0 or not self.problem.offloadable or self._closed():
                width = math.ceil(width * _WIDENING)  # else the same windows once more, on another grid

    def _over(self, found: Windows) -> bool:
        """Whether to stop before a pass over these windows."""
        if self.interrupted or self.proven_infeasible or time.perf_counter() > self.deadline:
            return True
        if self._solved == 0 or self.best is None:
            return False
        closed = self._closed()
        if self.problem.offloadable and self._solved == 1 and not closed:
            return False
        at_once = self.options.window is not None and closed
        # Where the first pass to offload closed the gap, no other grid was ever better, and wider windows hardly were.
        enough = 1 if self.problem.offloadable and closed else _IN_VAIN
        in_vain = self._in_vain >= enough and time.perf_counter() - self.begin > _CHEAP_S
        return at_once or in_vain or found.n_demands > _DEMANDS

    def _closed(self) -> bool:
        """Whether the best plan is within the gap of what is proven so far."""
        if self.best is None:
            return False
        return self.best.extra_s - (self.bound_s or 0.0) <= self.options.gap * self.best.extra_s

    def _patience(self) -> Patience:
        """The first pass that finds a plan may take all the time, or most of it; a later one must find a better plan for that."""
        now = time.perf_counter()
        hopeful = self._solved > 0 and self.best is not None
        first = self._solved == 0 and bool(self.problem.offloadable)
        return Patience(
            content=self.begin + 0.5 * self.options.time_limit_s,
            hope=now + max(_PATIENCE_S, now - self.begin) if hopeful else math.inf,
            rough=now + _ROUGH_AFTER * self.options.time_limit_s if first else math.inf,
        )

    def _take(self, found: Windows, outcome: PassOutcome) -> None:
        """Note what a pass found."""
        self.interrupted = outcome.solution.interrupted
        if outcome.solution.outcome is Outcome.INFEASIBLE:
            self.proven_infeasible = found.whole or outcome.hopeless
            return
        before, after = self.best, outcome.best
        gained = False
        if after is not None and (before is None or after.extra_s < before.extra_s - _EPSILON_S):
            gained = before is None or after.extra_s < before.extra_s * (1 - self.options.gap)
            self.best = after
        # The bound is that of the widest windows that were solved to the gap, but for a much better plan's own. Grids are not
        # wider or narrower: where values can be offloaded, it is the least of all bounds.
        least = [b for b in (self.bound_s, outcome.bound_s) if b is not None and self.problem.offloadable]
        if self._solved == 0 or gained or self._conclusive(outcome):
            self.bound_s = min(least, default=outcome.bound_s)
        self._solved += 1
        self._in_vain = 0 if gained or self._solved == 1 else self._in_vain + 1

    def _conclusive(self, outcome: PassOutcome) -> bool:
        """Whether a pass closed the gap; or only the step gap, if the passes before have not closed more."""
        if outcome.solution.outcome is Outcome.OPTIMAL or self.best is None:
            return outcome.solution.outcome is Outcome.OPTIMAL
        allowed_s = self.options.gap * self.best.extra_s
        within, within_before = (b is not None and self.best.extra_s - b <= allowed_s for b in (outcome.bound_s, self.bound_s))
        status = status_of(self.problem, self.options, self.best.extra_s, outcome.bound_s)
        return within or (not within_before and status is Status.OPTIMAL)
