"""Where the forward of a schedule ends and its backward begins."""

from __future__ import annotations

from actsolve.graph import Graph
from actsolve.schedule import Schedule, StepKind

_IN_BACKWARD = (StepKind.REPLAY, StepKind.COPY_BACK, StepKind.WAIT_BACK)


def first_backward_step(graph: Graph, schedule: Schedule) -> int:
    """Return the index of the first step that is not the forward's.

    All up to the last first run of a forward op are, replays among them, and the frees and waits for copies out that follow it.
    """
    steps, n_forward = schedule.steps, graph.n_forward
    start = len(steps)
    while start and not (steps[start - 1].kind is StepKind.COMPUTE and (steps[start - 1].op or 0) < n_forward):
        start -= 1
    for position in range(start, len(steps)):
        step = steps[position]
        if step.kind in _IN_BACKWARD or step.kind is StepKind.COMPUTE:
            return position
    return len(steps)
