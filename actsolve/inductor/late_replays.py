"""Replays moved to where they are first read.

A planner puts a replay anywhere before its reader where it fits. On a CPU Inductor makes one kernel of all that is generated
between two calls, so that what each part of it reads and makes is there at once: the less lies between two calls, the better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actsolve.plan import Plan
from actsolve.problem import Problem
from actsolve.simulate import Timeline, timeline_of


def late(problem: Problem, plan: Plan) -> Timeline:
    """Return the timeline of ``plan`` with each replay as late as can be, if that takes no more memory; else its own."""
    own = timeline_of(problem, plan)
    if not plan.replays:
        return own
    moved = timeline_of(problem, replace(plan, replays=_moved(problem, plan.replays)))
    return moved if moved.peak_bytes <= own.peak_bytes else own


def _moved(problem: Problem, replays: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Return per op the replays just before its first run, each moved to just before what reads it first."""
    ops = problem.graph.ops
    runs: list[tuple[int, bool]] = []  # an op, and whether it is a replay; the last first
    for index in reversed(range(len(ops))):
        runs.append((index, False))
        for op in reversed(replays.get(index, ())):
            made = set(ops[op].outputs)
            place = next(
                (i for i in reversed(range(len(runs))) if runs[i][0] == op or made.intersection(ops[runs[i][0]].inputs)), None
            )
            runs.insert(len(runs) if place is None else place + 1, (op, True))
    moved: dict[int, tuple[int, ...]] = {}
    before: list[int] = []
    for op, again in reversed(runs):
        if again:
            before.append(op)
        elif before:
            moved[op], before = tuple(before), []
    return moved
