"""A mixed-integer program over segments of the order, with memory rows only where they are asked for.

The order of first runs is cut into *segments*. Per segment and node: is the node run again in it? Per segment and value: is the
value live when it ends? A *moment* is a run at the end of a segment at which memory is counted, exactly: what is live
afterwards, and what the run reads and makes. Within a segment all runs find each other's outputs, for memory is looked at only
at its end.

With every replayable node allowed in every segment, and moments at first runs only, each schedule with this order of first runs
is a solution, whatever it runs again and however often: then the optimum is a *global* lower bound. So it is where memory is
counted at a replay at some time within a segment: what it takes, and what is live throughout. With moments between replays, or
nodes left out, it bounds the schedules that replay in the order of the nodes, from no further back than they are allowed to.

Source:
    Jain et al., Checkmate, MLSys 2020 (its R and S, here per segment and with rows on demand).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from actsolve.dag import Dag
from actsolve.planners.lp import INFINITY, Array, LinearModel
from actsolve.planners.sequence import Ints

_SCALE = 1000.0  # the objective of running every node once more
_PRICE = 30 * _SCALE  # of the whole budget once more


@dataclass(frozen=True)
class Moment:
    """When memory is counted: at the first run of ``node``, or while ``replay`` is run again for it."""

    node: int
    replay: int | None = None

    @property
    def at(self) -> tuple[int, float]:
        return self.node, INFINITY if self.replay is None else self.replay


@dataclass(frozen=True)
class Segment:
    """Runs between two moments.

    Attributes:
        firsts: Nodes that run first in it.
        again: Nodes that may run again in it.
        moment: What ends it; None if memory is not counted at its end.
        inner: Nodes that run again somewhere in it: at that time what is live throughout the segment is counted.
        early: Those of ``again`` that no first run in it needs, only later ones.
    """

    firsts: range
    again: frozenset[int]
    moment: Moment | None
    inner: tuple[int, ...] = ()
    early: frozenset[int] = frozenset()

    @property
    def last(self) -> int:
        """The node that is next to run first, or has just run first, at its end."""
        return self.moment.node if self.moment is not None else self.firsts[-1]


def ancestors(dag: Dag, nodes: Iterable[int], width: int | None) -> set[int]:
    """Return the replayable nodes that ``nodes`` are reached from over replayable nodes, the nearest ``width`` or a few more."""
    found: set[int] = set()
    ring = {dag.maker[v] for node in nodes for v in dag.reads[node]}
    while ring and (width is None or len(found) < width):
        ring = {u for u in ring if dag.replayable[u] and u not in found}
        found |= ring
        ring = {dag.maker[v] for u in ring for v in dag.replay_reads[u]}
    return found


def segments_of(
    dag: Dag,
    moments: Collection[Moment],
    width: int | None,
    *,
    ordered: bool = True,
    also: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> list[Segment]:
    """Cut the order after every moment, and where replays begin.

    Args:
        dag: What is ordered.
        moments: When memory is counted.
        width: How many of its nearest ancestors may run again for a node; None for all.
        ordered: Replays for one node come in the order of the nodes, so that there are segments between them. Otherwise in any
            order: they are one segment, with that node, and what is counted at a replay is only what is live throughout.
        also: Per node, others that may run again for it.
    """
    of_node: dict[int, list[Moment]] = {}
    for moment in sorted(moments, key=lambda m: m.at):
        of_node.setdefault(moment.node, []).append(moment)
    found: list[Segment] = []
    start = 0
    # Before `replay_from` nothing runs again, and the forward leaves what is not overwritten: no segment reaches over these.
    for node in sorted({*of_node, dag.n_nodes - 1, dag.replay_from - 1, dag.n_forward - 1} - {-1}):
        inner = [m.replay for m in of_node.get(node, ()) if m.replay is not None]
        if inner and start < node:
            found.append(Segment(range(start, node), _again(dag, range(start, node), width, also), None))
            start = node
        allowed = _again(dag, range(start, node + 1), width, also)
        for replay in inner if ordered else ():
            before = frozenset(u for u in allowed if u <= replay)
            found.append(Segment(range(node, node), before, Moment(node, replay)))
            allowed -= before
        last = next((m for m in of_node.get(node, ()) if m.replay is None), None)
        needed = allowed if ordered else ancestors(dag, range(max(start, dag.replay_from), node + 1), None)
        early = allowed - needed
        found.append(Segment(range(start, node + 1), allowed, last, () if ordered else tuple(inner), early))
        start = node + 1
    return found


def _again(dag: Dag, firsts: range, width: int | None, also: Mapping[int, Collection[int]]) -> frozenset[int]:
    """What may run again in a segment of these first runs.

    All that is read again by them or later: a replay may come early, while what it reads is still live. With a ``width``, only
    what is soon read.
    """
    possible = range(max(firsts.start, dag.replay_from), firsts.stop)
    if not possible:
        return frozenset()
    if width is None:
        found = {u for u in ancestors(dag, range(possible.start, dag.n_nodes), None) if u < possible[-1]}
    else:
        found = {u for node in possible for u in ancestors(dag, [node], width)}
    return frozenset(found.union(*(also.get(node, ()) for node in possible)))


class SegmentModel:
    """The program over some segments."""

    def __init__(self, dag: Dag, segments: Sequence[Segment], *, elastic: bool = False) -> None:
        """``elastic``: the budget may be exceeded, at a price: so there is a solution to start from."""
        self.dag, self.segments = dag, segments
        self._elastic = elastic
        self.model = LinearModel()
        self.scale = max(sum(dag.time), 1e-300) / _SCALE
        self._first_in = [0] * dag.n_nodes
        for index, segment in enumerate(segments):
            for node in segment.firsts:
                self._first_in[node] = index
        self.again: dict[tuple[int, int], int] = {}
        for index, segment in enumerate(segments):
            for node in sorted(segment.again):
                if self._first_in[node] < index:
                    self.again[node, index] = self.model.column(dag.time[node] / self.scale, integer=True)
        self._events = self._events_of_values()
        self.over: dict[int, int] = {}  # segment -> by what share of the budget its moment exceeds it
        self.live: dict[tuple[int, int], int] = {}  # (value, k): it is live from its k-th event to its next
        for value, events in enumerate(self._events):
            for k in range(len(events) - 1):
                stays = value in dag.stays and events[k + 1] <= self._first_in[dag.n_forward - 1]
                lower = 1.0 if value in dag.held or stays else 0.0
                self.live[value, k] = self.model.column(0.0, lower, integer=True)
        self._write_rows()

    def _events_of_values(self) -> list[list[int]]:
        """Per value: the segments in which it may be made or read, ascending; what is held has one more, after the last."""
        events: list[set[int]] = [set() for _ in self.dag.sizes]
        for node in range(self.dag.n_nodes):
            for value in (*self.dag.reads[node], *self.dag.makes[node]):
                events[value].add(self._first_in[node])
        for node, segment in self.again:
            for value in (*self.dag.replay_reads[node], *self.dag.makes[node]):
                events[value].add(segment)
        for value in self.dag.held:
            events[value].add(len(self.segments))
        return [sorted(e) for e in events]

    def _entering(self, value: int, segment: int) -> int | None:
        """The column that says whether ``value`` is live when ``segment`` begins."""
        return self.live.get((value, bisect_left(self._events[value], segment) - 1))

    def _leaving(self, value: int, segment: int) -> int | None:
        return self._entering(value, segment + 1)

    def _write_rows(self) -> None:
        for value, events in enumerate(self._events):
            for k, event in enumerate(events[:-1]):
                made = self._made_in(value, event)
                if k > 0 and made != _ALWAYS and value not in self.dag.held:
                    before = self.live[value, k - 1]
                    self._at_most(self.live[value, k], [before] if made is None else [before, made])
        for index, segment in enumerate(self.segments):
            for node in segment.firsts:
                for value in self.dag.reads[node]:
                    self._needs(None, value, index)
            if segment.moment is not None:
                self._memory_row(index, segment.moment)
            for node in segment.inner:
                self._inner_row(index, node)
        for (node, index), column in self.again.items():
            for value in self.dag.replay_reads[node]:
                self._needs(column, value, index)
            if node in self.segments[index].early:
                self._early(column, node, index)

    def _made_in(self, value: int, segment: int) -> int | None:
        """The column that says whether ``value`` is made in ``segment``; `_ALWAYS` if it is in any case."""
        maker = self.dag.maker[value]
        if self._first_in[maker] == segment:
            return _ALWAYS
        return self.again.get((maker, segment))

    def _needs(self, column: int | None, value: int, segment: int) -> None:
        """A run in ``segment`` finds ``value``: it was live before, or is made there."""
        made, before = self._made_in(value, segment), self._entering(value, segment)
        if made == _ALWAYS:
            return
        sources = [c for c in (made, before) if c is not None]
        if column is None:
            self.model.row(1.0, INFINITY, sources, [1.0] * len(sources))
        else:
            self._at_most(column, sources)

    def _early(self, column: int, node: int, index: int) -> None:
        """A replay ahead of time is worth it only if its outputs stay, and something that it reads does not.

        Else it can as well come right after this segment, unless it takes workspace, or overwrites what it reads.
        """
        leaving = [c for v in self.dag.makes[node] if (c := self._leaving(v, index)) is not None]
        self._at_most(column, leaving)
        if self.dag.workspace[node] or self.dag.in_place[node] is not None:
            return
        reads = [v for v in self.dag.replay_reads[node] if v not in self.dag.held]
        stay = [c for v in reads if (c := self._leaving(v, index)) is not None]
        if len(stay) == len(reads):
            self.model.row(-INFINITY, float(len(stay)), [column, *stay], [1.0] * (1 + len(stay)))

    def _at_most(self, column: int, others: list[int]) -> None:
        self.model.row(-INFINITY, 0.0, [column, *others], [1.0] + [-1.0] * len(others))

    def _memory_row(self, index: int, moment: Moment) -> None:
        dag, again = self.dag, moment.replay is not None
        node = moment.node if moment.replay is None else moment.replay
        reads = dag.replay_reads[node] if again else dag.reads[node]
        own = {*reads, *dag.makes[node]}
        run_bytes = sum(dag.sizes[v] for v in own) + dag.workspace[node] + (self._remade_bytes(node, index) if again else 0)
        columns: list[int] = []
        bytes_: list[float] = []
        for value in self._possible(index):
            if value not in own and dag.sizes[value]:
                column = self._leaving(value, index)
                if column is not None:
                    columns.append(column)
                    bytes_.append(dag.sizes[value])
        room = float(dag.budget_bytes - dag.resident[moment.node])
        run = self.again.get((node, index)) if again else None
        if again:
            if run is None:
                return
            columns.append(run)
            bytes_.append(run_bytes)
        else:
            room -= run_bytes
        shared = dag.in_place[node]
        if shared is not None and not self._stays(shared[0], index):
            columns.append(self._in_place(shared[0], index, run))
            bytes_.append(-dag.sizes[shared[0]])
        unit = max(1.0, float(dag.budget_bytes))
        if self._elastic:
            self.over[index] = self.model.column(_PRICE, upper=INFINITY)
            columns.append(self.over[index])
            bytes_.append(-unit)
        self.model.row(-INFINITY, room / unit, columns, [b / unit for b in bytes_])

    def _inner_row(self, index: int, node: int) -> None:
        """Memory while ``node`` runs again at any time in a segment: what it takes, and what is live throughout."""
        dag, run = self.dag, self.again.get((node, index))
        if run is None:
            return
        own = {*dag.replay_reads[node], *dag.makes[node]}
        last = self.segments[index].firsts[-1]
        run_bytes = sum(dag.sizes[v] for v in own) + dag.workspace[node] + self._remade_bytes(node, index)
        columns, bytes_ = [run], [float(run_bytes)]
        if (shared := dag.in_place[node]) is not None and not self._stays(shared[0], index):
            in_place = self.model.column()
            self._at_most(in_place, [run])
            self._not_saved(in_place, shared[0], index)
            columns.append(in_place)
            bytes_.append(-dag.sizes[shared[0]])
        for value in sorted({*self._possible(index), *dag.reads[last]}):
            if value in own or not dag.sizes[value] or self._first_in[dag.maker[value]] == index:
                continue
            column = self._throughout(value, index, needed=value in dag.reads[last])
            if column is not None:
                columns.append(column)
                bytes_.append(dag.sizes[value])
        unit = max(1.0, float(dag.budget_bytes))
        self.model.row(-INFINITY, (dag.budget_bytes - dag.resident[last]) / unit, columns, [b / unit for b in bytes_])

    def _remade_bytes(self, node: int, index: int) -> int:
        """Bytes of what a replay of ``node`` makes beside a copy that stays: it counts twice meanwhile."""
        return sum(self.dag.sizes[v] for v in self.dag.makes[node] if self._stays(v, index))

    def _stays(self, value: int, index: int) -> bool:
        """Whether ``value`` cannot end in a segment."""
        return value in self.dag.held or (value in self.dag.stays and self.segments[index].last < self.dag.n_forward)

    def _throughout(self, value: int, index: int, *, needed: bool) -> int | None:
        """The column that says whether ``value`` is live all through a segment: ``needed`` at its end or left, and not remade."""
        made, leaving = self.again.get((self.dag.maker[value], index)), self._leaving(value, index)
        if made is None:
            return self._entering(value, index) if needed else leaving
        column = self.model.column()
        if needed:
            self.model.row(1.0, INFINITY, [column, made], [1.0, 1.0])
        elif leaving is None:
            return None
        else:
            self._at_most(leaving, [column, made])
        return column

    def _in_place(self, source: int, index: int, run: int | None) -> int:
        """The column that says whether the run at the end of a segment overwrites ``source``."""
        column = self.model.column()
        after = self._leaving(source, index)
        if after is not None:
            self.model.row(-INFINITY, 1.0, [column, after], [1.0, 1.0])
        if run is not None:
            self._at_most(column, [run])
        self._not_saved(column, source, index)
        return column

    def _not_saved(self, column: int, source: int, index: int) -> None:
        """What the forward has left is not overwritten after it: only what was made again, or first, there."""
        maker, start = self.dag.maker[source], self.dag.n_forward
        if self.segments[index].last >= start > maker:
            later = (i for i in range(index + 1) if self.segments[i].last >= start)
            self._at_most(column, [c for i in later if (c := self.again.get((maker, i))) is not None])

    def _possible(self, index: int) -> Iterable[int]:
        """Values that may be live when a segment ends."""
        return (v for v, events in enumerate(self._events) if events and events[0] <= index < events[-1])

    def columns_of(self, value: int) -> Iterable[tuple[int, int, int]]:
        """Yield (column, first, last): whether ``value`` is live from the end of segment ``first`` to the start of ``last``."""
        events = self._events[value]
        return ((self.live[value, k], events[k], events[k + 1]) for k in range(len(events) - 1))

    def spans(self) -> Ints:
        """Return, per column, the first and the last segment that it belongs to; all of them for other columns."""
        found = np.zeros((self.model.n_columns, 2), dtype=np.int64)
        found[:, 1] = len(self.segments)
        for (_, segment), column in self.again.items():
            found[column] = segment, segment
        for value in range(len(self._events)):
            for column, first, last in self.columns_of(value):
                found[column] = first, last - 1
        return found

    def again_in(self, x: Array) -> list[set[int]]:
        """Return, per segment, the nodes that run again in it."""
        found: list[set[int]] = [set() for _ in self.segments]
        for (node, index), column in self.again.items():
            if x[column] > 0.5:
                found[index].add(node)
        return found

    def live_after(self, x: Array) -> list[set[int]]:
        """Return, per segment, the values that are live when it ends."""
        found: list[set[int]] = [set() for _ in self.segments]
        for value in range(len(self._events)):
            for column, first, last in self.columns_of(value):
                if x[column] > 0.5:
                    for index in range(first, last):
                        found[index].add(value)
        return found


_ALWAYS = -1


def decoded(
    dag: Dag, segments: Sequence[Segment], live_after: Sequence[Collection[int]], again: Sequence[Collection[int]] = ()
) -> list[int]:
    """Return the sequence in which each node runs again just when it is needed, given what is live between segments.

    Within a segment, replays for one first run, and those for its end, come in the order of the nodes.
    """
    sequence: list[int] = []
    available: set[int] = set()
    for index, (segment, after) in enumerate(zip(segments, live_after, strict=True)):
        for node in again[index] if again else ():  # made once more though it may be there: a copy that can be overwritten
            available.difference_update(v for v in dag.makes[node] if v not in dag.held)
        moment = segment.moment
        for node in segment.firsts:
            wanted = list(dag.reads[node])
            if node == segment.firsts[-1]:
                wanted += [v for v in after if v not in dag.makes[node] and dag.maker[v] < node]
            _make(dag, wanted, available, sequence)
            sequence.append(node)
            available.update(dag.makes[node])
        if moment is not None and moment.replay is not None:
            _make(dag, after, available, sequence)
        available.intersection_update(after)
    return sequence


def _make(dag: Dag, wanted: Iterable[int], available: set[int], sequence: list[int]) -> None:
    """Append what has to run again so that all ``wanted`` values are available."""
    nodes: set[int] = set()
    stack = [v for v in wanted if v not in available]
    while stack:
        node = dag.maker[stack.pop()]
        if node not in nodes:
            nodes.add(node)
            stack += [v for v in dag.replay_reads[node] if v not in available]
    for node in sorted(nodes):
        sequence.append(node)
        available.update(dag.makes[node])
