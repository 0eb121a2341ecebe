"""A plan made concrete: a linear list of steps.

Replays are demand-driven: just before a backward op, each forward value that it reads and that is not live is replayed,
after whatever that replay reads in turn. A value is freed right after its last read. An op writes its output in place
where its graph allows it and the input dies there.

The copy out of an offloaded value begins when it is made; when to wait for it, and when to begin its copy back, is the plan's to
say. Its return is waited for just before its first read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from actsolve.errors import ScheduleError
from actsolve.graph import Graph
from actsolve.plan import Copies


class StepKind(StrEnum):
    COMPUTE = "compute"  # first run of an op
    REPLAY = "replay"  # one more run of a forward op: in the backward, unless the first run of a forward op is still to come
    FREE = "free"  # a value's memory goes back
    COPY_OUT = "copy_out"  # a copy from device to host is queued; the value must stay until it has ended
    WAIT_OUT = "wait_out"  # wait for its end
    COPY_BACK = "copy_back"  # a copy from host to device is queued, into memory that is taken now
    WAIT_BACK = "wait_back"  # wait for its end: from now on the value can be read


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule.

    Attributes:
        kind: What is done.
        op: Index of the op that runs; None for all but COMPUTE and REPLAY.
        value: Index of the value that is freed, copied or waited for; None for COMPUTE and REPLAY.
        in_place: The op writes into the storage of its input (`Op.in_place`), whose value ends here
            without a FREE of its own.
    """

    kind: StepKind
    op: int | None = None
    value: int | None = None
    in_place: bool = False


@dataclass(frozen=True)
class Schedule:
    """Steps in execution order.

    A COMPUTE or REPLAY step makes every output of its op live. Where an output is live already (a kept
    value whose op is replayed for another output), or on its way back, the new copy is dropped at the end of the step.
    """

    steps: tuple[Step, ...]


NO_COPIES: Mapping[int, Copies] = MappingProxyType({})
NOT_EARLY: Mapping[int, int] = MappingProxyType({})


def build_schedule(
    graph: Graph, kept: frozenset[int], early: Mapping[int, int] = NOT_EARLY, offloaded: Mapping[int, Copies] = NO_COPIES
) -> Schedule:
    """Return the schedule that keeps exactly ``kept`` and replays the rest on demand, or a little earlier.

    Args:
        graph: One training step.
        kept: The decidable values that stay live from the forward to their last read.
        early: Per forward op, a backward op before which it is replayed, if it is replayed at all and not before that: where
            its output is smaller than what it reads, that saves memory.
        offloaded: The decidable values that are copied to the host and back, and when; none of them kept, and each of them
            read in the backward.

    Raises:
        ScheduleError: a value that the backward reads is neither kept nor offloaded, and its op cannot be replayed.

    Source:
        Lazy recomputation as in Jain et al., Checkmate, MLSys 2020 (their R given S).
    """
    runs = runs_of(graph, kept | offloaded.keys(), early)
    return Schedule(_with_frees(graph, runs, kept, offloaded))


def runs_of(graph: Graph, there: frozenset[int], early: Mapping[int, int] = NOT_EARLY) -> list[tuple[StepKind, int]]:
    """Return all runs in order: first runs and, of the values that are not ``there`` (kept or offloaded), replays."""
    runs = _ordered_runs(graph, there, {})
    if not early:
        return runs
    wanted: dict[int, list[int]] = {}
    for op in sorted(op for kind, op in runs if kind is StepKind.REPLAY and op in early):
        wanted.setdefault(early[op], []).append(op)
    return _ordered_runs(graph, there, wanted)


def _ordered_runs(graph: Graph, there: frozenset[int], wanted: Mapping[int, list[int]]) -> list[tuple[StepKind, int]]:
    """``wanted``: per backward op, forward ops to be replayed before it in any case."""
    runs: list[tuple[StepKind, int]] = []
    live: set[int] = set(there) | graph.held
    for index, op in enumerate(graph.ops[: graph.n_forward]):
        if not op.optional or not live.isdisjoint(op.outputs):
            runs.append((StepKind.COMPUTE, index))
    for index in range(graph.n_forward, len(graph.ops)):
        outputs = [v for op in wanted.get(index, ()) for v in graph.ops[op].outputs]
        for replayed in _replays_for(graph, [*graph.ops[index].inputs, *outputs], live):
            runs.append((StepKind.REPLAY, replayed))
            live.update(graph.ops[replayed].outputs)
        runs.append((StepKind.COMPUTE, index))
    return runs


def _replays_for(graph: Graph, values: list[int], live: set[int]) -> list[int]:
    """Forward ops to replay so that ``values`` are live, in the order of the forward; found without recursion.

    Not in the order in which they are found: the MILP's memory rows rest on this order, and it is the model's own.
    """
    order: list[int] = []
    done: set[int] = set()
    stack = [v for v in reversed(values) if graph.is_forward_value[v] and v not in live]
    while stack:
        value = stack[-1]
        producer = graph.values[value].producer
        assert producer is not None
        if producer in done:
            stack.pop()
            continue
        op = graph.ops[producer]
        if not op.replayable:
            raise ScheduleError(
                f"{graph.values[value].name} is needed and not kept, and its op cannot be replayed", where=op.name, why=op.why_not
            )
        missing = [
            v
            for v in (*op.replay_inputs, *op.inputs)
            if graph.is_forward_value[v] and v not in live and graph.values[v].producer not in done
        ]
        if missing:
            stack.extend(reversed(missing))
        else:
            stack.pop()
            done.add(producer)
            order.append(producer)
    return sorted(order)


def _with_frees(
    graph: Graph, runs: list[tuple[StepKind, int]], kept: frozenset[int], offloaded: Mapping[int, Copies]
) -> tuple[Step, ...]:
    """Add a FREE after the last read of every copy, and the copies to and from the host; note which runs work in place."""
    dying_at = _dying_at(graph, runs, kept, offloaded)
    before, after = _copies(graph, runs, offloaded)
    updated = {new for new, _ in graph.updates}
    steps: list[Step] = []
    live: set[int] = set()
    for time, ((kind, index), dying) in enumerate(zip(runs, dying_at, strict=True)):
        steps += before[time]
        for step in before[time]:
            assert step.value is not None
            (live.discard if step.kind is StepKind.FREE else live.add)(step.value)
        op = graph.ops[index]
        overwritten = None
        if op.in_place is not None:
            source, target = op.in_place
            # What the forward has saved stays as it is: with retain_graph a second backward reads it again.
            saved = source in kept and (kind is StepKind.REPLAY or index >= graph.n_forward)
            if source in dying and source not in updated and target not in live and not saved:
                overwritten = source
        steps.append(Step(kind, op=index, in_place=overwritten is not None))
        steps += [Step(StepKind.FREE, value=value) for value in dying if value != overwritten]
        steps += after[time]
        live.update(op.outputs)
        live.difference_update(dying)
    return tuple(steps)


def _copies(
    graph: Graph, runs: list[tuple[StepKind, int]], offloaded: Mapping[int, Copies]
) -> tuple[dict[int, list[Step]], dict[int, list[Step]]]:
    """Return the copies, waits and frees of offloaded values to be done before, and after, each run."""
    before: dict[int, list[Step]] = defaultdict(list)
    after: dict[int, list[Step]] = defaultdict(list)
    if not offloaded:
        return before, after
    starts = first_run_at(graph, runs)
    arrives: dict[int, int] = {}  # value -> the run that reads it first in the backward
    for time, (kind, index) in enumerate(runs):
        op = graph.ops[index]
        if kind is StepKind.COMPUTE and index < graph.n_forward:
            after[time] += [Step(StepKind.COPY_OUT, value=v) for v in op.outputs if v in offloaded]
            continue
        for v in (*op.inputs, *op.replay_inputs) if kind is StepKind.REPLAY else op.inputs:
            if v in offloaded:
                arrives.setdefault(v, time)
    for v in sorted(offloaded, key=lambda v: (graph.values[v].producer, v)):  # waits in the order of the copies out
        before[starts[offloaded[v].free_at]] += [Step(StepKind.WAIT_OUT, value=v), Step(StepKind.FREE, value=v)]
    for v in sorted(offloaded, key=lambda v: (arrives[v], v)):  # and the copies back in the order of the reads
        before[starts[offloaded[v].back_at]].append(Step(StepKind.COPY_BACK, value=v))
    for v, time in sorted(arrives.items()):
        before[time].append(Step(StepKind.WAIT_BACK, value=v))
    return before, after


def owners(runs: list[tuple[StepKind, int]]) -> list[int]:
    """Per run: the op that it belongs to; a replay belongs to the backward op that it is done for, which is the next to run."""
    owned: list[int] = []
    owner = -1
    for kind, index in reversed(runs):
        owner = index if kind is StepKind.COMPUTE else owner
        owned.append(owner)
    owned.reverse()
    return owned


def first_run_at(graph: Graph, runs: list[tuple[StepKind, int]]) -> list[int]:
    """Per op: the first run that belongs to it or to a later op."""
    starts = [len(runs)] * len(graph.ops)
    for time, owner in reversed(list(enumerate(owners(runs)))):
        starts[owner] = time
    for index in range(len(graph.ops) - 2, -1, -1):  # an optional op that does not run
        starts[index] = min(starts[index], starts[index + 1])
    return starts


def _dying_at(
    graph: Graph, runs: list[tuple[StepKind, int]], kept: frozenset[int], offloaded: Mapping[int, Copies]
) -> list[list[int]]:
    """Per run: the values of which a copy is not read again after it.

    A forward value has a copy from its first run and, if it is neither kept nor held, perhaps a second
    one from its replay: the first ends with the forward's reads, the second with the backward's. The first one of an
    offloaded value ends as its plan says, the second is the one that is copied back.
    """
    n_forward_runs = sum(index < graph.n_forward and kind is StepKind.COMPUTE for kind, index in runs)
    made: dict[int, int] = {}
    remade: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    last_backward: dict[int, int] = {}
    for time, (kind, index) in enumerate(runs):
        op = graph.ops[index]
        last = last_forward if time < n_forward_runs else last_backward
        last.update((value, time) for value in op.inputs)
        if kind is StepKind.REPLAY:
            last.update((value, time) for value in op.replay_inputs)
        (remade if kind is StepKind.REPLAY else made).update((value, time) for value in op.outputs)
    for new, _ in graph.updates:
        last_forward[new] = n_forward_runs - 1

    dying_at: list[list[int]] = [[] for _ in runs]
    for value, time in made.items():
        if value in graph.held or value in offloaded:
            continue
        end = max(time, last_forward.get(value, time))
        if value in kept or time >= n_forward_runs:
            end = max(end, last_backward.get(value, end))
        dying_at[end].append(value)
        if value in kept and remade.get(value, end) > end:  # replayed for another output, after its last read
            dying_at[remade[value]].append(value)
    for value, time in remade.items():
        if value not in kept and value not in graph.held and value not in offloaded:
            dying_at[max(time, last_backward.get(value, time))].append(value)
    if offloaded:
        starts = first_run_at(graph, runs)
    for value, copies in offloaded.items():
        dying_at[last_backward[value]].append(value)
        time = remade.get(value, -1)  # for another output, while this one is on the host or gone
        if starts[copies.free_at] <= time < starts[copies.back_at] or time > last_backward[value]:
            dying_at[time].append(value)
    return dying_at
