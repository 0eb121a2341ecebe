"""From a joint graph and a schedule to a forward and a backward graph module.

Each run of the schedule becomes one call, in the schedule's order; a replay is one more call inside the backward. Views are
made again where they are needed. No call is made to free memory: in the generated code a name goes out of use after its
last read, and the schedule frees a value exactly there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.captured import Captured
from actsolve.capture.replay import replayed_call
from actsolve.errors import ScheduleError
from actsolve.graph import STATIC_KINDS, Graph
from actsolve.runtime.grad_mode import in_training, looks_at_grad_mode
from actsolve.runtime.rng import replay_random, rng_state
from actsolve.schedule import Schedule, Step, StepKind, build_schedule

aten = torch.ops.aten


@dataclass(frozen=True)
class Lowered:
    """A forward and a backward that carry out a schedule.

    Attributes:
        forward: Takes the tensors that the joint graph takes; returns its outputs and then what is saved.
        backward: Takes what is saved and the tangents; returns the gradients.
        saved: Names of what is saved, nodes of the joint graph or RNG states, in order.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]


def lower(captured: Captured, schedule: Schedule) -> Lowered:
    """Return the forward and the backward that carry out ``schedule``.

    Raises:
        ScheduleError: a step reads what no earlier step made.
    """
    split = _first_backward_step(captured.graph.n_forward, schedule)
    backward = _Emitter(captured, in_backward=True)
    backward.run(schedule.steps[split:])
    for name in _read_by_other_backwards(captured):
        backward.save(name)
    backward.finish_backward()
    forward = _Emitter(captured, in_backward=False)
    forward.run(schedule.steps[:split])
    forward.finish_forward(tuple(backward.saved))
    return Lowered(forward.module("Forward"), backward.module("Backward"), tuple(backward.saved))


def lower_backward(captured: Captured, saved: tuple[str, ...], *, any_layout: bool) -> fx.GraphModule:
    """Return another backward for a forward that is there already; what is not saved is replayed when it is needed.

    Args:
        captured: The step, with the tangents that this backward is given.
        saved: What the forward saves.
        any_layout: Whether the tangents may be laid out otherwise than traced. Then nothing is done in
            place, and what autograd reshapes, of which a trace says ``view``, is reshaped.

    Raises:
        ScheduleError: this backward reads what is neither saved nor can be replayed.
    """
    graph = captured.graph
    values = {value.name: index for index, value in enumerate(graph.values)}
    values |= {node.name: value for node, value in captured.value_of.items()}
    kept = [values[name] for name in saved if name in values]  # others are of no use here
    schedule = build_schedule(graph, frozenset(v for v in kept if graph.is_forward_value[v]))
    backward = _Emitter(captured, in_backward=True, saved=saved)
    steps = schedule.steps[_first_backward_step(graph.n_forward, schedule) :]
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
    """What a backward from other outputs may read and costs nothing to save: given values, and what the caller holds."""
    graph = captured.graph
    changed = {buffer for _, buffer in graph.updates}  # by the step itself: the backward would find other content
    for value, source in enumerate(captured.value_nodes if captured.joint.undefined else ()):
        given = graph.values[value].kind in STATIC_KINDS and value not in changed and bool(graph.forward_readers[value])
        if source is not None and source.op != "get_attr" and (given or value in graph.outputs):
            yield source.name


def _first_backward_step(n_forward: int, schedule: Schedule) -> int:
    for position, step in enumerate(schedule.steps):
        if step.kind is StepKind.REPLAY or (step.op is not None and step.op >= n_forward):
            return position
    return len(schedule.steps)


def _freed_after(steps: tuple[Step, ...], position: int) -> set[int]:
    """Values that are freed right after the run at ``position``."""
    freed: set[int] = set()
    for step in steps[position + 1 :]:
        if step.kind is not StepKind.FREE or step.value is None:
            break
        freed.add(step.value)
    return freed


class _Emitter:
    """Writes one of the two graphs.

    In the backward, a forward value that is read before a replay has made it is one that the forward saves: it becomes a
    placeholder at its first read.
    """

    def __init__(self, captured: Captured, *, in_backward: bool, saved: tuple[str, ...] | None = None) -> None:
        """``saved``: names of what the forward saves, where that is settled."""
        self._captured = captured
        self._joint = captured.joint.module
        self._in_backward = in_backward
        self._out = fx.Graph()
        self._made: dict[Node, Node] = {}
        self._on_value: dict[int, list[Node]] = {}
        self._rng_states: dict[int, Node] = {}
        self.saved: dict[str, Node] = {}  # placeholders of nodes of the joint graph, and of RNG states
        self._settled = saved is not None
        self._placeholders: list[Node] = []
        # New contents of buffers end with the forward, after torch has copied them: they are among its results.
        self._copied_back = frozenset() if in_backward else frozenset(new for new, _ in captured.graph.updates)
        self._tangents = set(captured.joint.tangents)
        self._by_name: dict[str, Node | int] = {node.name: node for node in self._joint.graph.nodes}
        self._by_name |= {captured.graph.values[v].name: v for v, node in enumerate(captured.value_nodes) if node is None}
        for name in saved or ():
            self.save(name)
        if not in_backward:
            for node in self._joint.graph.find_nodes(op="placeholder"):
                if node not in self._tangents:
                    self._made[node] = self._placeholder(node.name, node.meta.get("val"))

    def save(self, name: str) -> Node:
        """Return the placeholder of what the forward saves under ``name``."""
        if name not in self.saved:
            source = self._by_name[name]
            val = source.meta.get("val") if isinstance(source, Node) else self._captured.rng_state_val(source)
            # A name of its own: where a placeholder's target and name differ, fx's code overwrites one argument with another.
            self.saved[name] = self._placeholder("saved_" + name.replace(".", "_"), val)
        return self.saved[name]

    def _placeholder(self, name: str, val: Any) -> Node:
        node = self._out.placeholder(name)
        node.meta["val"] = val
        self._placeholders.append(node)
        return node

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, steps: tuple[Step, ...]) -> None:
        for position, step in enumerate(steps):
            if step.kind is StepKind.FREE:
                assert step.value is not None
                if step.value not in self._copied_back:
                    self._forget(step.value)
            else:
                self._emit_run(step, _freed_after(steps, position))

    def _emit_run(self, step: Step, dead: set[int]) -> None:
        assert step.op is not None
        op, node = self._captured.graph.ops[step.op], self._captured.op_nodes[step.op]
        if node is None:
            (value,) = op.outputs
            state = self._rng_states[value] = self._out.call_function(rng_state, (self._captured.rng_device(value),))
            state.meta["val"] = self._captured.rng_state_val(value)
            return
        if step.kind is StepKind.REPLAY:
            target, args, kwargs = replayed_call(node)
        else:
            assert callable(node.target)
            target, args, kwargs = node.target, node.args, node.kwargs
        ended = op.in_place[0] if step.in_place and op.in_place is not None else None
        call = self._captured.in_place[step.op] if ended is not None else None
        if call is not None:
            target = call.target
            args = (args[1], args[0], *args[2:]) if call.swap else args
            kwargs = {**kwargs, call.out: call.overwritten} if call.out else kwargs
        args, kwargs = fx.node.map_arg((args, kwargs), self._read)
        if op.random and step.kind is StepKind.REPLAY:
            (state_value,) = op.replay_inputs
            args = (self._captured.rng_device(state_value), self._read_rng_state(state_value), target, *args)
            target = replay_random
        elif looks_at_grad_mode(target):
            args, target = (target, *args), in_training
        made = self._out.call_function(target, args, kwargs)
        made.meta.update({k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")})
        if ended is not None:
            self._forget(ended)
        wanted = [v for v in op.outputs if v not in dead or v in self._copied_back]
        self._remember(node, made, wanted, keep_live=step.kind is StepKind.REPLAY)

    def _remember(self, node: Node, made: Node, outputs: list[int], *, keep_live: bool) -> None:
        """Note what ``made`` holds. A copy of a value that is live already is dropped: its readers keep the first one."""
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._note(node, made, keep_live)
            return
        self._made[node] = made
        for user in self._output_nodes(node):
            if self._captured.value_of.get(user) in outputs and user.users:
                item = self._out.call_function(operator.getitem, (made, user.args[1]))
                item.meta["val"] = user.meta.get("val")
                self._note(user, item, keep_live)
        del self._made[node]

    def _note(self, node: Node, made: Node, keep_live: bool) -> None:
        value = self._captured.value_of.get(node)
        if value is None:
            self._made[node] = made
            return
        if keep_live and self._on_value.get(value):
            return
        self._made[node] = made
        self._on_value.setdefault(value, []).append(node)

    def _output_nodes(self, node: Node) -> list[Node]:
        return [u for u in node.users if u.op == "call_function" and u.target is operator.getitem]

    def _forget(self, value: int) -> None:
        for node in self._on_value.pop(value, ()):
            self._made.pop(node, None)
        self._rng_states.pop(value, None)

    # -- reads --------------------------------------------------------------------------------------------------------

    def _read(self, node: Node) -> Node:
        """Return what holds ``node`` in the graph being written, making its views and placeholders on the way."""
        node = self._canonical(node)
        chain = []
        while node not in self._made and not self._is_source(node):
            chain.append(node)
            node = self._canonical(self._view_base(node))
        if node not in self._made:
            self._made_from_outside(node)
        for view in reversed(chain):
            args, kwargs = fx.node.map_arg((view.args, view.kwargs), lambda n: self._made[n])
            assert callable(view.target)
            made = self._out.call_function(view.target, args, kwargs)
            made.meta["val"] = view.meta.get("val")
            self._made[view] = made
            value = self._captured.value_of.get(view)
            if value is not None:
                self._on_value.setdefault(value, []).append(view)
        return self._made[chain[0] if chain else node]

    def _canonical(self, node: Node) -> Node:
        """Return the node that stands for all ``getitem`` nodes of one output of one op."""
        if node.op == "call_function" and node.target is operator.getitem and node.args[0] not in self._captured.value_of:
            return self._captured.value_nodes[self._captured.value_of[node]] or node
        return node

    def _is_source(self, node: Node) -> bool:
        """Whether ``node`` holds a whole storage: a given value, or the output of an op."""
        value = self._captured.value_of.get(node)
        return node.op != "call_function" or (value is not None and self._captured.value_nodes[value] is node)

    def _view_base(self, view: Node) -> Node:
        (base,) = view.all_input_nodes
        return base

    def _made_from_outside(self, node: Node) -> None:
        if node.op == "get_attr":
            self._made[node] = self._out.get_attr(str(node.target))
            return
        value = self._captured.value_of.get(node)
        if not self._in_backward or value is None:
            raise ScheduleError(f"{node.name} is read before it is made", where="lowering")
        if node in self._tangents:
            self._made[node] = self._placeholder(node.name, node.meta.get("val"))
        else:
            self._made[node] = self._saved(node.name)
        self._on_value.setdefault(value, []).append(node)

    def _read_rng_state(self, value: int) -> Node:
        if value not in self._rng_states:
            self._rng_states[value] = self._saved(self._captured.graph.values[value].name)
        return self._rng_states[value]

    def _saved(self, name: str) -> Node:
        """Return what the forward saved under ``name``; it is asked to, unless that is settled."""
        if not self._in_backward or (self._settled and name not in self.saved):
            raise ScheduleError(f"{name} is read and neither made nor saved", where="lowering")
        return self.save(name)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def finish_forward(self, saved: tuple[str, ...]) -> None:
        """Return the joint graph's forward outputs, then the values that the backward asks for, in its order."""
        outputs = self._joint_outputs()[: self._captured.n_forward_outputs]
        results: list[Any] = [self._read(n) if isinstance(n, Node) else n for n in outputs]
        for source in (self._by_name[name] for name in saved):
            results.append(self._read(source) if isinstance(source, Node) else self._rng_states[source])
        self._out.output(tuple(results))

    def finish_backward(self) -> None:
        """Return the gradients; order the placeholders as torch passes them: saved values, then tangents."""
        outputs = self._joint_outputs()[self._captured.n_forward_outputs :]
        results = [self._read(n) if isinstance(n, Node) else n for n in outputs]
        for tangent in self._captured.joint.tangents:
            placeholder = self._made.get(tangent) or self._placeholder(tangent.name, tangent.meta.get("val"))
            self._placeholders.remove(placeholder)
            self._placeholders.append(placeholder)
        self._out.output(tuple(results))

    def _joint_outputs(self) -> list[Any]:
        (output,) = (n for n in self._joint.graph.nodes if n.op == "output")
        return list(output.args[0])

    def module(self, name: str) -> fx.GraphModule:
        first_call = next(n for n in self._out.nodes if n.op != "placeholder")
        for placeholder in self._placeholders:
            first_call.prepend(placeholder)
        self._out.lint()
        return fx.GraphModule(self._joint, self._out, class_name=name)
