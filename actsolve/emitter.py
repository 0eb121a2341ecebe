"""Writes the graph of a forward or of a backward, a step of the schedule at a time.

Views are made again where they are needed. No call is made to free memory: in the generated code a name goes out of use after
its last read, and the schedule frees a value exactly there. Copies to and from the host are calls of a `CopyEngine`, each where
its step is.
"""

from __future__ import annotations

import operator
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.answers import answer_at
from actsolve.capture.captured import Captured
from actsolve.capture.eager_regions import called
from actsolve.capture.replay import replayed_call
from actsolve.errors import ScheduleError
from actsolve.runtime.accumulated import accumulated
from actsolve.runtime.answered import confirmed
from actsolve.runtime.copy_engine import CopyEngine
from actsolve.runtime.grad_mode import in_training, looks_at_grad_mode
from actsolve.runtime.rng import replay_random, rng_state
from actsolve.schedule import Step, StepKind

_HOST = ".host"


def _freed_after(steps: tuple[Step, ...], position: int) -> set[int]:
    """Values that are freed right after the run at ``position``."""
    freed: set[int] = set()
    for step in steps[position + 1 :]:
        if step.kind is not StepKind.FREE or step.value is None:
            break
        freed.add(step.value)
    return freed


def host_name(name: str) -> str:
    """Return the name under which the copy of a value on the host is saved."""
    return f"{name}{_HOST}"


def value_name(saved: str) -> str:
    """Return the name of the value that is saved under ``saved``, itself or as its copy."""
    return saved.removesuffix(_HOST)


class Emitter:
    """Writes one of the two graphs.

    In the backward, a forward value that is read before a replay or a copy has made it is one that the forward saves: it
    becomes a placeholder at its first read. So does the copy of a value on the host.
    """

    def __init__(
        self,
        captured: Captured,
        *,
        in_backward: bool,
        engine: CopyEngine[Any] | None = None,
        saved: tuple[str, ...] | None = None,
    ) -> None:
        """``saved``: names of what the forward saves, where that is settled; ``engine``: its methods are called for copies."""
        self._captured = captured
        self._joint = captured.joint.module
        self._in_backward = in_backward
        self._out = fx.Graph()
        self._made: dict[Node, Node] = {}
        self._on_value: dict[int, list[Node]] = {}
        self._rng_states: dict[int, Node] = {}
        self._engine = engine
        self._lease: Node | None = None
        self._hosts: dict[int, Node] = {}  # copies of values on the host
        self._arriving: dict[int, Node] = {}  # copies back that were not waited for
        self.saved: dict[str, Node] = {}  # placeholders of nodes of the joint graph, RNG states and copies on the host
        self._settled = saved is not None
        self._placeholders: list[Node] = []
        # New contents of buffers end with the forward, after torch has copied them: they are among its results.
        self._updates = frozenset() if in_backward else frozenset(new for new, _ in captured.graph.updates)
        self._tangents = set(captured.joint.tangents)
        self._questions = {node: position for position, node in enumerate(captured.joint.questions)}
        self._by_name: dict[str, Node | int] = {node.name: node for node in self._joint.graph.nodes}
        self._by_name |= {captured.graph.values[v].name: v for v, node in enumerate(captured.value_nodes) if node is None}
        self._on_host = {host_name(value.name): v for v, value in enumerate(captured.graph.values)}
        self._accumulated: dict[Node, Node] = {}  # gradients, and what is left of them for autograd
        for name in saved or ():
            self.save(name)
        if not in_backward:
            for node in self._joint.graph.find_nodes(op="placeholder"):
                if node not in self._tangents:
                    self._made[node] = self._placeholder(node.name, node.meta.get("val"))

    def save(self, name: str) -> Node:
        """Return the placeholder of what the forward saves under ``name``."""
        if name not in self.saved:
            source = self._by_name.get(name, self._on_host.get(name))
            val = source.meta.get("val") if isinstance(source, Node) else self._bytes_on_host(source)
            # A name of its own: where a placeholder's target and name differ, fx's code overwrites one argument with another.
            self.saved[name] = self._placeholder("saved_" + name.replace(".", "_"), val)
        return self.saved[name]

    def _bytes_on_host(self, value: int | None) -> torch.Tensor | None:
        """Return what an RNG state, or a copy of a value, looks like; None for one that this graph does not know."""
        return None if value is None else self._captured.rng_state_val(value)

    def _placeholder(self, name: str, val: Any) -> Node:
        node = self._out.placeholder(name)
        node.meta["val"] = val
        self._placeholders.append(node)
        return node

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if step.kind is StepKind.WAIT_OUT and self._in_backward:
                self._read(self._whole(step.value))  # it is saved on the device too, whatever is replayed before the wait
        for position, step in enumerate(steps):
            if step.kind is StepKind.FREE:
                assert step.value is not None
                if step.value not in self._updates:
                    self._accumulate(step.value)
                    self._forget(step.value)
            elif step.op is not None:
                self._emit_run(step, _freed_after(steps, position))
            else:
                self._emit_copy(step)

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
        if ended is not None:
            self._accumulate(ended)
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
        elif node in self._questions and step.kind is not StepKind.REPLAY:
            args, target = (self._questions[node], answer_at(node), target, *args), confirmed
        else:
            target = called(target)
        made = self._out.call_function(target, args, kwargs)
        made.meta.update({k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")})
        if ended is not None:
            self._forget(ended)
        replayed = step.kind is StepKind.REPLAY
        wanted = [v for v in op.outputs if v not in dead or v in self._updates or v in self._leaving]
        if replayed:  # what is there stays; and new contents of buffers, which are, a replay may not even make
            wanted = [v for v in wanted if not self._on_value.get(v)]
        self._remember(node, made, wanted, keep_live=replayed)

    def _remember(self, node: Node, made: Node, outputs: list[int], *, keep_live: bool) -> None:
        """Note what ``made`` holds. What was live already, or is on its way back, is dropped: its readers keep the first one."""
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
        if keep_live and (self._on_value.get(value) or value in self._arriving):
            return
        self._made[node] = made
        self._on_value.setdefault(value, []).append(node)

    def _output_nodes(self, node: Node) -> list[Node]:
        return [u for u in node.users if u.op == "call_function" and u.target is operator.getitem]

    @cached_property
    def _leaving(self) -> dict[int, dict[Node, int]]:
        """Per value the gradients that leave with it."""
        return self._captured.of_parameters if self._captured.accumulates and self._in_backward else {}

    def _accumulate(self, value: int) -> None:
        """Add the gradients that ``value`` holds to those that are there, for it is to be freed."""
        for node, index in self._leaving.get(value, {}).items():
            if node not in self._accumulated:
                self._accumulated[node] = self._out.call_function(accumulated, (index, self._read(node)))

    def _forget(self, value: int) -> None:
        for node in self._on_value.pop(value, ()):
            self._made.pop(node, None)
        self._rng_states.pop(value, None)

    # -- copies -------------------------------------------------------------------------------------------------------

    def _emit_copy(self, step: Step) -> None:
        value, engine = step.value, self._engine
        assert value is not None
        if engine is None:
            raise ScheduleError(f"{step.kind.value} of {self._name(value)}, and there is nothing that copies", where="lowering")
        if step.kind is StepKind.COPY_OUT:
            self._copy_out(engine, value)
        elif step.kind is StepKind.WAIT_OUT:
            self._out.call_function(engine.wait_out, (self._host(value), self._read(self._whole(value))))
        elif step.kind is StepKind.COPY_BACK:
            self._copy_back(engine, value)
        else:
            self._wait_back(engine, value)

    def _copy_out(self, engine: CopyEngine[Any], value: int) -> None:
        if self._in_backward:
            raise ScheduleError(f"{self._name(value)} is copied out in the backward", where="lowering")
        if self._lease is None:
            self._lease = self._out.call_function(engine.lease)
        n_bytes = self._captured.graph.values[value].size_bytes
        args = (self._lease, self._read(self._whole(value)), engine.place(n_bytes), n_bytes)
        self._hosts[value] = self._out.call_function(engine.copy_out, args)
        self._hosts[value].meta["val"] = self._bytes_on_host(value)

    def _copy_back(self, engine: CopyEngine[Any], value: int) -> None:
        device = self._whole(value).meta["val"].device
        self._arriving[value] = self._out.call_function(engine.copy_back, (self._host(value), device))

    def _wait_back(self, engine: CopyEngine[Any], value: int) -> None:
        node = self._whole(value)
        val = node.meta["val"]
        layout = (val.dtype, tuple(val.shape), tuple(val.stride()), val.storage_offset())
        made = self._out.call_function(engine.wait_back, (self._arriving.pop(value), *layout))
        made.meta["val"] = val
        self._note(node, made, keep_live=False)

    def wait_for_copies_out(self) -> None:
        """Wait for the copies out of all that is saved both on the device and on the host."""
        for name, host in list(self.saved.items()):
            value = self._on_host.get(name)
            node = None if value is None else self._captured.value_nodes[value]
            if node is not None and node.name in self.saved and self._engine is not None:
                self._out.call_function(self._engine.wait_out, (host, self.saved[node.name]))

    def _whole(self, value: int | None) -> Node:
        """Return the joint graph's node that holds all of ``value``."""
        node = None if value is None else self._captured.value_nodes[value]
        if node is None:
            raise ScheduleError("a value that no node holds is copied", where="lowering")
        return node

    def _host(self, value: int) -> Node:
        """Return what holds the copy of ``value`` on the host."""
        if not self._in_backward and value not in self._hosts:
            raise ScheduleError(f"{self._name(value)} is waited for and was not copied out", where="lowering")
        return self._hosts[value] if value in self._hosts else self._saved(host_name(self._name(value)))

    def _name(self, value: int) -> str:
        return self._captured.graph.values[value].name

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
        if self._settled and node.name not in self.saved and self._engine and host_name(self._name(value)) in self.saved:
            self._copy_back(self._engine, value)
            self._wait_back(self._engine, value)
            return
        if node in self._tangents:
            self._made[node] = self._placeholder(node.name, node.meta.get("val"))
        else:
            self._made[node] = self._saved(node.name)
        self._on_value.setdefault(value, []).append(node)

    def _read_rng_state(self, value: int) -> Node:
        if value not in self._rng_states:
            self._rng_states[value] = self._saved(self._name(value))
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
        for name in saved:
            source = self._by_name.get(name)
            if source is None:
                results.append(self._host(self._on_host[name]))
            else:
                results.append(self._read(source) if isinstance(source, Node) else self._rng_states[source])
        self._out.output(tuple(results))

    def finish_backward(self) -> None:
        """Return the gradients; order the placeholders as torch passes them: saved values, then tangents."""
        for value in self._leaving:  # of what is not freed: a tangent that is a gradient itself
            self._accumulate(value)
        outputs = self._joint_outputs()[self._captured.n_forward_outputs :]
        results = [self._accumulated.get(n) or self._read(n) if isinstance(n, Node) else n for n in outputs]
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
