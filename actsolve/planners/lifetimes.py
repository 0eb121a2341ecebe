"""When values live, in terms of the decisions: what `moments` makes rows of.

Every decidable value v is live, as a sum of columns, from its last forward read on (k_v) and from the possible replays
of its op on (q_f,j), until a last read:

- v that the backward reads last dies after the last of these reads;
- v that only replays of one op u read dies as u is replayed: k_v + q_f,j - q_u,j;
- v that several replays read, and the backward does not, is live while one of them is outstanding, but for the time
  before its own replay: max over u of (r_u - q_u,j) - (r_f - q_f,j);
- v that the backward reads, and replays of u after that, is live after the last read by the backward while one of these is
  outstanding: max over u of (r_u - q_u,j);
- an output that nothing can read any more dies at once.

An offloaded value is live as its bytes in `slots` are: o_v from its last forward read on, less what has left and plus what
comes back, slot by slot, until the last possible read.

An op that works in place (`Op.in_place`) ends its input before its output is born, where that is certain.

An op with several outputs that are decided on may be replayed for one while another is kept. The copy dies at once:
after the replay, v is live as max(k_v, q_f,j). For outputs of less than half a percent of the largest value the sum does,
and where several replays but no backward op read such an output, it lives to the last of them in any case. These are
the places at which the rows are conservative, besides the windows.
"""

from __future__ import annotations

from collections import defaultdict

from actsolve.graph import Kind
from actsolve.planners.milp_rows import Columns, Terms
from actsolve.planners.moments import MemoryRows
from actsolve.problem import Problem

_SMALL = 0.005  # of the largest value: not worth a column


def write_memory_rows(problem: Problem, columns: Columns, rows: MemoryRows) -> None:
    """Write the memory rows of ``problem``."""
    walk = _Walk(problem, columns, rows)
    walk.forward()
    walk.backward()
    rows.end()


def plus(terms: Terms, other: Terms, factor: float = 1.0) -> Terms:
    """Return ``terms`` + ``factor`` * ``other``."""
    total = dict(terms)
    for column, value in other.items():
        total[column] = total.get(column, 0.0) + factor * value
    return total


class _Walk:
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
        self.live: dict[int, Terms] = {v: {} for v in columns.k}  # per decidable value: how far it is live now
        self.later: dict[int, list[int]] = {}  # per decidable value: ops whose replay may read it after the backward has
        self.ends_with: dict[int, list[int]] = defaultdict(list)  # op u -> values with u in `later`
        self.direct_end: dict[int, list[int]] = defaultdict(list)  # backward op -> forward values that it reads last
        self.slots = columns.slots
        self.slot_at = {start: g for g, start in enumerate(columns.slots.starts)} if columns.slots is not None else {}
        self.returned_end: dict[int, list[int]] = defaultdict(list)  # backward op -> offloaded values that may be read last there
        for v in columns.k:
            self._find_end(v)
        for v in self.slots.returns if self.slots is not None else ():
            self.returned_end[max(self.windows.last_direct(v), self.windows.last_replay(v))].append(v)
        largest = max((self.size[v] for v in columns.k), default=0)
        self.small_bytes = _SMALL * largest

    def _find_end(self, v: int) -> None:
        """Note what ends v."""
        direct = self.windows.last_direct(v)
        later = [u for u in self.windows.readers[v] if self.windows.demands[u][-1] > direct]
        self.later[v] = later
        if direct >= 0:
            self.direct_end[direct].append(v)
        for u in later:
            self.ends_with[u].append(v)

    def alone(self, f: int) -> bool:
        """Whether f has one output that is decided on: it is then never replayed while that is kept."""
        return sum(w in self.columns.k for w in self.graph.ops[f].outputs) == 1

    def producer(self, v: int) -> int:
        producer = self.graph.values[v].producer
        assert producer is not None
        return producer

    # forward

    def forward(self) -> None:
        graph, rows = self.graph, self.rows
        ends: dict[int, list[int]] = defaultdict(list)
        for v, given in enumerate(graph.is_forward_value):
            if given and v not in graph.held and not graph.ops[self.producer(v)].optional:
                last = graph.n_forward - 1 if v in self.updated else max([self.producer(v), *graph.forward_readers[v][-1:]])
                ends[last].append(v)
        for i, op in enumerate(graph.ops[: graph.n_forward]):
            self._cross_link(i)
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
            self._born(v, {self.columns.k[v]: 1.0})
        if self.slots is not None and v in self.slots.returns:
            self.rows.born(self.size[v], dict.fromkeys(self.slots.columns(v), 1.0))

    def _cross_link(self, index: int) -> None:
        """At the start of a slot: what left in the slot before is gone, and what comes back in this one has its memory."""
        slots = self.slots
        if slots is None or index not in self.slot_at:
            return
        g = self.slot_at[index]
        left, back = slots.out.get(g - 1), slots.back.get(g)
        terms = ({} if left is None else {left: -1.0}) | ({} if back is None else {back: 1.0})
        if terms:
            self.rows.shifts(terms)

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
                self._born(v, {self.columns.k[v]: 1.0})
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
            self._cross_link(j)
            for f, step in self.replays_at[j]:
                self._replay(f, step, j)
            self._backward_op(j, ends[j])
            for v in self.returned_end[j]:
                assert self.slots is not None
                rows.dies(self.size[v], dict.fromkeys(self.slots.columns(v), 1.0))
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
        overwrites = overwritten is not None and overwritten in self.direct_end[j] and not self.later[overwritten]
        if overwritten is not None and overwrites:  # a replayed copy is; what the forward has saved stays beside the output
            kept = self.columns.k.get(overwritten)
            self._shrinks_to(overwritten, {} if kept is None else {kept: 1.0})
        rows.fixed(sum(self.size[v] for v in op.outputs) + self.workspace[j])
        rows.moment()
        rows.fixed(-self.workspace[j] - sum(self.size[v] for v in ends if v not in before))
        for v in self.direct_end[j]:
            if overwrites and v == overwritten:
                self._shrinks_to(v, {})
            else:
                outstanding = [self._outstanding(u, j) for u in self.later[v]]
                self._shrinks_to(v, self._largest(outstanding))

    def _replay(self, f: int, step: int, j: int) -> None:
        op, rows = self.graph.ops[f], self.rows
        rise = self.columns.rise(f, step)
        overwritten = self._overwritten(f, j)
        remade = [v for v in op.outputs if v in self.columns.k and self._last_birth(v) >= j]
        for v in op.outputs:
            if v in remade:
                self._born(v, rise, silent=overwritten is not None)
            else:
                rows.born(self.size[v], rise)
        if overwritten is not None:
            self.live[overwritten] = plus(self.live[overwritten], rise, -1.0)
        rows.born(self.workspace[f], rise)
        rows.moment()
        rows.dies(self.workspace[f], rise)
        for v in op.outputs:
            if v not in remade:
                rows.dies(self.size[v], rise)
            elif not self.alone(f) and self.size[v] > self.small_bytes:
                q = {self.columns.q[f][step]: 1.0}
                self._shrinks_to(v, self._largest([{self.columns.k[v]: 1.0}, q]))
        for v in self.ends_with[f]:
            if j > self.windows.last_direct(v):
                self._read_by_replay(v, f, rise, j, overwritten)

    def _read_by_replay(self, v: int, u: int, rise: Terms, j: int, overwritten: int | None) -> None:
        """What is left of v after a possible replay of u at j, a reader of it."""
        if all(self._after(j, u, other) for other in self.later[v]):
            self._shrinks_to(v, {})  # no replay of another can follow
        elif len(self.later[v]) == 1:
            if v != overwritten:
                self._shrinks_to(v, plus(self.live[v], rise, -1.0))
        elif self.windows.last_direct(v) >= 0 or self.alone(self.producer(v)):
            outstanding = [self._outstanding(other, j, inclusive=other <= u) for other in self.later[v]]
            if self.windows.last_direct(v) < 0:
                absent = self._outstanding(self.producer(v), j)
                outstanding = [plus(expression, absent, -1.0) for expression in outstanding]
            self._shrinks_to(v, self._largest(outstanding))

    def _after(self, j: int, u: int, other: int) -> bool:
        """Whether no replay of ``other`` is possible after that of u at j."""
        last = self.windows.demands[other][-1]
        return last < j or (last == j and other <= u)

    def _last_birth(self, v: int) -> int:
        """The last position at which a replay of v is for a later read of it, and not for another output of its op."""
        direct = self.windows.last_direct(v)
        return direct if direct >= 0 else max((self.windows.demands[u][-1] for u in self.later[v]), default=-1)

    def _overwritten(self, f: int, j: int) -> int | None:
        """The input that a replay of f at j certainly overwrites: it dies there, and f's output is not live yet."""
        op = self.graph.ops[f]
        if op.in_place is None or op.in_place[0] in self.updated or op.in_place[0] not in self.ends_with[f]:
            return None
        source, target = op.in_place
        dies = len(self.later[source]) == 1 and j > self.windows.last_direct(source)
        dies = dies and source in self.windows.never_keep  # or it might be what the forward has saved
        return source if dies and self.alone(f) and target in self.columns.k and self._last_birth(target) >= j else None

    # columns

    def _outstanding(self, u: int, j: int, inclusive: bool = True) -> Terms:
        """r_u - q_u,j: 1 where u is replayed, but not by position j (before j if not inclusive)."""
        r = self.columns.r.get(u)
        if r is None:
            return {}
        q = self.columns.q_at(u, j if inclusive else j - 1)
        return {r: 1.0} if q is None else plus({r: 1.0}, {q: -1.0})

    def _largest(self, expressions: list[Terms]) -> Terms:
        expressions = [e for e in expressions if any(e.values())]
        if len(expressions) <= 1:
            return expressions[0] if expressions else {}
        return {self.rows.largest(expressions): 1.0}

    def _born(self, v: int, terms: Terms, silent: bool = False) -> None:
        """``silent``: in the storage of a value that ends."""
        if not silent:
            self.rows.born(self.size[v], terms)
        self.live[v] = plus(self.live[v], terms)

    def _shrinks_to(self, v: int, terms: Terms) -> None:
        self.rows.shrinks(self.size[v], self.live[v], terms, copies=1 if self.alone(self.producer(v)) else 2)
        self.live[v] = terms
