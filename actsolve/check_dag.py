"""Replays the schedule of a general graph, run by run, and trusts nobody; it shares no code with the planner."""

from __future__ import annotations

from collections.abc import Sequence

from actsolve.dag import Dag
from actsolve.errors import ScheduleError


def replayed_peak_bytes(dag: Dag, schedule: Sequence[int]) -> int:
    """Return the most memory during a run of ``schedule``, in which nodes make one value each and may run again at any time.

    A copy of a value is live from the run that makes it to the last run that reads that copy, both included.

    Raises:
        ScheduleError: a node is missing, comes first out of order, or reads what no run has made.
    """
    latest: dict[int, int] = {}  # node -> the run that made the copy at hand
    end = list(range(len(schedule)))  # per run: the last run that reads its copy
    for run, node in enumerate(schedule):
        if node not in latest and node != len(latest):
            raise ScheduleError("a schedule runs a node out of order", where=f"run {run}", why=f"node {node} is not next")
        for producer in dag.reads[node]:
            if producer not in latest:
                raise ScheduleError("a schedule reads what is not live", where=f"run {run}", why=f"node {node}")
            end[latest[producer]] = run
        latest[node] = run
    if len(latest) != dag.n_nodes:
        raise ScheduleError(f"a schedule runs {len(latest)} of {dag.n_nodes} nodes")
    ending: list[list[int]] = [[] for _ in schedule]
    for run, last in enumerate(end):
        ending[last].append(run)
    peak = live = 0
    for run, node in enumerate(schedule):
        live += dag.sizes[node]
        peak = max(peak, live)
        live -= sum(dag.sizes[schedule[made]] for made in ending[run])
    return peak
