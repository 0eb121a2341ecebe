"""What offloading would do without what makes it quick: schedules with the same decisions and worse times for their copies.

Each takes a schedule and returns another one that computes the same. A copy may take memory at other times than planned, so the
peak may be over the budget.
"""

from __future__ import annotations

from collections.abc import Iterator

from actsolve.graph import Graph
from actsolve.schedule import Schedule, Step, StepKind
from actsolve.split import first_backward_step


def synchronous(graph: Graph, schedule: Schedule) -> Schedule:
    """Each copy is waited for as soon as it is queued: out right after the value is made, back right before it is read."""
    steps: list[Step] = []
    for step in on_demand(graph, schedule).steps:
        if step.kind is not StepKind.WAIT_OUT:
            steps.append(step)
        if step.kind is StepKind.COPY_OUT:
            steps.append(Step(StepKind.WAIT_OUT, value=step.value))
    return Schedule(tuple(steps))


def blocking(graph: Graph, schedule: Schedule) -> Schedule:
    """Each copy is waited for where it is queued: what copies from or to pageable memory do, whatever the program says."""
    steps: list[Step] = []
    waits = {StepKind.COPY_OUT: StepKind.WAIT_OUT, StepKind.COPY_BACK: StepKind.WAIT_BACK}
    for step in schedule.steps:
        if step.kind in waits:
            steps += [step, Step(waits[step.kind], value=step.value)]
        elif step.kind not in waits.values():
            steps.append(step)
    return Schedule(tuple(steps))


def late_out(graph: Graph, schedule: Schedule) -> Schedule:
    """All copies out are queued at the end of the forward, and what waited for them before that waits there."""
    split = first_backward_step(graph, schedule)
    forward, backward = schedule.steps[:split], schedule.steps[split:]
    out = [step for step in forward if step.kind is StepKind.COPY_OUT]
    leaving = {step.value for step in out}
    waits = [s for s in forward if s.kind in (StepKind.WAIT_OUT, StepKind.FREE) and s.value in leaving]
    moved = {*out, *waits}
    return Schedule((*(step for step in forward if step not in moved), *out, *waits, *backward))


def on_demand(graph: Graph, schedule: Schedule) -> Schedule:
    """Each copy back is queued only where the value is read."""
    return Schedule(tuple(_on_demand(graph, schedule)))


def _on_demand(graph: Graph, schedule: Schedule) -> Iterator[Step]:
    arriving: set[int | None] = set()
    for step in schedule.steps:
        if step.kind is StepKind.COPY_BACK:
            arriving.add(step.value)
            continue
        if step.kind is StepKind.WAIT_BACK:
            arriving.discard(step.value)
            yield Step(StepKind.COPY_BACK, value=step.value)
        yield step
        if step.op is not None:  # a run whose result was dropped because the value was on its way already
            yield from (Step(StepKind.FREE, value=v) for v in graph.ops[step.op].outputs if v in arriving)
