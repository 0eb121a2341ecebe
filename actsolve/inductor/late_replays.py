"""Replays moved to where they are first read.

A planner puts a replay anywhere before its reader where it fits. On a CPU Inductor makes one kernel of all that is generated
between two calls, so that what each part of it reads and makes is there at once: the less lies between two calls, the better.
"""

from __future__ import annotations

from dataclasses import replace

from actsolve.graph import Graph
from actsolve.plan import Plan
from actsolve.problem import Problem
from actsolve.replays import Run, replays_of, saved_by
from actsolve.schedule import StepKind
from actsolve.simulate import Timeline, timeline_of


def late(problem: Problem, plan: Plan, budget_bytes: int = 0) -> Timeline:
    """Return the timeline of ``plan`` with each replay as late as can be; its own if that takes more memory, over the budget."""
    own = timeline_of(problem, plan)
    graph = problem.graph
    runs: list[Run] = [
        (s.kind, s.op) for s in own.schedule.steps if s.op is not None and s.kind in (StepKind.COMPUTE, StepKind.REPLAY)
    ]
    replays = replays_of(graph, late_runs(graph, runs))
    moved = timeline_of(problem, replace(plan, replays=replays, early={}, kept=saved_by(graph, replays)))
    return moved if moved.peak_bytes <= max(own.peak_bytes, budget_bytes) else own


def late_runs(graph: Graph, runs: list[Run]) -> list[Run]:
    """Return the runs with each replay just before the first that reads what it makes, or that makes it again."""
    later: list[Run] = []  # from the end
    for run in reversed(runs):
        kind, op = run
        made = set(graph.ops[op].outputs)
        readers = (i for i in reversed(range(len(later))) if later[i][1] == op or made.intersection(_read(graph, later[i])))
        later.insert(len(later) if kind is StepKind.COMPUTE else next(readers, len(later) - 1) + 1, run)
    return later[::-1]


def _read(graph: Graph, run: Run) -> tuple[int, ...]:
    kind, op = run
    return graph.ops[op].inputs + (graph.ops[op].replay_inputs if kind is StepKind.REPLAY else ())
