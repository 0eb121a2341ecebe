"""The memory rows of the MILP: one per moment that no other dominates.

A *moment* is a run: a forward op, a backward op, or a possible replay of f just before backward op j. The replays
before one backward op happen in the order of the forward, so there is a moment after each at which those before it have
happened and those after it have not, whether or not they do. Memory at moment t:

    U_t = U_t-1 + what is born - what dies <= budget - static - what is live whatever is decided at t

`lifetimes` says what is born and dies. A row is a sum over all that is live, until it has `_TERMS` terms: then that sum
becomes a column U_t, and the next rows start from it. Measured with HiGHS 1.16: with a U_t for each moment the six-layer
minis took ten times as long as with sums (long chains of equations make its bases slow), and with sums alone 48
transformer layers took up to twenty times as long as with differences.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from actsolve.planners.lp import INFINITY, Array
from actsolve.planners.milp_rows import Columns, Terms

_TERMS = 150
_NOTHING = 1e-12  # what is left of a sum that cancels


@dataclass
class MemoryRows:
    """Writes the memory rows, one per undominated moment.

    Attributes:
        columns: The model to write to.
        room_bytes: Budget above the static bytes, or None to minimise the peak instead.
        unit: Bytes that the solver sees as 1.
        running: Columns U_t in order, each with the terms of the equation that defines it.
        envelopes: Columns that are the largest of several expressions and 0 (`largest`), with these.
        peak: Column of the peak to be minimised, in units.
        fixed_peak_bytes: The most bytes live at any moment whatever is decided.
    """

    columns: Columns
    room_bytes: int | None
    unit: float
    running: list[tuple[int, Terms]] = field(default_factory=list)
    envelopes: list[tuple[int, list[Terms]]] = field(default_factory=list)
    peak: int | None = None
    fixed_peak_bytes: int = 0

    _sum: Terms = field(default_factory=dict)  # memory at the last row, in units, from the last U_t on
    _fixed: int = 0  # bytes live whatever is decided
    _pending: int | None = None  # _fixed at the moment that has no row yet
    _to_pending: Terms = field(default_factory=lambda: defaultdict(float))  # change since the last row
    _since: Terms = field(default_factory=lambda: defaultdict(float))  # change since the pending moment
    _least: float = 0.0  # the least and the most that the memory can have changed by since the pending moment
    _most: float = 0.0

    def fixed(self, change: int) -> None:
        """Change what is live whatever is decided."""
        self._fixed += change
        self._least += change
        self._most += change

    def born(self, size: int, terms: Terms) -> None:
        if size:
            for column, factor in terms.items():
                self._since[column] += size * factor
            self._most += size

    def dies(self, size: int, terms: Terms, copies: int = 1) -> None:
        if size:
            for column, factor in terms.items():
                self._since[column] -= size * factor
            self._least -= copies * size

    def shrinks(self, size: int, before: Terms, after: Terms, copies: int = 1) -> None:
        """What was live is now ``after``, which is no more than ``before`` in any schedule."""
        if size:
            self.dies(size, before, copies)
            for column, factor in after.items():
                self._since[column] += size * factor

    def shifts(self, terms: Terms) -> None:
        """Change what is live by ``terms``, in units, by nobody knows how much."""
        for column, factor in terms.items():
            self._since[column] += factor * self.unit
        self._least, self._most = -INFINITY, INFINITY

    def largest(self, expressions: list[Terms]) -> int:
        """Return a new column that memory pushes down to the largest of ``expressions``, or 0."""
        lp = self.columns.lp
        column = lp.column()
        for expression in expressions:
            terms = {c: v for c, v in expression.items() if v}
            if terms:
                lp.row(-INFINITY, 0.0, [column, *terms], [-1.0, *terms.values()])
        self.envelopes.append((column, expressions))
        return column

    def moment(self) -> None:
        """Something runs now."""
        self.fixed_peak_bytes = max(self.fixed_peak_bytes, self._fixed)
        if self._pending is not None and self._most <= 0:
            return  # no more than at the pending moment
        if self._pending is not None and self._least < 0:
            self._write()
        for column, change in self._since.items():
            self._to_pending[column] += change
        self._since.clear()
        self._least = self._most = 0.0
        self._pending = self._fixed

    def end(self) -> None:
        if self._pending is not None:
            self._write()

    def _write(self) -> None:
        assert self._pending is not None
        lp = self.columns.lp
        for column, change in self._to_pending.items():
            total = self._sum.get(column, 0.0) + change / self.unit
            if abs(total) > _NOTHING:
                self._sum[column] = total
            else:
                self._sum.pop(column, None)
        self._to_pending.clear()
        upper = INFINITY if self.room_bytes is None else (self.room_bytes - self._pending) / self.unit
        if len(self._sum) > _TERMS:
            terms = {c: -v for c, v in self._sum.items()}
            column = lp.column(lower=-INFINITY, upper=upper)
            lp.row(0.0, 0.0, [column, *terms], [1.0, *terms.values()])
            self.running.append((column, terms))
            self._sum = {column: 1.0}
        elif self.peak is None:
            lp.row(-INFINITY, upper, list(self._sum), list(self._sum.values()))
        if self.peak is not None:
            lp.row(-INFINITY, -self._pending / self.unit, [*self._sum, self.peak], [*self._sum.values(), -1.0])

    def fill(self, x: Array) -> None:
        """Set U_t, and the peak, in ``x`` to what its decisions give."""
        for column, expressions in self.envelopes:
            x[column] = max(0.0, *(sum(x[c] * v for c, v in e.items()) for e in expressions))
        for column, terms in self.running:
            x[column] = -sum(x[c] * factor for c, factor in terms.items())
