"""Slots of a few ops, and the offloaded bytes that cross the link in each: the MILP's picture of a copy queue.

Legend:
    g           a slot: a run of consecutive ops, forward or backward; T_g the seconds of its ops, replays left out
    o_v in {0,1}    v is offloaded; s_v its bytes. There are up to two such columns for v, which differ in b(v)
    out_g, back_g   bytes that leave, and that return, in slot g
    stall_g         seconds by which the computation waits in slot g, a cost
    a(v), b(v)      the slots in which v may first leave, and by whose end it is back: those of its last forward read and of its
                    first read in the backward, but `Grid.whole` of its copy's time later, and earlier; for a value whose
                    copy is half done has given no memory back, and takes all of it
    out_g, back_g   bytes that leave, and that return, in slot g
    stall_g         seconds by which the computation waits in slot g, a cost
    a(v), b(v)      the first slot in which v may leave, and the last in which it must return: the one after that of its last
                    forward read, and the one before that of its first read in the backward; where slots are single ops
                    these slots themselves, for at worst that op's own time is then counted to the copy

Rows:
    backlog   sum of out up to g <= sum of s_v o_v with a(v) <= g: nothing leaves before it may
    leave     all has left by the end of the slot `Slots.out_by`
    lead      sum of back up to g >= sum of s_v o_v with b(v) <= g: all is back before it is read
    link      d/D + h (1 - D'/D)/H' <= T_g + stall_g and h/H + d (1 - H'/H)/D' <= T_g + stall_g, for d = out_g and h = back_g,
              speeds D and H alone and D' and H' beside the other direction
    early     q_u,j + o_v <= 1 for a replay of u that reads v, at j before v is back
    host      sum of s_v o_v <= host budget

In memory an offloaded value stays from its last forward read until bytes have left: slot g has room for what left before it;
and bytes returning in slot g take memory from its beginning. So a value is cut into bytes, and they are in no order but that of
the slots. What whole copies in their order do is for the simulator to say (`placement`).

Source:
    DESIGN section 4, Links, but with the bytes of all values in one column per slot and direction in place of two binaries and
    a row of fractions per value. It is the fluid limit of that: measured on 32 transformer layers it is as near to the
    simulated time, and solved in a tenth of the time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from actsolve.planners.lp import INFINITY, Array, LinearModel
from actsolve.planners.windows import Windows
from actsolve.problem import Problem

Terms = dict[int, float]

_EARLY = 12  # backward ops before its first direct read by which an offloaded value may be back, for a replay
_LATE = 1 / 16  # of the backward ops: while these run, values may still leave


@dataclass(frozen=True)
class Grid:
    """How time is cut, and how a copy is pictured in it.

    Attributes:
        n_slots: About how many slots there are.
        whole: How much of a copy's time passes before it counts. With 0 the copies of large tensors stall in truth, with 0.5 the
            link idles here and there, but for tensors whose copies take many ops: then the other way round.
    """

    n_slots: int
    whole: float


@dataclass
class Return:
    """One way to offload a value: a time by which it is back.

    Attributes:
        first_read: The backward op before which no replay reads it.
        slot: b(v), the slot by whose end it is back.
        column: o_v.
    """

    first_read: int
    slot: int
    column: int = -1


@dataclass
class Slots:
    """The slots of a problem and the columns of its offloaded values.

    Attributes:
        starts: The first op of each slot, ascending; no slot holds forward and backward ops.
        out_by: The slot by whose end all has left the device.
        size: Per value that may be offloaded: its bytes, in units.
        leaves: a(v) of these values.
        returns: How each of them may be offloaded, the earliest return first.
        out, back: Columns of the bytes that leave and return, per slot.
        backlog, lead: Columns of the bytes that wait to leave, and that are back before they must be, at the end of a slot.
        stalls: Columns of the stalls, per slot.
        link: The rows of the link, per slot: terms whose sum, less the stall, is within a room.
    """

    starts: list[int]
    out_by: int
    size: dict[int, float] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    returns: dict[int, list[Return]] = field(default_factory=dict)
    out: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)
    backlog: dict[int, int] = field(default_factory=dict)
    lead: dict[int, int] = field(default_factory=dict)
    stalls: dict[int, int] = field(default_factory=dict)
    link: dict[int, list[tuple[Terms, float]]] = field(default_factory=lambda: defaultdict(list))

    def slot(self, op: int) -> int:
        """The slot that ``op`` is in."""
        return bisect_right(self.starts, op) - 1

    def columns(self, v: int) -> list[int]:
        """Columns of which one is 1 where v is offloaded."""
        return [r.column for r in self.returns.get(v, ())]

    def joins(self, g: int) -> Terms:
        """What may leave from slot g on, and not before."""
        return {c: self.size[v] for v, leaves in self.leaves.items() if leaves == g for c in self.columns(v)}

    def needs(self, g: int) -> Terms:
        """What must be back by the end of slot g."""
        return {r.column: self.size[v] for v, returns in self.returns.items() for r in returns if r.slot == g}

    def fill(self, x: Array, values: Iterable[int]) -> None:
        """Set the columns in ``x`` to those of a plan that offloads ``values``: out as soon, back as late, as the link can."""
        for v in values:
            for first in self.returns.get(v, ())[:1]:
                x[first.column] = 1.0
        waiting = 0.0
        for g, column in sorted(self.out.items()):
            waiting += _value(self.joins(g), x)
            x[column] = waiting if g == self.out_by else min(waiting, self._room(g, column))
            waiting -= x[column]
            x[self.backlog[g]] = waiting
        missing = 0.0
        for g, column in sorted(self.back.items(), reverse=True):
            missing += _value(self.needs(g), x)
            x[column] = missing if g == min(self.back) else min(missing, self._room(g, column))
            missing -= x[column]
        ahead = 0.0
        for g, column in sorted(self.back.items()):
            ahead += x[column] - _value(self.needs(g), x)
            x[self.lead[g]] = max(0.0, ahead)
        for g, rows in self.link.items():
            x[self.stalls[g]] = max(0.0, *(_value(terms, x) - room for terms, room in rows))

    def _room(self, g: int, column: int) -> float:
        """What can cross the link in slot g without a stall, in units, while nothing goes the other way."""
        return min((room / terms[column] for terms, room in self.link[g] if terms.get(column)), default=INFINITY)


def _value(terms: Terms, x: Array) -> float:
    return float(sum(x[column] * factor for column, factor in terms.items()))


def find_slots(problem: Problem, found: Windows, unit: float, grid: Grid) -> Slots:
    """Return the slots of ``grid``, and which values may be offloaded in them; the solver sees ``unit`` bytes as 1."""
    graph, links = problem.graph, problem.links
    assert links is not None
    n_ops = max(1, round(len(graph.ops) / grid.n_slots))
    starts = [*range(0, graph.n_forward, n_ops), *range(graph.n_forward, len(graph.ops), n_ops)]
    n_late = max(1, round(_LATE * (len(graph.ops) - graph.n_forward)))
    slots = Slots(starts, 0)
    slots.out_by = slots.slot(min(graph.n_forward - 1 + n_late, len(graph.ops) - 1))
    clock = _Clock(problem)
    for v in sorted(problem.offloadable - found.must_keep):
        producer = graph.values[v].producer
        assert producer is not None
        size_bytes = graph.values[v].size_bytes
        last = max([producer, *graph.forward_readers[v][-1:]])
        leaves = slots.slot(clock.after(last, grid.whole * size_bytes / links.d2h))
        lead_s = grid.whole * size_bytes / links.h2d
        returns = {slots.slot(clock.before(first, lead_s)): first for first in _first_reads(found, v)}
        later = [Return(first, slot) for slot, first in sorted(returns.items()) if slot > slots.out_by]
        if leaves <= slots.out_by and later:
            slots.size[v], slots.leaves[v], slots.returns[v] = graph.values[v].size_bytes / unit, leaves, later
    return slots


class _Clock:
    """When ops run, replays and stalls left out."""

    def __init__(self, problem: Problem) -> None:
        seconds = [0.0 if op.optional else s for op, s in zip(problem.graph.ops, problem.costs.seconds, strict=True)]
        self._ends = list(accumulate(seconds))

    def after(self, op: int, delay_s: float) -> int:
        """The op that runs ``delay_s`` after the end of ``op``, or ``op`` itself."""
        return min(max(op, bisect_left(self._ends, self._ends[op] + delay_s)), len(self._ends) - 1)

    def before(self, op: int, lead_s: float) -> int:
        """The op that runs ``lead_s`` before ``op`` begins, or ``op`` itself."""
        start = self._ends[op - 1] if op else 0.0
        return op if lead_s <= 0 else min(op, bisect_right(self._ends, start - lead_s))


def _first_reads(found: Windows, v: int) -> list[int]:
    """Backward ops by which v may be back if it is offloaded: for its first direct read, or up to `_EARLY` ops earlier.

    The earlier one is for replays that read it. A skip connection is also an input of replays long before: it does not return
    for these.
    """
    direct = found.graph.backward_readers[v][:1]
    replays = [found.demands[u] for u in found.readers.get(v, ())]
    if not direct and not replays:
        return []
    last = direct[0] if direct else max(demands[-1] for demands in replays)
    near = [p for demands in replays if demands[-1] >= last - _EARLY for p in demands if last - _EARLY <= p < last]
    return [min(near), last] if near else [last]


def offload_columns(lp: LinearModel, problem: Problem, slots: Slots, time_scale: float) -> None:
    """Add the columns and all rows but memory. Costs are seconds times ``time_scale``; if that is 0, stalls cost nothing."""
    if not slots.size:
        return
    for returns in slots.returns.values():
        for one in returns:
            one.column = lp.column(integer=True)
    total = sum(slots.size.values())
    for g in range(min(slots.leaves.values()), slots.out_by + 1):
        slots.out[g] = lp.column(upper=total)
    for g in range(slots.slot(problem.graph.n_forward), max(r.slot for returns in slots.returns.values() for r in returns) + 1):
        slots.back[g] = lp.column(upper=total)
    for g in sorted(slots.out.keys() | slots.back.keys()):
        slots.stalls[g] = lp.column(cost=1.0 if time_scale else 0.0, upper=INFINITY)
    _balance_rows(lp, slots, total)
    _link_rows(lp, problem, slots, time_scale)
    if problem.host_budget_bytes is not None:
        of_total = problem.host_budget_bytes * total / sum(problem.graph.values[v].size_bytes for v in slots.size)
        terms = {c: size for v, size in slots.size.items() for c in slots.columns(v)}
        lp.row(-INFINITY, of_total, list(terms), list(terms.values()))


def _balance_rows(lp: LinearModel, slots: Slots, total: float) -> None:
    """Backlog: what was there before + what may leave from g on - out_g. Lead: before + back_g - what must be back by its end."""
    before: Terms = {}
    for g, out in sorted(slots.out.items()):
        slots.backlog[g] = lp.column(upper=0.0 if g == slots.out_by else total)
        terms = {slots.backlog[g]: 1.0, out: 1.0} | before | {c: -size for c, size in slots.joins(g).items()}
        lp.row(0.0, 0.0, list(terms), list(terms.values()))
        before = {slots.backlog[g]: -1.0}
    before = {}
    for g, back in sorted(slots.back.items()):
        slots.lead[g] = lp.column(upper=total)
        terms = {slots.lead[g]: -1.0, back: 1.0} | before | {c: -size for c, size in slots.needs(g).items()}
        lp.row(0.0, 0.0, list(terms), list(terms.values()))
        before = {slots.lead[g]: 1.0}


def _link_rows(lp: LinearModel, problem: Problem, slots: Slots, time_scale: float) -> None:
    graph, links = problem.graph, problem.links
    assert links is not None
    out, back = links.out(beside=False), links.back(beside=False)
    out_both, back_both = links.out(beside=True), links.back(beside=True)
    ends = [*slots.starts[1:], len(graph.ops)]
    per_unit = _unit(problem, slots) * time_scale
    for g, stall in slots.stalls.items():
        ops = range(slots.starts[g], ends[g])
        room = time_scale * sum(problem.costs.seconds[i] for i in ops if not graph.ops[i].optional)
        d, h = slots.out.get(g), slots.back.get(g)
        if d is not None:
            beside = {} if h is None else {h: per_unit * (1 - out_both / out) / back_both}
            slots.link[g].append(({d: per_unit / out} | beside, room))
        if h is not None:
            beside = {} if d is None else {d: per_unit * (1 - back_both / back) / out_both}
            slots.link[g].append(({h: per_unit / back} | beside, room))
        for terms, _ in slots.link[g]:
            lp.row(-INFINITY, room, [*terms, stall], [*terms.values(), -1.0])


def _unit(problem: Problem, slots: Slots) -> float:
    """Bytes that the solver sees as 1."""
    v, size = next(iter(slots.size.items()))
    return problem.graph.values[v].size_bytes / size
