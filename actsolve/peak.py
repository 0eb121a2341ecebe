"""What holds the peak of a simulated step: where it is, every byte there by kind, and the largest values by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from actsolve.graph import Graph, Kind
from actsolve.problem import Problem
from actsolve.schedule import Step, StepKind
from actsolve.simulate import Timeline
from actsolve.split import first_backward_step
from actsolve.static_memory import StaticMemory

LOGITS = "logits"
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")
_CAST = "aten._to_copy.default"
_MOST = 10


@dataclass(frozen=True)
class LiveValue:
    """A value that is live at the peak, for display.

    Attributes:
        name: As in the graph.
        kind: As in `bytes_at_peak`.
        size_bytes: Of its storage.
        shape: Of the tensor that first named it.
        dtype: Its dtype.
        op: The kernel that made it; empty for a tangent.
        source: That op's ``file:line`` in the user's code, or empty.
    """

    name: str
    kind: str
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    source: str


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which most device memory is in use.

    Attributes:
        op: Name of the op that runs then; empty where none does: at a free or a copy, and in the optimizer step.
        target: Its kernel, or what happens in place of one.
        source: Its ``file:line`` in the user's code, or empty.
        phase: ``forward``, ``backward``, ``replay`` (in either) or ``optimizer``.
        size_bytes: All that is in use.
        static: Of that, what is there before the step, by kind.
        live: Of that, the rest, by kind, as `bytes_at_peak` has it.
        largest: The largest of the values that are live, in falling order; no static ones.
    """

    op: str
    target: str
    source: str
    phase: str
    size_bytes: int
    static: dict[str, int]
    live: dict[str, int]
    largest: tuple[LiveValue, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the field ``peak`` of ``optimize --json``; what is under ``bytes`` adds up to ``peak_bytes``."""
        return {
            "op": self.op or None,
            "target": self.target,
            "source": self.source or None,
            "phase": self.phase,
            "peak_bytes": self.size_bytes,
            "bytes": {"static": self.static, **{kind.replace(" ", "_"): size for kind, size in self.live.items()}},
            "largest": [_value_json(v) for v in self.largest],
        }


def _value_json(value: LiveValue) -> dict[str, Any]:
    found = asdict(value)
    found["bytes"] = found.pop("size_bytes")
    return found | {"shape": list(value.shape), "op": value.op or None, "source": value.source or None}


def peak_of(timeline: Timeline, static: StaticMemory) -> Peak:
    """Return what holds the peak of a step.

    Args:
        timeline: The step, simulated.
        static: Its static memory by kind.
    """
    graph, moment = timeline.problem.graph, _Moment(timeline)
    largest = sorted(moment.values, key=lambda pair: -graph.values[pair[0]].size_bytes)[:_MOST]
    live = tuple(_live_value(graph, value, kind) for value, kind in largest if graph.values[value].size_bytes)
    op, target, source, phase = moment.place
    return Peak(op, target, source, phase, timeline.peak_bytes, static.breakdown(), bytes_at_peak(timeline), live)


def _live_value(graph: Graph, value: int, kind: str) -> LiveValue:
    v = graph.values[value]
    op = None if v.producer is None else graph.ops[v.producer]
    return LiveValue(v.name, kind, v.size_bytes, v.shape, v.dtype, op.target if op else "", op.source if op else "")


def bytes_at_peak(timeline: Timeline) -> dict[str, int]:
    """Return what is live at the peak of ``timeline`` besides static memory, in bytes by kind; kinds of 0 bytes are left out.

    Kinds: ``logits`` (`loss_values`), ``saved`` forward values, ``forward temporaries``, ``gradients`` that the caller holds,
    ``backward temporaries``, the peak op's ``outputs`` and ``workspace``, ``tangents``, and ``optimizer temporaries``. A value
    counts under the first of ``logits`` and ``outputs`` that it is of, else under one of the rest.
    """
    problem, moment = timeline.problem, _Moment(timeline)
    totals: Counter[str] = Counter()
    for value, kind in moment.values:
        totals[kind] += problem.graph.values[value].size_bytes
    if moment.step is None:
        totals["optimizer temporaries"] = problem.optimizer_bytes
    elif moment.step.op is not None:
        totals["workspace"] = problem.costs.workspace_bytes[moment.step.op]
    return {kind: size for kind, size in totals.most_common() if size}


def values_at_peak(timeline: Timeline) -> list[tuple[int, str]]:
    """Return the values that are live at the peak, each with its kind as in `bytes_at_peak`."""
    return _Moment(timeline).values


def loss_values(graph: Graph) -> frozenset[int]:
    """Return the values of a cross-entropy loss: what its ops read and make in forward and backward, and casts of that.

    These are the logits, their log-softmax, and the gradients of both. Given values are not among them.
    """
    found: set[int] = set()
    casts = [op for op in graph.ops if op.target == _CAST]
    for op in graph.ops:
        if any(word in op.target for word in _LOSSES):
            found.update((*op.inputs, *op.outputs))
    for op in [*casts, *reversed(casts)]:  # a cast of a cast is reached in one of the two orders
        ends = (*op.inputs, *op.outputs)
        if not found.isdisjoint(ends):
            found.update(ends)
    return frozenset(v for v in found if graph.values[v].kind is Kind.ACTIVATION)


class _Moment:
    """The step of a schedule at which the peak is."""

    def __init__(self, timeline: Timeline) -> None:
        self.problem: Problem = timeline.problem
        self.schedule = timeline.schedule
        self.steps: Sequence[Step] = self.schedule.steps
        self.index = timeline.peak_step

    @property
    def step(self) -> Step | None:
        """The step; None for that of the optimizer."""
        return self.steps[self.index] if self.index < len(self.steps) else None

    @cached_property
    def place(self) -> tuple[str, str, str, str]:
        """The op that runs, its kernel or what else happens, its source line, and the phase."""
        graph, step = self.problem.graph, self.step
        if step is None:
            return "", "the optimizer step", "", "optimizer"
        phase = "backward" if self._in_backward else "forward"
        if step.op is None:
            assert step.value is not None
            return "", f"{step.kind.value.replace('_', ' ')} of {graph.values[step.value].name}", "", phase
        op = graph.ops[step.op]
        return op.name, op.target, op.source, "replay" if step.kind is StepKind.REPLAY else op.phase.value

    @cached_property
    def values(self) -> list[tuple[int, str]]:
        """Values that are live, each with its kind; one whose op makes a second copy is there twice."""
        return list(self._values())

    def _values(self) -> Iterator[tuple[int, str]]:
        graph, step = self.problem.graph, self.step
        at_rest = step is not None and step.op is None  # memory is counted after a step where nothing runs
        live = _live_before(graph, self.steps, self.index + at_rest)
        outputs: tuple[int, ...] = ()
        if step is not None and step.op is not None:
            op = graph.ops[step.op]
            outputs = op.outputs
            if step.in_place and op.in_place is not None:
                live.discard(op.in_place[0])  # its storage is the output's
        loss = loss_values(graph)
        for value in sorted(live):
            yield value, LOGITS if value in loss else self._kind_of(value)
        for value in outputs:
            yield value, LOGITS if value in loss else "outputs"
        if step is not None and self._in_backward:
            yield from ((i, "tangents") for i, v in enumerate(graph.values) if v.kind is Kind.TANGENT)

    @property
    def _in_backward(self) -> bool:
        """Whether a run of the backward has begun."""
        start = first_backward_step(self.problem.graph, self.schedule)
        return any(s.op is not None for s in self.steps[start : self.index + 1])

    def _kind_of(self, value: int) -> str:
        graph = self.problem.graph
        if value in graph.gradients:
            return "gradients"
        if not graph.is_forward_value[value]:
            return "backward temporaries"
        return "saved" if value in graph.held or graph.last_read[value] is not None else "forward temporaries"


def _live_before(graph: Graph, steps: Sequence[Step], end: int) -> set[int]:
    """Return the values that are live, or on their way back, before step ``end``."""
    live: set[int] = set()
    for step in steps[:end]:
        if step.op is not None:
            live.update(graph.ops[step.op].outputs)
            if step.in_place:
                live.discard(graph.ops[step.op].in_place[0])  # type: ignore[index]
        elif step.value is not None and step.kind is StepKind.FREE:
            live.discard(step.value)
        elif step.value is not None and step.kind is StepKind.COPY_BACK:
            live.add(step.value)
    return live
