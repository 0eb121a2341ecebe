"""From a joint graph and a schedule to a forward and a backward graph module.

Each run of the schedule becomes one call, in the schedule's order; a replay is one more call inside the backward. Views are
made again where they are needed. No call is made to free memory: in the generated code a name goes out of use after its
last read, and the schedule frees a value exactly there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.captured import Captured
from actsolve.capture.replay import replayed_call
from actsolve.errors import ScheduleError
from actsolve.graph import Kind
from actsolve.runtime.rng import replay_random, rng_state
from actsolve.schedule import Schedule, Step, StepKind


def lower(captured: Captured, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module that carry out ``schedule``.

    The forward takes parameters, buffers and inputs as the joint graph does, and returns its outputs and then the values to
    be saved; the backward takes those and the tangents, and returns the gradients.

    Raises:
        ScheduleError: a step reads what no earlier step made.
    """
    graph = captured.graph
    split = _first_backward_step(graph.n_forward, schedule)
    backward = _Emitter(captured, in_backward=True)
    backward.run(schedule.steps[split:])
    backward.finish_backward()
    forward = _Emitter(captured, in_backward=False)
    forward.run(schedule.steps[:split])
    forward.finish_forward(backward.saved)
    return forward.module("Forward"), backward.module("Backward")


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

    def __init__(self, captured: Captured, *, in_backward: bool) -> None:
        self._captured = captured
        self._joint = captured.joint.module
        self._in_backward = in_backward
        self._out = fx.Graph()
        self._made: dict[Node, Node] = {}
        self._on_value: dict[int, list[Node]] = {}
        self._rng_states: dict[int, Node] = {}
        self.saved: list[Node | int] = []  # nodes of the joint graph, and values for RNG states
        self._placeholders: list[Node] = []
        # New contents of buffers end with the forward, after torch has copied them: they are among its results.
        self._copied_back = frozenset() if in_backward else frozenset(new for new, _ in captured.graph.updates)
        if not in_backward:
            for node in self._inputs():
                self._made[node] = self._placeholder(node.name, node.meta.get("val"))

    def _inputs(self) -> list[Node]:
        return [n for n in self._joint.graph.nodes if n.op == "placeholder" and not self._is_tangent(n)]

    def _is_tangent(self, node: Node) -> bool:
        value = self._captured.value_of.get(node)
        return value is not None and self._captured.graph.values[value].kind is Kind.TANGENT

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
            state = self._rng_states[op.outputs[0]] = self._out.call_function(rng_state, ())
            state.meta["val"] = self._captured.rng_state_val
            return
        if step.kind is StepKind.REPLAY:
            target, args, kwargs = replayed_call(node)
        else:
            assert callable(node.target)
            target, args, kwargs = node.target, node.args, node.kwargs
        call = self._captured.in_place[step.op] if step.in_place else None
        if call is not None:
            target = call.target
            args = (args[1], args[0], *args[2:]) if call.swap else args
            kwargs = {**kwargs, call.out: call.overwritten} if call.out else kwargs
        args, kwargs = fx.node.map_arg((args, kwargs), self._read)
        if op.random and step.kind is StepKind.REPLAY:
            args = (self._read_rng_state(op.replay_inputs[0]), target, *args)
            target = replay_random
        made = self._out.call_function(target, args, kwargs)
        made.meta.update({k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")})
        for value in op.inputs if call is not None else ():
            if value == op.in_place[0]:  # type: ignore[index]
                self._forget(value)
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
        # A name of its own: where a placeholder's target and name differ, fx's code overwrites one argument with another.
        label = node.name if self._is_tangent(node) else f"saved_{node.name}"
        self._made[node] = self._placeholder(label, node.meta.get("val"))
        self._on_value.setdefault(value, []).append(node)
        if not self._is_tangent(node):
            self.saved.append(node)

    def _read_rng_state(self, value: int) -> Node:
        if value not in self._rng_states:
            if not self._in_backward:
                raise ScheduleError(f"{self._captured.graph.values[value].name} is read before it is made", where="lowering")
            self._rng_states[value] = self._placeholder(f"rng_state_{value}", self._captured.rng_state_val)
            self.saved.append(value)
        return self._rng_states[value]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def finish_forward(self, saved: list[Node | int]) -> None:
        """Return the joint graph's forward outputs, then the values that the backward asks for, in its order."""
        outputs = self._joint_outputs()[: self._captured.n_forward_outputs]
        results: list[Any] = [self._read(n) if isinstance(n, Node) else n for n in outputs]
        results += [self._rng_states[s] if isinstance(s, int) else self._read(s) for s in saved]
        self._out.output(tuple(results))

    def finish_backward(self) -> None:
        """Return the gradients; order the placeholders as torch passes them: saved values, then tangents."""
        outputs = self._joint_outputs()[self._captured.n_forward_outputs :]
        results = [self._read(n) if isinstance(n, Node) else n for n in outputs]
        for tangent in (n for n in self._joint.graph.nodes if n.op == "placeholder" and self._is_tangent(n)):
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
