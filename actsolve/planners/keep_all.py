"""Keep every value that the backward reads: what PyTorch does without checkpointing."""

from __future__ import annotations

from actsolve.plan import Plan, Status
from actsolve.planners.options import PlannerOptions
from actsolve.planners.required import required
from actsolve.problem import Problem


def keep_all(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that replays nothing. The budget is not looked at."""
    graph = problem.graph
    kept = required(graph, (v for v in graph.decidable if graph.backward_readers[v]))
    return Plan("keep_all", kept, status=Status.FEASIBLE, note=pins_note(problem))


def pins_note(problem: Problem) -> str:
    """Return what a baseline says when values are pinned."""
    return "ignores pinned values" if problem.pinned_keep or problem.pinned_recompute else ""
