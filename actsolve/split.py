"""Where the forward of a schedule ends and its backward begins."""

from __future__ import annotations

from actsolve.graph import Graph
from actsolve.schedule import Schedule, StepKind

_IN_BACKWARD = (StepKind.REPLAY, StepKind.COPY_BACK, StepKind.WAIT_BACK)


def first_backward_step(graph: Graph, schedule: Schedule) -> int:
    """Return the index of the first step that is not the forward's. Waits for copies out, and frees, before it are."""
    for position, step in enumerate(schedule.steps):
        if step.kind in _IN_BACKWARD or (step.op is not None and step.op >= graph.n_forward):
            return position
    return len(schedule.steps)
