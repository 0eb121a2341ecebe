"""From a joint graph and a schedule to a forward and a backward graph module.

Each run of the schedule becomes one call, in its order; a replay is one more, in either of the two. So does each copy to
and from the host, and each wait for one. `actsolve.emitter` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from actsolve.capture.captured import Captured
from actsolve.emitter import Emitter, value_name
from actsolve.graph import STATIC_KINDS, Graph
from actsolve.runtime.copy_engine import CopyEngine
from actsolve.schedule import Schedule, Step, StepKind, build_schedule
from actsolve.split import first_backward_step

aten = torch.ops.aten


@dataclass(frozen=True)
class Lowered:
    """A forward and a backward that carry out a schedule.

    Attributes:
        forward: Takes the tensors that the joint graph takes; returns its outputs and then what is saved.
        backward: Takes what is saved and the tangents; returns the gradients.
        saved: Names of what is saved, in order: nodes of the joint graph, RNG states or copies on the host.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]


def lower(captured: Captured, schedule: Schedule, engine: CopyEngine[Any] | None = None) -> Lowered:
    """Return the forward and the backward that carry out ``schedule``.

    Args:
        captured: What was traced.
        schedule: Its steps.
        engine: What copies; each value that is offloaded gets its place on the host. Needed only where the schedule copies.

    Raises:
        ScheduleError: a step reads what no earlier step made.
    """
    split = first_backward_step(captured.graph, schedule)
    backward = Emitter(captured, in_backward=True, engine=engine)
    backward.run(schedule.steps[split:])
    for name in _read_by_other_backwards(captured):
        backward.save(name)
    backward.finish_backward()
    forward = Emitter(captured, in_backward=False, engine=engine)
    forward.run(schedule.steps[:split])
    forward.finish_forward(tuple(backward.saved))
    return Lowered(forward.module("Forward"), backward.module("Backward"), tuple(backward.saved))


def lower_backward(
    captured: Captured, saved: tuple[str, ...], *, any_layout: bool, engine: CopyEngine[Any] | None = None
) -> fx.GraphModule:
    """Return another backward for a forward that is there already; what is not saved is replayed when it is needed.

    What is saved on the host is copied back at its first read; what is saved on the device too is read there.

    Args:
        captured: The step, with the tangents that this backward is given.
        saved: What the forward saves.
        any_layout: Whether the tangents may be laid out otherwise than traced. Then nothing is done in
            place, and what autograd reshapes, of which a trace says ``view``, is reshaped.
        engine: What the forward copies with.

    Raises:
        ScheduleError: this backward reads what is neither saved nor can be replayed.
    """
    graph = captured.graph
    values = {value.name: index for index, value in enumerate(graph.values)}
    values |= {node.name: value for node, value in captured.value_of.items()}
    kept = [values[name] for name in map(value_name, saved) if name in values]  # others are of no use here
    schedule = build_schedule(graph, frozenset(v for v in kept if graph.is_forward_value[v]))
    backward = Emitter(captured, in_backward=True, engine=engine, saved=saved)
    backward.wait_for_copies_out()
    steps = schedule.steps[first_backward_step(graph, schedule) :]
    backward.run(tuple(_out_of_place(steps, graph)) if any_layout else steps)
    backward.finish_backward()
    module = backward.module("Backward")
    for node in module.graph.nodes if any_layout else ():
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    return module


def _out_of_place(steps: tuple[Step, ...], graph: Graph) -> Iterator[Step]:
    """The same steps with fresh memory for each result."""
    for step in steps:
        yield replace(step, in_place=False)
        if step.in_place and step.op is not None and (place := graph.ops[step.op].in_place) is not None:
            yield Step(StepKind.FREE, value=place[0])


def _read_by_other_backwards(captured: Captured) -> Iterator[str]:
    """What a backward from other outputs may read and costs nothing to save: given values, and what the caller holds.

    But not what nothing is computed from, such as a loss: its caller may scale it in place.
    """
    graph = captured.graph
    changed = {buffer for _, buffer in graph.updates}  # by the step itself: the backward would find other content
    for value, source in enumerate(captured.value_nodes if captured.joint.undefined else ()):
        given = graph.values[value].kind in STATIC_KINDS and value not in changed and bool(graph.forward_readers[value])
        held = value in graph.outputs and bool(graph.forward_readers[value] or graph.backward_readers[value])
        if source is not None and source.op != "get_attr" and (given or held):
            yield source.name
