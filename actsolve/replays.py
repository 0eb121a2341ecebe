"""The schedule of replays that are told one by one: any forward op, any number of times, before any op that comes after it.

A copy of a value is live from the run that makes it to the last run that reads it before the value is made again; what the
caller holds, and new contents of buffers until the end of the forward, stay longer. Where an op is replayed for one of its
outputs, the others end just before if they were live, for it makes them too.

A replay before the first run of a forward op is in the forward. What the backward reads of the forward's is the latest copy that
was made there, by a first run or by a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actsolve.errors import ScheduleError
from actsolve.graph import Graph
from actsolve.plan import Plan
from actsolve.schedule import Schedule, Step, StepKind

Run = tuple[StepKind, int]
Replays = Mapping[int, tuple[int, ...]]


def replaying_schedule(graph: Graph, replays: Replays) -> Schedule:
    """Return the schedule that replays exactly what it is told, in that order.

    Args:
        graph: One training step.
        replays: Per op, the forward ops to be replayed just before its first run; of an optional op, whether it runs or not.

    Raises:
        ScheduleError: an op must not be replayed, or not yet, or a run reads what no run before it has made.
    """
    runs = all_runs(graph, replays)
    dying_at, _ = _last_reads(graph, runs)
    return Schedule(_steps(graph, runs, dying_at))


def saved_by(graph: Graph, replays: Replays) -> frozenset[int]:
    """Return the decidable values of which the backward reads a copy that the forward made: what the plan keeps."""
    _, saved = _last_reads(graph, all_runs(graph, replays))
    return saved.intersection(graph.decidable)


def replays_in_forward(graph: Graph, plan: Plan) -> bool:
    """Return whether ``plan`` replays an op in the forward."""
    return plan.replays is not None and any(index < graph.n_forward and ops for index, ops in plan.replays.items())


def all_runs(graph: Graph, replays: Replays) -> list[Run]:
    """Return first runs and replays, in order; an optional op runs only where a replay reads what it makes."""
    read = {v for ops in replays.values() for op in ops for v in graph.ops[op].replay_inputs}
    runs: list[Run] = []
    for index, op in enumerate(graph.ops):
        runs += [(StepKind.REPLAY, replayed) for replayed in replays.get(index, ())]
        if not op.optional or not read.isdisjoint(op.outputs):
            runs.append((StepKind.COMPUTE, index))
    return runs


def replays_of(graph: Graph, runs: Sequence[Run]) -> dict[int, tuple[int, ...]]:
    """Return, per op, what ``runs`` replay just before its first run."""
    found: dict[int, tuple[int, ...]] = {}
    waiting: list[int] = []
    for kind, index in runs:
        if kind is StepKind.REPLAY:
            waiting.append(index)
        elif waiting:
            found[index] = tuple(waiting)
            waiting = []
    return found


def _n_forward_runs(graph: Graph, runs: Sequence[Run]) -> int:
    """Return how many runs the forward has: all up to its last first run."""
    first_runs = (time for time, (kind, index) in enumerate(runs) if kind is StepKind.COMPUTE and index < graph.n_forward)
    return 1 + max(first_runs, default=-1)


def _last_reads(graph: Graph, runs: list[Run]) -> tuple[list[list[int]], frozenset[int]]:
    """Return, per run, the values of which a copy ends after it; and those that the backward reads as the forward made them."""
    n_forward_runs = _n_forward_runs(graph, runs)
    updated = {new for new, _ in graph.updates}
    made: dict[int, int] = {}  # value -> the run that made its latest copy
    ends: dict[int, int] = {}  # value -> the last run that reads it
    dying_at: list[list[int]] = [[] for _ in runs]
    saved: set[int] = set()
    for time, (kind, index) in enumerate(runs):
        op = graph.ops[index]
        replayed = kind is StepKind.REPLAY
        if replayed and not op.replayable:
            raise ScheduleError("an op that must not be replayed is", where=op.name, why=op.why_not)
        if replayed and not made.keys() >= set(op.outputs):
            raise ScheduleError("an op is replayed before it was computed", where=op.name)
        for value in (*op.replay_inputs, *op.inputs) if replayed else op.inputs:
            if value not in made:
                if graph.values[value].producer is not None:
                    raise ScheduleError(f"{graph.values[value].name} is read before it is made", where=op.name)
                continue
            ends[value] = max(ends[value], time)
            if time >= n_forward_runs > made[value]:
                saved.add(value)
        for value in op.outputs:
            if value in made and (value in graph.held or (value in updated and time < n_forward_runs)):
                continue  # that copy stays
            if value in made:
                dying_at[ends[value]].append(value)
            made[value] = ends[value] = time
            if value in updated and time < n_forward_runs:
                ends[value] = n_forward_runs - 1
    for value, time in ends.items():
        if value not in graph.held:
            dying_at[time].append(value)
    return dying_at, frozenset(saved)


def _steps(graph: Graph, runs: list[Run], dying_at: list[list[int]]) -> tuple[Step, ...]:
    """Add the FREEs; note which runs work in place.

    What the forward has saved is not overwritten in the backward: with ``retain_graph`` a second one reads it again.
    """
    n_forward_runs = _n_forward_runs(graph, runs)
    updated = {new for new, _ in graph.updates}
    steps: list[Step] = []
    live: set[int] = set()
    of_forward: set[int] = set()  # values whose latest copy the forward made
    for time, ((kind, index), dying) in enumerate(zip(runs, dying_at, strict=True)):
        op = graph.ops[index]
        in_backward = time >= n_forward_runs
        overwritten = None
        if op.in_place is not None:
            source, target = op.in_place
            stays = source in of_forward if in_backward else source in updated
            if source in dying and target not in live and not stays:
                overwritten = source
        steps.append(Step(kind, op=index, in_place=overwritten is not None))
        steps += [Step(StepKind.FREE, value=value) for value in dying if value != overwritten]
        live.update(op.outputs)
        live.difference_update(dying)
        if in_backward:
            of_forward.difference_update(op.outputs)
        else:
            of_forward.update(op.outputs)
    return tuple(steps)
