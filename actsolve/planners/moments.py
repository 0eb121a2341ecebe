"""The memory rows: what is live at each moment of the step, in terms of the decisions.

A *moment* is a run: a forward op, a backward op, or a possible replay of f just before backward op j. The replays
before one backward op happen in the order of the forward, so there is a moment after each at which those before it have
happened and those after it have not, whether or not they do. Memory at moment t:

    U_t = U_t-1 + births - deaths <= budget - static - what is live whatever is decided at t

with s_v k_v born after the last forward read of v, s_v (q_f,j - q_f,j-1) born for each output v of f at its possible
replay at j, and deaths by the last read that is possible:

- v whose last reads are by backward ops: s_v (k_v + q_f) dies after the last of them;
- v whose last reads are replays of one op u: s_v (q_u,j - q_u,j-1) dies at each possible replay of u;
- otherwise at the last possible replay of the last of its readers. Conservative: that one may not be replayed;
- an output that no later read is possible of dies at once.

An op that works in place (`Op.in_place`) ends its input before its output is born, where that is certain.
Conservative too: a kept output of an op that is replayed for another of its outputs counts twice to its end, where the
copy is in fact dropped at once.

Moments that another one dominates for every decision get no row. Differences instead of sums keep the rows sparse: a
sum over all that is live has hundreds of terms, and there are thousands of moments.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from actsolve.graph import Kind
from actsolve.planners.lp import INFINITY, Array
from actsolve.planners.milp_rows import Columns, Terms
from actsolve.problem import Problem


@dataclass
class MemoryRows:
    """Writes the memory rows, one per undominated moment.

    Attributes:
        columns: The model to write to.
        room_bytes: Budget above the static bytes, or None to minimise the peak instead.
        unit: Bytes that the solver sees as 1.
        running: Columns U_t in order, with the row that defines each.
        peak: Column of the peak to be minimised, in units.
        fixed_peak_bytes: The most bytes live at any moment whatever is decided.
    """

    columns: Columns
    room_bytes: int | None
    unit: float
    running: list[tuple[int, Terms]] = field(default_factory=list)
    peak: int | None = None
    fixed_peak_bytes: int = 0

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
        terms = {c: -v / self.unit for c, v in self._to_pending.items() if v}
        self._to_pending.clear()
        upper = INFINITY if self.room_bytes is None else (self.room_bytes - self._pending) / self.unit
        column = lp.column(lower=-INFINITY, upper=upper)
        before = {self.running[-1][0]: -1.0} if self.running else {}
        lp.row(0.0, 0.0, [column, *before, *terms], [1.0, *before.values(), *terms.values()])
        self.running.append((column, {**before, **terms}))
        if self.peak is not None:
            lp.row(-INFINITY, -self._pending / self.unit, [column, self.peak], [1.0, -1.0])

    def fill(self, x: Array) -> None:
        """Set U_t, and the peak, in ``x`` to what its decisions give."""
        for column, terms in self.running:
            x[column] = -sum(x[c] * factor for c, factor in terms.items())


def write_memory_rows(problem: Problem, columns: Columns, rows: MemoryRows) -> None:
    """Write the memory rows of ``problem``."""
    lifetimes = _Lifetimes(problem, columns, rows)
    lifetimes.forward()
    lifetimes.backward()
    rows.end()


class _Lifetimes:
    """Walks the step once and tells `MemoryRows` what is born and dies."""

    def __init__(self, problem: Problem, columns: Columns, rows: MemoryRows) -> None:
        self.problem, self.columns, self.rows = problem, columns, rows
        self.windows = columns.windows
        self.graph = problem.graph
        self.size = [v.size_bytes for v in self.graph.values]
        self.workspace = problem.costs.workspace_bytes
        self.updated = {new for new, _ in self.graph.updates}
        self.replays_at: dict[int, list[tuple[int, int]]] = defaultdict(list)  # position -> (op, number of its demand)
        for f in sorted(self.windows.demands):
            for step, position in enumerate(self.windows.demands[f]):
                self.replays_at[position].append((f, step))
        self.replay_end: dict[int, list[int]] = defaultdict(list)  # op u -> values that die at u's last possible replay
        self.only_last_reader: dict[int, list[int]] = defaultdict(list)  # op u -> values that die whenever u is replayed
        self.direct_end: dict[int, list[int]] = defaultdict(list)  # backward op -> forward values whose last read it is
        for v in columns.k:
            self._find_end(v)

    def _find_end(self, v: int) -> None:
        """Sort v by what ends it."""
        direct = self.windows.last_direct(v)
        later = [u for u in self.windows.readers[v] if self.windows.demands[u][-1] > direct]
        if not later:
            self.direct_end[direct].append(v)
            return
        last = max(later, key=lambda u: (self.windows.demands[u][-1], u))
        self.replay_end[last].append(v)
        if len(later) == 1:
            self.only_last_reader[last].append(v)

    def end_of(self, v: int) -> int:
        """The last position at which v can be read; -1 if it is not decided on."""
        return max(self.windows.last_direct(v), self.windows.last_replay(v)) if v in self.columns.k else -1

    # forward

    def forward(self) -> None:
        graph, rows = self.graph, self.rows
        ends: dict[int, list[int]] = defaultdict(list)
        for v, given in enumerate(graph.is_forward_value):
            producer = graph.values[v].producer
            if given and v not in graph.held and producer is not None and not graph.ops[producer].optional:
                last = graph.n_forward - 1 if v in self.updated else max([producer, *graph.forward_readers[v][-1:]])
                ends[last].append(v)
        for i, op in enumerate(graph.ops[: graph.n_forward]):
            if op.optional:
                self._optional(i)
                continue
            overwritten = op.in_place[0] if op.in_place is not None else None
            if overwritten is not None and overwritten in ends[i] and overwritten not in self.updated:
                ends[i].remove(overwritten)
                self._end_in_forward(overwritten)
            made = sum(self.size[v] for v in op.outputs)
            rows.fixed(made + self.workspace[i])
            rows.moment()
            rows.fixed(-self.workspace[i])
            for v in ends[i]:
                self._end_in_forward(v)

    def _end_in_forward(self, v: int) -> None:
        self.rows.fixed(-self.size[v])
        if v in self.columns.k:
            self.rows.born(self.size[v], {self.columns.k[v]: 1.0})

    def _optional(self, i: int) -> None:
        """An op that runs only where an output is kept or held."""
        outputs = self.graph.ops[i].outputs
        kept = {self.columns.k[v]: 1.0 for v in outputs if v in self.columns.k}
        if not kept and self.graph.held.isdisjoint(outputs):
            return
        for v in outputs:
            if v in self.graph.held:
                self.rows.fixed(self.size[v])
            elif v in self.columns.k:
                self.rows.born(self.size[v], {self.columns.k[v]: 1.0})
        self.rows.born(self.workspace[i], kept)
        self.rows.moment()
        self.rows.dies(self.workspace[i], kept)

    # backward

    def backward(self) -> None:
        graph, rows = self.graph, self.rows
        tangents = graph.given_bytes(Kind.TANGENT)
        rows.fixed(tangents)
        ends: dict[int, list[int]] = defaultdict(list)
        for v, value in enumerate(graph.values):
            if value.producer is not None and value.producer >= graph.n_forward and v not in graph.held:
                ends[max([value.producer, *graph.backward_readers[v][-1:]])].append(v)
        for j in range(graph.n_forward, len(graph.ops)):
            for f, step in self.replays_at[j]:
                self._replay(f, step, j)
            self._backward_op(j, ends[j])
        if len(graph.ops) > graph.n_forward:
            rows.fixed(-tangents)
        rows.fixed(self.problem.optimizer_bytes)
        rows.moment()

    def _backward_op(self, j: int, ends: list[int]) -> None:
        op, rows = self.graph.ops[j], self.rows
        overwritten = op.in_place[0] if op.in_place is not None else None
        if overwritten in self.updated:
            overwritten = None
        before = [v for v in ends if v == overwritten]
        rows.fixed(-sum(self.size[v] for v in before))
        if overwritten is not None and overwritten in self.direct_end[j]:
            self._end_after_direct(overwritten, j)
        rows.fixed(sum(self.size[v] for v in op.outputs) + self.workspace[j])
        rows.moment()
        rows.fixed(-self.workspace[j] - sum(self.size[v] for v in ends if v not in before))
        for v in self.direct_end[j]:
            if v != overwritten:
                self._end_after_direct(v, j)
        for v in op.inputs:  # a value with one later reader is live on only where that has not been replayed yet
            if v in self.columns.k and self.windows.last_direct(v) == j:
                for u in self.windows.readers[v]:
                    if v in self.only_last_reader[u] and (q_u := self.columns.q_at(u, j)) is not None:
                        rows.dies(self.size[v], {q_u: 1.0})

    def _end_after_direct(self, v: int, j: int) -> None:
        self.rows.dies(self.size[v], self._present(v, j), copies=2)

    def _present(self, v: int, position: int) -> Terms:
        """k_v + q_p(v) at ``position``."""
        producer = self.graph.values[v].producer
        assert producer is not None
        q = self.columns.q_at(producer, position)
        return {self.columns.k[v]: 1.0} if q is None else {self.columns.k[v]: 1.0, q: 1.0}

    def _replay(self, f: int, step: int, j: int) -> None:
        op, rows = self.graph.ops[f], self.rows
        rise = self.columns.rise(f, step)
        dying = [v for v in self.only_last_reader[f] if j > self.windows.last_direct(v)]
        overwritten = self._overwritten(f, dying)
        for v in op.outputs:
            if overwritten is None or v != op.in_place[1]:  # type: ignore[index]
                rows.born(self.size[v], rise)
        rows.born(self.workspace[f], rise)
        rows.moment()
        rows.dies(self.workspace[f], rise)
        for v in op.outputs:
            if self.end_of(v) < j:
                rows.dies(self.size[v], rise)
        for v in dying:
            if v != overwritten:
                rows.dies(self.size[v], rise)
        if step == len(self.columns.q[f]) - 1:
            for v in self.replay_end[f]:
                present = dict(self._present(v, j))
                if v in self.only_last_reader[f]:
                    present[self.columns.r[f]] = present.get(self.columns.r[f], 0.0) - 1.0
                rows.dies(self.size[v], present, copies=2)

    def _overwritten(self, f: int, dying: list[int]) -> int | None:
        """The input that a replay of f certainly overwrites: it dies there, and f's output is not live yet."""
        op = self.graph.ops[f]
        if op.in_place is None or op.in_place[0] not in dying or op.in_place[0] in self.updated:
            return None
        alone = sum(w in self.columns.k for w in op.outputs) == 1
        return op.in_place[0] if alone and op.in_place[1] in self.columns.k else None
