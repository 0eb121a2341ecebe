"""The schedule of a plan."""

from __future__ import annotations

from actsolve.experiments import synchronous
from actsolve.graph import Graph
from actsolve.plan import Plan
from actsolve.replays import replaying_schedule
from actsolve.schedule import Schedule, build_schedule


def schedule_of(graph: Graph, plan: Plan) -> Schedule:
    """Return the steps that carry out ``plan``.

    Raises:
        ScheduleError: it does without a value that the backward reads and that cannot be replayed, or replays what it cannot.
    """
    if plan.replays is not None:
        return replaying_schedule(graph, plan.replays)
    schedule = build_schedule(graph, plan.kept, plan.early, plan.offloaded)
    return synchronous(graph, schedule) if plan.synchronous else schedule
