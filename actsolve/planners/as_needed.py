"""A pass of the MILP with the memory rows that it needs, and no others.

Of the 20,000 moments of a large step fewer than a hundred are ever at the budget. So the relaxation is solved without memory
rows at first, and rows are added where its solution is over the budget, until it nowhere is: then its optimum is that of the
relaxation with all rows. On graphs of hundreds of layers nearly all of its decisions are whole (a few in 16,000); the others are
decided by a program in which the whole ones are fixed. Measured: 10 s in place of 48 on 20,000 ops, 1 s in place of 14 on
llama-70b with copies to the host.

Where memory does not ask for more, q is as small as its rows allow, or moments would be over the budget for no reason: it
costs `_TILT` of its replay, which the bound allows for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from actsolve.planners.highs_run import SilentHighs, run_highs
from actsolve.planners.improve import Candidate
from actsolve.planners.lp import INFINITY, Array, Limits, LinearModel, highs_model, solve
from actsolve.planners.milp_rows import Terms
from actsolve.planners.model import build, decided
from actsolve.planners.moments import MemoryRows
from actsolve.planners.options import PlannerOptions
from actsolve.planners.slots import Grid
from actsolve.planners.windows import Windows
from actsolve.problem import Problem

_TILT = 1e-4
_AT_ONCE = 64  # rows to be added, no two of one stretch of moments that are over the budget
_OVER = 1e-5  # units: about the solver's tolerance
_WHOLE = 1e-6
_FIXED_GAP = 0.1  # of the gap asked for, for what is left to decide
_TRIES = 4  # at a plan whose exact peak is within the budget


@dataclass(frozen=True)
class Relaxed:
    """What was found.

    Attributes:
        best: A plan that fits.
        bound_s: What is proven of the plans that these windows admit.
        infeasible: Whether there are none,
        hopeless: and whatever the windows.
        interrupted: Whether the user stopped it.
    """

    best: Candidate | None = None
    bound_s: float | None = None
    infeasible: bool = False
    hopeless: bool = False
    interrupted: bool = False


def solve_as_needed(problem: Problem, options: PlannerOptions, found: Windows, grid: Grid, deadline: float) -> Relaxed:
    """Solve the relaxation over these windows, and make a plan of its solution.

    What is fixed may leave no plan, or none that is good: then another way must be taken.
    """
    columns, rows, time_scale = build(problem, found, problem.dynamic_budget_bytes, grid, Moments)
    assert isinstance(rows, Moments)
    if rows.fixed_peak_bytes > problem.dynamic_budget_bytes:
        return Relaxed(infeasible=True, hopeless=True)
    for steps in columns.q.values():
        for column in steps[:-1]:
            columns.lp.cost[column] += _TILT * columns.lp.cost[steps[-1]] / len(steps)
    growing = _Growing(columns.lp, rows, options, deadline)
    bound_s: float | None = None
    for _ in range(_TRIES):
        solution = growing.solve()
        if solution is None:
            return Relaxed(bound_s=bound_s, infeasible=growing.infeasible and bound_s is None, interrupted=growing.interrupted)
        if bound_s is None:
            bound_s = growing.objective / (1 + _TILT) / time_scale
        x = growing.whole(solution)
        if x is None:
            break
        best = decided(problem, columns, x)
        if best.fits:
            return Relaxed(best, bound_s, interrupted=growing.interrupted)
        growing.tighten((best.peak_bytes - problem.budget_bytes) / rows.unit)
    return Relaxed(bound_s=bound_s, interrupted=growing.interrupted)


@dataclass
class Moments(MemoryRows):
    """The moments, with no rows.

    Attributes:
        changes: Per moment, the change of the memory since the one before, and what the sum of changes may be, in units.
    """

    changes: list[tuple[Terms, float]] = field(default_factory=list)

    def _write(self) -> None:
        assert self._pending is not None and self.room_bytes is not None
        terms = {column: change / self.unit for column, change in self._to_pending.items() if change}
        self.changes.append((terms, (self.room_bytes - self._pending) / self.unit))
        self._to_pending.clear()


class _Growing:
    """A relaxation that rows are added to."""

    def __init__(self, model: LinearModel, rows: Moments, options: PlannerOptions, deadline: float) -> None:
        self.model, self.rows, self.options, self.deadline = model, rows, options, deadline
        lengths = [len(terms) for terms, _ in rows.changes]
        self.ends = np.cumsum(lengths)
        self.moment = np.repeat(np.arange(len(lengths)), lengths)
        self.column = np.array([c for terms, _ in rows.changes for c in terms], dtype=np.int64)
        self.change = np.array([v for terms, _ in rows.changes for v in terms.values()], dtype=np.float64)
        self.upper = np.array([upper for _, upper in rows.changes])
        self.row_of: dict[int, int] = {}  # moment -> its row
        self.infeasible = self.interrupted = False
        self.objective = 0.0
        self.highs: Any = SilentHighs()  # type: ignore[no-untyped-call]
        self.highs.passModel(highs_model(replace(model, integer=[False] * model.n_columns)))

    def solve(self) -> Array | None:
        """Return the solution of the relaxation with all rows; None if there is none, or not in time."""
        while True:
            left_s = self.deadline - time.perf_counter()
            if left_s <= 0:
                return None
            self.highs.setOptionValue("time_limit", self.highs.getRunTime() + left_s)
            self.interrupted = run_highs(self.highs).interrupted
            status = self.highs.getModelStatus()
            self.infeasible = status == highspy.HighsModelStatus.kInfeasible
            if status != highspy.HighsModelStatus.kOptimal:
                return None
            self.objective = self.highs.getInfo().objective_function_value
            x = np.array(self.highs.getSolution().col_value, dtype=np.float64)
            if not self._add(self._over(x)):
                return x

    def whole(self, x: Array) -> Array | None:
        """Return the best solution with all that is whole in ``x`` as it is there; None if there is none."""
        integer = np.array(self.model.integer)
        nearest = np.round(x)
        fixed = integer & (np.abs(x - nearest) < _WHOLE)
        lower, upper = np.array(self.model.column_lower), np.array(self.model.column_upper)
        lower[fixed] = upper[fixed] = nearest[fixed]
        while not self.interrupted and time.perf_counter() < self.deadline:
            model = replace(self.model, column_lower=lower.tolist(), column_upper=upper.tolist())
            left_s = self.deadline - time.perf_counter()
            limits = Limits(_FIXED_GAP * self.options.gap, 0.0, left_s, self.options.threads, sub_mips=True)
            found = solve(model, "highs", limits)
            self.interrupted = found.interrupted
            if found.x is None:
                return None
            if not self._add(self._over(found.x)):
                return found.x
        return None

    def tighten(self, units: float) -> None:
        """Leave less room at every moment."""
        self.upper -= units
        for moment, row in self.row_of.items():
            self.model.row_upper[row] = float(self.upper[moment])
            self.highs.changeRowBounds(row, -highspy.kHighsInf, float(self.upper[moment]))

    def _over(self, x: Array) -> npt.NDArray[np.int64]:
        """Return the moments that are over the budget, and of them those that are furthest over it."""
        for column, expressions in self.rows.envelopes:
            x[column] = max(0.0, *(sum(x[c] * v for c, v in e.items()) for e in expressions))
        change = np.bincount(self.moment, weights=self.change * x[self.column], minlength=len(self.upper))
        excess = np.cumsum(change) - self.upper
        over = np.flatnonzero(excess > _OVER)
        stretches = np.array_split(over, min(_AT_ONCE, len(over))) if len(over) else []
        return np.array([part[np.argmax(excess[part])] for part in stretches], dtype=np.int64)

    def _add(self, moments: npt.NDArray[np.int64]) -> bool:
        """Add the rows of ``moments``; return whether any is new."""
        new = [int(moment) for moment in moments if int(moment) not in self.row_of]
        for moment in new:
            columns, values = self._terms(moment)
            upper = float(self.upper[moment])
            self.row_of[moment] = self.model.row(-INFINITY, upper, columns.tolist(), values.tolist())
            self.highs.addRow(-highspy.kHighsInf, upper, len(columns), columns.astype(np.int32), values)
        return bool(new)

    def _terms(self, moment: int) -> tuple[npt.NDArray[np.int64], Array]:
        """Return the row of a moment: the sum of all changes up to it."""
        end = self.ends[moment]
        total = np.bincount(self.column[:end], weights=self.change[:end], minlength=self.model.n_columns).astype(np.float64)
        columns = np.flatnonzero(np.abs(total) > 1e-9)
        return columns.astype(np.int64), total[columns]
