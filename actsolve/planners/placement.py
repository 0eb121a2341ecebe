"""When each offloaded value leaves the device and returns: exactly, for a given choice of values.

Copies out begin as values are made, in that order. Their memory is freed as late as the budget allows, so that the computation
waits for no copy that it need not wait for. Copies back are queued in the order of their first reads: each as late as the link
still brings all of them in time, and then earlier as far as the memory allows, as for a link that is slower by `_MARGIN`.
What the schedule then costs is for the simulator to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actsolve.plan import Copies
from actsolve.problem import Problem
from actsolve.schedule import NOT_EARLY, StepKind, build_schedule, first_run_at, owners, runs_of
from actsolve.simulate import simulate

_MARGIN = 0.5  # of a copy's time: what a real link, and a real op, may be late


def place(
    problem: Problem, kept: frozenset[int], offloaded: Iterable[int], early: Mapping[int, int] = NOT_EARLY
) -> dict[int, Copies]:
    """Return when the values ``offloaded`` leave and return. Takes O(runs) for each of them.

    Values that nothing in the backward reads are left out. The result may still not fit, or stall.
    """
    runs = _Runs(problem, kept, frozenset(offloaded), early)
    if not runs.spans:
        return {}
    room = runs.room()
    back_at = _returns(problem, runs, room)
    return _leaves(problem, runs, room, back_at)


@dataclass(frozen=True)
class _Span:
    """When an offloaded value is needed: the runs that make it, read it last in the forward, first and last in the backward."""

    made: int
    last_forward: int
    first_backward: int


class _Runs:
    """The runs of a plan, and when its offloaded values are needed among them."""

    def __init__(self, problem: Problem, kept: frozenset[int], offloaded: frozenset[int], early: Mapping[int, int]) -> None:
        graph = problem.graph
        self.problem, self.kept, self.early = problem, kept, early
        self.runs = runs_of(graph, kept | offloaded, early)
        self.starts = first_run_at(graph, self.runs)
        self.anchor = owners(self.runs)
        made: dict[int, int] = {}
        last_forward: dict[int, int] = {}
        first_backward: dict[int, int] = {}
        for time, (kind, index) in enumerate(self.runs):
            op = graph.ops[index]
            replay = kind is StepKind.REPLAY
            forward = not replay and index < graph.n_forward
            for v in (*op.inputs, *op.replay_inputs) if replay else op.inputs:
                if v in offloaded:
                    if forward:
                        last_forward[v] = time
                    else:
                        first_backward.setdefault(v, time)
            if forward:
                made.update((v, time) for v in op.outputs if v in offloaded)
        self.spans = {
            v: _Span(made[v], max(made[v], last_forward.get(v, 0)), first) for v, first in sorted(first_backward.items())
        }
        costs = problem.costs
        seconds = [costs.replay_seconds[i] if kind is StepKind.REPLAY else costs.seconds[i] for kind, i in self.runs]
        self.start_s = np.concatenate(([0.0], np.cumsum(seconds)))
        self.ops_start = np.unique([self.first_at(time) for time in range(len(self.runs))])

    def first_at(self, time: int) -> int:
        """The first run of the op that run ``time`` belongs to: copies are queued before its replays."""
        return self.starts[self.anchor[time]]

    def earliest_with(self, room: npt.NDArray[np.int64], size: int, earliest: int, stop: int) -> int:
        """The first run of an op, that of ``earliest`` or later, from which on there is room for ``size`` up to ``stop``."""
        if stop <= earliest:
            return stop
        begin = self.first_at(earliest)
        full = np.flatnonzero(room[begin:stop] < size)
        return int(self.ops_start[np.searchsorted(self.ops_start, begin + full[-1], side="right")]) if len(full) else begin

    def room(self) -> npt.NDArray[np.int64]:
        """Per run: bytes left beside all that must be there, offloaded values only while they are read."""
        least = {
            v: Copies(self.anchor[span.last_forward] + 1, self.anchor[span.first_backward]) for v, span in self.spans.items()
        }
        schedule = build_schedule(self.problem.graph, self.kept, self.early, least)
        memory = simulate(self.problem, schedule).memory_bytes
        used = [m for m, step in zip(memory, schedule.steps, strict=False) if step.op is not None]
        return self.problem.budget_bytes - np.array(used, dtype=np.int64)


def _returns(problem: Problem, runs: _Runs, room: npt.NDArray[np.int64]) -> dict[int, int]:
    """Return the run before which each value is copied back; takes its memory from ``room``."""
    assert problem.links is not None
    speed = problem.links.back(beside=False)
    size = {v: problem.graph.values[v].size_bytes for v in runs.spans}
    order = sorted(runs.spans, key=lambda v: (runs.spans[v].first_backward, v))
    backward = runs.starts[problem.graph.n_forward]
    back_at: dict[int, int] = {}
    for margin in (0.0, _MARGIN):
        wanted_s = _latest_s(runs, order, {v: size[v] / speed * (1 + margin) for v in order})
        previous = backward
        for v in order:
            stop = back_at.get(v, runs.first_at(runs.spans[v].first_backward))
            earliest = max(previous, int(np.searchsorted(runs.start_s, wanted_s[v], side="right")) - 1)
            begin = runs.earliest_with(room, size[v], earliest, stop)
            room[begin:stop] -= size[v]
            back_at[v] = previous = begin
    return back_at


def _latest_s(runs: _Runs, order: list[int], copy_s: dict[int, float]) -> dict[int, float]:
    """Return when each copy back must begin, at the latest, for all of them to be in time."""
    latest_s: dict[int, float] = {}
    free_from_s = np.inf
    for v in reversed(order):
        latest_s[v] = free_from_s = min(runs.start_s[runs.spans[v].first_backward], free_from_s) - copy_s[v]
    return latest_s


def _leaves(problem: Problem, runs: _Runs, room: npt.NDArray[np.int64], back_at: dict[int, int]) -> dict[int, Copies]:
    """Return when the memory of each value is freed: when something else needs it, the first copy out first."""
    size = {v: problem.graph.values[v].size_bytes for v in runs.spans}
    joins: dict[int, list[int]] = {}
    for v in sorted(runs.spans, key=lambda v: (runs.spans[v].made, v)):
        joins.setdefault(runs.spans[v].last_forward + 1, []).append(v)
    must_leave: dict[int, list[int]] = {}
    for v, time in back_at.items():
        must_leave.setdefault(time, []).append(v)
    waiting: dict[int, None] = {}  # by when their copies end
    waiting_bytes = 0
    free_at: dict[int, int] = {}

    def free(v: int, time: int) -> None:
        nonlocal waiting_bytes
        del waiting[v]
        waiting_bytes -= size[v]
        free_at[v] = runs.anchor[time]

    for time in range(len(runs.runs)):
        if time in joins:
            waiting.update((v, None) for v in joins[time])
            waiting_bytes += sum(size[v] for v in joins[time])
            waiting = dict(sorted(waiting.items(), key=lambda item: (runs.spans[item[0]].made, item[0])))
        for v in must_leave.get(time, ()):
            if v in waiting:
                free(v, time)
        if runs.first_at(time) == time:  # within an op's replays nothing is freed: see what all of them need
            after = next((t for t in range(time + 1, len(runs.runs)) if runs.first_at(t) == t), len(runs.runs))
            least = int(room[time:after].min())
            while waiting and waiting_bytes > least:
                free(next(iter(waiting)), time)
    return {v: Copies(free_at[v], runs.anchor[back_at[v]]) for v in runs.spans}
