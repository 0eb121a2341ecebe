"""Slots of a few ops, and the offloaded bytes that cross the link in each: the MILP's picture of a copy queue.

Legend:
    g           a slot: a run of consecutive ops, forward or backward; T_g the seconds of its ops, replays left out
    o_v in {0,1}    v is offloaded; s_v its bytes
    out_g, back_g   bytes that leave, and that return, in slot g
    stall_g         seconds by which the computation waits in slot g, a cost
    a(v), n(v)      the slots of v's last forward read, and of its first possible read in the backward

Rows:
    backlog   sum of out up to g <= sum of s_v o_v with a(v) < g: nothing leaves before it may
    leave     all has left by the end of the slot `Slots.out_by`
    lead      sum of back up to g >= sum of s_v o_v with n(v) <= g + 1: all is back a slot before it is read
    link      d/D + h (1 - D'/D)/H' <= T_g + stall_g and h/H + d (1 - H'/H)/D' <= T_g + stall_g, for d = out_g and h = back_g,
              speeds D and H alone and D' and H' beside the other direction
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

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from actsolve.planners.lp import INFINITY, Array, LinearModel
from actsolve.planners.windows import Windows
from actsolve.problem import Problem

Terms = dict[int, float]

_LATE = 1  # slots of the backward in which values may still leave


@dataclass
class Slots:
    """The slots of a problem and the columns of its offloaded values.

    Attributes:
        starts: The first op of each slot, ascending; no slot holds forward and backward ops.
        out_by: The slot by whose end all has left the device.
        size: Per value that may be offloaded: its bytes, in units.
        leaves, needed: a(v) and n(v) of these values.
        offload: Their columns o_v.
        out, back: Columns of the bytes that leave and return, per slot.
        backlog, lead: Columns of the bytes that wait to leave, and that are back before they must be, at the end of a slot.
        stalls: Columns of the stalls, per slot.
        link: The rows of the link, per slot: terms whose sum, less the stall, is within a room.
    """

    starts: list[int]
    out_by: int
    size: dict[int, float] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    needed: dict[int, int] = field(default_factory=dict)
    offload: dict[int, int] = field(default_factory=dict)
    out: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)
    backlog: dict[int, int] = field(default_factory=dict)
    lead: dict[int, int] = field(default_factory=dict)
    stalls: dict[int, int] = field(default_factory=dict)
    link: dict[int, list[tuple[Terms, float]]] = field(default_factory=lambda: defaultdict(list))

    def slot(self, op: int) -> int:
        """The slot that ``op`` is in."""
        return bisect_right(self.starts, op) - 1

    def joins(self, g: int, values: Iterable[int]) -> list[int]:
        """Those of ``values`` that may leave from slot g on, and not before."""
        return [v for v in values if self.leaves[v] + 1 == g]

    def needs(self, g: int, values: Iterable[int]) -> list[int]:
        """Those of ``values`` that must be back by the end of slot g."""
        return [v for v in values if self.needed[v] - 1 == g]

    def fill(self, x: Array, values: Iterable[int]) -> None:
        """Set the columns in ``x`` to those of a plan that offloads ``values``: out as soon, back as late, as the link can."""
        values = [v for v in values if v in self.offload]
        for v in values:
            x[self.offload[v]] = 1.0
        waiting = 0.0
        for g, column in sorted(self.out.items()):
            waiting += sum(self.size[v] for v in self.joins(g, values))
            x[column] = waiting if g == self.out_by else min(waiting, self._room(g, column))
            waiting -= x[column]
            x[self.backlog[g]] = waiting
        missing = 0.0
        for g, column in sorted(self.back.items(), reverse=True):
            missing += sum(self.size[v] for v in self.needs(g, values))
            x[column] = missing if g == min(self.back) else min(missing, self._room(g, column))
            missing -= x[column]
        ahead = 0.0
        for g, column in sorted(self.back.items()):
            ahead += x[column] - sum(self.size[v] for v in self.needs(g, values))
            x[self.lead[g]] = max(0.0, ahead)
        for g, rows in self.link.items():
            x[self.stalls[g]] = max(0.0, *(sum(x[c] * t for c, t in terms.items()) - room for terms, room in rows))

    def _room(self, g: int, column: int) -> float:
        """What can cross the link in slot g without a stall, in units, while nothing goes the other way."""
        return min((room / terms[column] for terms, room in self.link[g] if terms.get(column)), default=INFINITY)


def find_slots(problem: Problem, found: Windows, unit: float, n_slots: int) -> Slots:
    """Return about ``n_slots`` slots, and which values may be offloaded in them; the solver sees ``unit`` bytes as 1."""
    graph = problem.graph
    n_ops = max(1, round(len(graph.ops) / n_slots))
    starts = [*range(0, graph.n_forward, n_ops), *range(graph.n_forward, len(graph.ops), n_ops)]
    slots = Slots(starts, 0)
    slots.out_by = slots.slot(graph.n_forward - 1) + _LATE
    for v in sorted(problem.offloadable - found.must_keep):
        first = _first_need(found, v)
        if first is None:
            continue
        producer = graph.values[v].producer
        assert producer is not None
        leaves, needed = slots.slot(max([producer, *graph.forward_readers[v][-1:]])), slots.slot(first)
        if leaves < slots.out_by and needed - 1 > slots.out_by:
            slots.size[v] = graph.values[v].size_bytes / unit
            slots.leaves[v], slots.needed[v] = leaves, needed
    return slots


def _first_need(found: Windows, v: int) -> int | None:
    """The first backward op at which v may be read, by it or by a replay before it."""
    direct = found.graph.backward_readers[v][:1]
    replays = [found.demands[u][0] for u in found.readers.get(v, ())]
    return min([*direct, *replays], default=None)


def offload_columns(lp: LinearModel, problem: Problem, slots: Slots, time_scale: float) -> None:
    """Add the columns and all rows but memory. Costs are seconds times ``time_scale``; if that is 0, stalls cost nothing."""
    if not slots.size:
        return
    for v in slots.size:
        slots.offload[v] = lp.column(integer=True)
    total = sum(slots.size.values())
    for g in range(min(slots.leaves.values()) + 1, slots.out_by + 1):
        slots.out[g] = lp.column(upper=total)
    for g in range(slots.out_by + 1 - _LATE, max(slots.needed.values())):
        slots.back[g] = lp.column(upper=total)
    for g in sorted(slots.out.keys() | slots.back.keys()):
        slots.stalls[g] = lp.column(cost=1.0 if time_scale else 0.0, upper=INFINITY)
    _balance_rows(lp, slots, total)
    _link_rows(lp, problem, slots, time_scale)
    if problem.host_budget_bytes is not None:
        of_total = problem.host_budget_bytes * total / sum(problem.graph.values[v].size_bytes for v in slots.size)
        lp.row(-INFINITY, of_total, list(slots.offload.values()), list(slots.size.values()))


def _balance_rows(lp: LinearModel, slots: Slots, total: float) -> None:
    """Backlog: what was there before + what may leave from g on - out_g. Lead: before + back_g - what must be back by its end."""
    before: Terms = {}
    for g, out in sorted(slots.out.items()):
        slots.backlog[g] = lp.column(upper=0.0 if g == slots.out_by else total)
        joining = {slots.offload[v]: -slots.size[v] for v in slots.joins(g, slots.size)}
        terms = {slots.backlog[g]: 1.0, out: 1.0} | before | joining
        lp.row(0.0, 0.0, list(terms), list(terms.values()))
        before = {slots.backlog[g]: -1.0}
    before = {}
    for g, back in sorted(slots.back.items()):
        slots.lead[g] = lp.column(upper=total)
        needed = {slots.offload[v]: -slots.size[v] for v in slots.needs(g, slots.size)}
        terms = {slots.lead[g]: -1.0, back: 1.0} | before | needed
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
