"""The rows of the replay-window MILP: which values to keep and which ops to replay, and when.

Legend:
    v            a decidable value (`Graph.decidable`); p(v) its op; s_v its bytes
    f, u         forward ops that may be replayed (`Windows.demands`)
    j            a position: the index of a backward op
    k_v   in {0,1}   v is kept from the forward to its last read
    o_v   in {0,1}   v is offloaded
    r_f   in {0,1}   f is replayed once
    q_f,j in [0,1]   f has been replayed by position j; a step function of j that rises only at f's demands, and is r_f
                     from the last one on. Memory mostly pushes it down to what the rows force; where it does not,
                     it is made binary after all
    U_t   >= 0       memory at moment t above what is live whatever is decided (`moments`)

Rows:
    use      q_p(v),j + k_v + o_v >= 1     at the first direct read j of v
    once     k_v + o_v + r_p(v) <= 1       where v is the only decidable output of its op; k_v + o_v <= 1 for all
    inputs   r_u <= k_v + o_v + r_p(v)     for each decidable input v of u
    timing   q_f,j >= q_u,j - k_v - o_v    for each input v of u made by f, at each demand j of u
    rising   q_f,j' <= q_f,j <= r_f        for j' < j
    memory   see `moments` and `lifetimes`
    link     see `slots`, where values can be offloaded

Source:
    DESIGN section 4. The step function over demands instead of one q per backward op is ours: a demand-driven replay
    happens at no other position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from actsolve.plan import Copies
from actsolve.planners.lp import INFINITY, Array, LinearModel
from actsolve.planners.slots import Grid, Slots, find_slots, offload_columns
from actsolve.planners.windows import Windows
from actsolve.problem import Problem
from actsolve.schedule import NO_COPIES, StepKind, runs_of

Terms = dict[int, float]  # column -> coefficient


@dataclass
class Columns:
    """The columns of the decisions, and the step functions over them."""

    windows: Windows
    lp: LinearModel = field(default_factory=LinearModel)
    k: dict[int, int] = field(default_factory=dict)
    r: dict[int, int] = field(default_factory=dict)
    q: dict[int, tuple[int, ...]] = field(default_factory=dict)  # per op: one column per demand; the last is r's
    slots: Slots | None = None  # where values may be offloaded

    def there(self, v: int) -> list[int]:
        """Columns of which one is 1 where v is kept or offloaded."""
        return [self.k[v], *(self.slots.columns(v) if self.slots is not None else ())]

    def q_at(self, f: int, position: int) -> int | None:
        """Column of q_f at ``position``; None where it is 0."""
        step = bisect_right(self.windows.demands.get(f, ()), position)
        return self.q[f][step - 1] if step else None

    def make_stepwise(self, ops: set[int]) -> None:
        """Let q of these ops take whole values only."""
        for f in ops:
            for column in self.q[f]:
                self.lp.integer[column] = True

    def fractional_steps(self, x: Array) -> set[int]:
        """Return the ops that ``x`` replays in part at one position and in part at another."""
        return {f for f, columns in self.q.items() if any(1e-6 < x[c] < 1 - 1e-6 for c in columns)}

    def rise(self, f: int, step: int) -> Terms:
        """q_f at its demand number ``step`` less q_f just before: 1 where f is replayed exactly there."""
        columns = self.q[f]
        return {columns[step]: 1.0} if step == 0 else {columns[step]: 1.0, columns[step - 1]: -1.0}


def decision_columns(problem: Problem, found: Windows, time_scale: float, unit: float, grid: Grid) -> Columns:
    """Return the model with the columns k, o, r and q, and every row but memory.

    Costs are seconds times ``time_scale``; the solver sees ``unit`` bytes as 1; copies are pictured on ``grid``.
    """
    columns = Columns(found)
    lp = columns.lp
    for v in found.graph.decidable:
        low = 1.0 if v in found.must_keep else 0.0
        high = 0.0 if v in found.never_keep else 1.0
        columns.k[v] = lp.column(lower=low, upper=max(low, high), integer=True)
    if problem.offloadable:
        columns.slots = find_slots(problem, found, unit, grid)
        offload_columns(lp, problem, columns.slots, time_scale)
        for v in columns.slots.returns:
            there = columns.there(v)
            lp.row(-INFINITY, 1.0, there, [1.0] * len(there))
    for f, demands in found.demands.items():
        columns.r[f] = lp.column(cost=problem.costs.replay_seconds[f] * time_scale, integer=True)
        columns.q[f] = (*(lp.column() for _ in demands[:-1]), columns.r[f])
        for before, after in zip(columns.q[f], columns.q[f][1:], strict=False):
            lp.row(-INFINITY, 0.0, [before, after], [1.0, -1.0])
    for v in found.graph.decidable:
        _use_rows(columns, v)
    for u in found.demands:
        for v in (*found.graph.ops[u].inputs, *found.graph.ops[u].replay_inputs):
            if v in columns.k:
                _input_rows(columns, u, v)
    return columns


def _use_rows(columns: Columns, v: int) -> None:
    graph, lp = columns.windows.graph, columns.lp
    producer = graph.values[v].producer
    assert producer is not None
    there, r = columns.there(v), columns.r.get(producer)
    ones = [1.0] * len(there)
    direct = graph.backward_readers[v]
    first = columns.q_at(producer, direct[0]) if direct else None
    alone = sum(w in columns.k for w in graph.ops[producer].outputs) == 1
    if r is not None and alone:
        lp.row(1.0 if first == r else -INFINITY, 1.0, [*there, r], [*ones, 1.0])
    if direct and not (alone and first == r and r is not None):
        if first is None:
            lp.row(1.0, INFINITY, there, ones)
        else:
            lp.row(1.0, INFINITY, [*there, first], [*ones, 1.0])


def _input_rows(columns: Columns, u: int, v: int) -> None:
    """v is there when u is replayed: at every demand of u, and so in the end; what is offloaded, not before it is back."""
    lp, there = columns.lp, columns.there(v)
    less = [-1.0] * len(there)
    producer = columns.windows.graph.values[v].producer
    assert producer is not None
    for position, q_u in zip(columns.windows.demands[u], columns.q[u], strict=True):
        q_f = columns.q_at(producer, position)
        if q_f is None:
            lp.row(-INFINITY, 0.0, [q_u, *there], [1.0, *less])
        else:
            lp.row(-INFINITY, 0.0, [q_u, *there, q_f], [1.0, *less, -1.0])
    for one in columns.slots.returns.get(v, ()) if columns.slots is not None else ():
        before = columns.q_at(u, one.first_read - 1)
        if before is not None:
            lp.row(-INFINITY, 1.0, [before, one.column], [1.0, 1.0])


def decisions_of(columns: Columns, x: Array) -> frozenset[int]:
    """Return the values that the solution ``x`` keeps."""
    return frozenset(v for v, column in columns.k.items() if x[column] > 0.5)


def early_replays(columns: Columns, x: Array) -> dict[int, int]:
    """Return, per op that the solution ``x`` replays before its last demand, the position at which it does."""
    early = {}
    for f, steps in columns.q.items():
        step = next((i for i, column in enumerate(steps) if x[column] > 0.5), None)
        if step is not None and step < len(steps) - 1:
            early[f] = columns.windows.demands[f][step]
    return early


def offloaded_by(columns: Columns, x: Array) -> frozenset[int]:
    """Return the values that the solution ``x`` offloads."""
    slots = columns.slots
    return frozenset(v for v in slots.returns if sum(x[c] for c in slots.columns(v)) > 0.5) if slots else frozenset()


def start_from(
    columns: Columns, kept: frozenset[int], early: Mapping[int, int], offloaded: Mapping[int, Copies] = NO_COPIES
) -> Array:
    """Return k, o, r and q of the schedule of a plan, and what crosses the link when; all other columns are 0."""
    x = np.zeros(columns.lp.n_columns)
    for v in kept:
        if v in columns.k:
            x[columns.k[v]] = 1.0
    if columns.slots is not None:
        columns.slots.fill(x, offloaded)
    graph = columns.windows.graph
    waiting: list[int] = []
    for kind, op in runs_of(graph, kept | offloaded.keys(), early):
        if kind is StepKind.REPLAY:
            waiting.append(op)
        elif waiting:
            for f in waiting:
                for position, column in zip(columns.windows.demands.get(f, ()), columns.q.get(f, ()), strict=True):
                    if position >= op:
                        x[column] = 1.0
            waiting.clear()
    return x
