"""Runs a schedule on symbols instead of tensors, to see what a device would end up with, copies to and from the host included.

Content is a hash of the op and of what it read, so two runs agree exactly where every bit of a real run would: a storage that
was overwritten reads as what overwrote it, a random op draws from a counter unless it is replayed with a saved state, and a
replay of an op that must not be replayed gives something else each time. Reads of what is not there raise KeyError.
"""

from __future__ import annotations

from dataclasses import dataclass

from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op
from actsolve.schedule import Schedule, StepKind


@dataclass(frozen=True)
class Outcome:
    """What is left on the device: the content of each live value, of each buffer, and the random generator."""

    live: dict[str, int]
    buffers: dict[str, int]
    rng: int


def outcome(graph: Graph, schedule: Schedule) -> Outcome:
    """Return what is on the device after ``schedule``."""
    device = _Device(graph)
    forward = [
        n for n, s in enumerate(schedule.steps) if s.kind is StepKind.COMPUTE and s.op is not None and s.op < graph.n_forward
    ]
    for number, step in enumerate(schedule.steps):
        if step.value is not None:
            device.move(step.kind, step.value)
        else:
            assert step.op is not None
            device.run(step.op, replay=step.kind is StepKind.REPLAY, in_place=step.in_place)
        if forward and number == forward[-1]:
            device.update_buffers()
    live = {graph.values[v].name: cell[0] for v, cell in device.cells.items()}
    buffers = {v.name: device.given[i] for i, v in enumerate(graph.values) if v.kind is Kind.BUFFER}
    return Outcome(live, buffers, device.rng)


_GARBAGE = [-1]


class _Device:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.given = {i: hash(("given", v.name)) for i, v in enumerate(graph.values) if v.kind is not Kind.ACTIVATION}
        self.cells: dict[int, list[int]] = {}  # value -> its storage; a cell is shared where a run worked in place
        self.leaving: dict[int, list[int]] = {}  # value -> the cell that is being copied out
        self.host: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        self.rng = 0
        self.n_replays = 0

    def read(self, value: int) -> int:
        return self.given[value] if value in self.given else self.cells[value][0]

    def run(self, index: int, *, replay: bool, in_place: bool) -> None:
        op = self.graph.ops[index]
        made = self.content(op, replay)
        for position, value in enumerate(op.outputs):
            content = made if op.target == RNG_STATE_TARGET else hash((made, position))
            if in_place and op.in_place is not None and value == op.in_place[1]:
                cell = self.cells[op.in_place[0]]
                cell[0] = content
                self.cells[value] = cell
            elif value not in self.cells and value not in self.arriving:
                self.cells[value] = [content]
        if in_place and op.in_place is not None:
            del self.cells[op.in_place[0]]

    def move(self, kind: StepKind, value: int) -> None:
        """Free, copy or wait. A copy reads its source at its end: as late as its wait, or whenever that changes or goes."""
        if kind is StepKind.FREE:
            del self.cells[value]
            if value in self.leaving:
                self.leaving[value] = _GARBAGE
        elif kind is StepKind.COPY_OUT:
            self.leaving[value] = self.cells[value]
        elif kind is StepKind.WAIT_OUT:
            self.host[value] = self.leaving.pop(value)[0]
        elif kind is StepKind.COPY_BACK:
            self.arriving[value] = self.host.get(value, _GARBAGE[0])
        else:
            self.cells[value] = [self.arriving.pop(value)]

    def content(self, op: Op, replay: bool) -> int:
        if op.target == RNG_STATE_TARGET:
            return self.rng
        read = [self.read(v) for v in op.inputs]
        drawn = 0
        if op.random and replay:
            drawn = self.read(op.replay_inputs[0])
        elif op.random:
            drawn = self.rng
            self.rng += 1
        if replay and not op.replayable:
            self.n_replays += 1
            drawn = -self.n_replays
        return hash((op.name, *read, drawn))

    def update_buffers(self) -> None:
        contents = [(buffer, self.read(new)) for new, buffer in self.graph.updates]
        self.given.update(contents)
