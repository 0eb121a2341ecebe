"""Binomial checkpointing: the fewest forward runs of a chain's stages for a number of snapshots.

Source:
    Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000; Griewank, Achieving logarithmic growth of temporal and
    spatial complexity in reverse automatic differentiation, 1992 (treeverse). Stages (`chain`) count as equally long and
    large there; many numbers of snapshots are tried, and the simulator, which knows better, chooses.
"""

from __future__ import annotations

import math

from actsolve.plan import Plan, Status
from actsolve.planners.best import best_of
from actsolve.planners.chain import Event, chain_of
from actsolve.planners.keep_all import pins_note
from actsolve.planners.options import PlannerOptions
from actsolve.problem import Problem
from actsolve.replays import saved_by

_STEP = 1.05


def treeverse(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the best of the binomial plans of 1, 2, 3, ... snapshots."""
    chain = chain_of(problem, last_apart=False)
    if chain.n_stages < 2:
        return Plan("treeverse", status=Status.UNKNOWN, note="the forward is no chain")
    plans = []
    for n_snapshots in snapshot_counts(chain.n_stages):
        replays = chain.replays(binomial_events(chain.n_stages, n_snapshots))
        note = f"stages: {chain.n_stages}, snapshots: {n_snapshots}"
        plans.append(Plan("treeverse", saved_by(problem.graph, replays), replays=replays, note=note))
    best = best_of(problem, plans)
    assert best is not None
    notes = "; ".join(note for note in (best.note, pins_note(problem)) if note)
    return Plan("treeverse", best.kept, replays=best.replays, note=notes)


def snapshot_counts(n_stages: int) -> list[int]:
    """Return the numbers of snapshots to try: every one of the few, and of many those that differ by some per cent."""
    counts = [1]
    while counts[-1] < n_stages - 1:
        counts.append(min(n_stages - 1, max(counts[-1] + 1, int(counts[-1] * _STEP))))
    return counts


def least_advances(n_stages: int, n_snapshots: int) -> int:
    """Return how often a stage is run forward, in all, but for the one run of each just before its backward.

    ``r l - C(s + r, r - 1)`` for l stages and s snapshots, with r the fewest repetitions for which C(s + r, s) >= l.
    """
    repetitions = 0
    while math.comb(n_snapshots + repetitions, n_snapshots) < n_stages:
        repetitions += 1
    return repetitions * n_stages - (math.comb(n_snapshots + repetitions, repetitions - 1) if repetitions else 0)


def binomial_events(n_stages: int, n_snapshots: int) -> list[Event]:
    """Return the forward runs and backwards of stages in order; the input of the first stage takes a snapshot too."""
    events: list[Event] = []
    stack = [(0, n_stages, n_snapshots)]  # stages from, to, with snapshots; the input of the first is there
    while stack:
        first, end, snapshots = stack.pop()
        if end - first == 1:
            events += [(True, first), (False, first)]
            continue
        middle = first + _advance(end - first, snapshots)
        events += [(True, stage) for stage in range(first, middle)]
        stack += [(first, middle, snapshots), (middle, end, snapshots - 1)]
    return events


def _advance(n_stages: int, n_snapshots: int) -> int:
    """How many stages to run forward before the next snapshot."""
    if n_snapshots <= 1:
        return n_stages - 1

    def cost(advance: int) -> int:
        return advance + least_advances(n_stages - advance, n_snapshots - 1) + least_advances(advance, n_snapshots)

    return min(range(1, n_stages), key=cost)
