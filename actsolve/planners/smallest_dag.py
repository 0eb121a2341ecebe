"""The smallest budget that a schedule of a general graph is found for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from actsolve.dag import Dag
from actsolve.planners.dag_search import DagPlan
from actsolve.planners.options import PlannerOptions
from actsolve.planners.sequence import Runner, Sequence

_ANY = 10.0  # a gap at which whatever fits is good enough
_PRECISION = 0.002  # of the budget
_SOLVES = 8  # about as many halve the range to that precision


def smallest_dag_budget(
    dag: Dag,
    options: PlannerOptions,
    planned: Callable[[Dag, PlannerOptions, Sequence | None], DagPlan],
    start: Sequence | None = None,
    least_bytes: int = 0,
) -> Sequence:
    """Return the schedule of the least peak that was found: by bisection, between what one node needs and where it starts.

    The budget of ``dag`` is not looked at, so that the search is the same whatever was asked for.

    Args:
        dag: What is to be run.
        options: The solver; the time limit is for all solves together.
        planned: The planner: a Dag, options, and a schedule to start from.
        start: A schedule; the plain order if left out.
        least_bytes: No less is of use.
    """
    deadline = time.perf_counter() + options.time_limit_s
    best = start or Runner(dag).run(np.arange(dag.n_nodes))
    low = max(least_bytes, *map(dag.needs, range(dag.n_nodes)))
    budget = low  # often enough a single node is what counts
    while low < best.peak_bytes and best.peak_bytes - low >= _PRECISION * best.peak_bytes:
        left_s = deadline - time.perf_counter()
        if left_s <= 0:
            break
        brief = replace(options, gap=_ANY, time_limit_s=min(left_s, options.time_limit_s / _SOLVES), progress=None, seeds=())
        there = replace(dag, budget_bytes=budget)
        found = planned(there, brief, Runner(there).run(best.nodes))
        if found.sequence is not None:
            best = found.sequence
        else:
            low = budget + 1
        if found.interrupted:
            break
        budget = (low + best.peak_bytes) // 2
    return best
