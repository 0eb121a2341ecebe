"""A planned step that can be called: torch's autograd around the forward and the backward that were lowered.

A backward that starts from other outputs than the plan expected, or from gradients in another layout than was traced (those
of a mean outside of the step are one element, expanded), is made when it is first asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from actsolve.capture.answers import Answer
from actsolve.capture.captured import Captured
from actsolve.capture.generators import own_generators
from actsolve.capture.region_call import IN_TURN, UNDEFINED
from actsolve.capture.replay import is_random
from actsolve.capture.state import Place
from actsolve.capture.tangents import computed_from, undefined_gradients
from actsolve.capture.to_graph import is_backward
from actsolve.capture.torch_aot import compile_joint, shown_inputs
from actsolve.capture.torch_engine import forget_running
from actsolve.capture.torch_internals import in_recomputation
from actsolve.cost.link_speed import EMULATED
from actsolve.errors import ScheduleError, UsageError
from actsolve.lower import Lowered, lower, lower_backward
from actsolve.planned import Planned
from actsolve.runtime.boxed import boxed_function
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.engines import new_engine
from actsolve.schedule import Schedule, StepKind

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default})

_AS_PLANNED = CopyOptions()

Boxed = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Inner:
    """An output that others are computed from.

    Attributes:
        output: The tensor, while its caller has it.
        hooks: Its hooks, which autograd holds also when the tensor itself is gone.
        shape: Of the tensor.
        tangents: The tangents of the others.
    """

    output: weakref.ref[torch.Tensor]
    hooks: weakref.ref[Any]
    shape: tuple[int, ...]
    tangents: frozenset[str]


@dataclass
class Backward:
    """The backward of a compiled step, for each kind of start that it was asked for.

    Attributes:
        captured: The step.
        lowered: The planned forward and backward.
        engine: What copies to and from the host; None where nothing is offloaded.
        seen: The tangents that it has ever been given.
    """

    captured: Captured
    lowered: Lowered
    engine: CopyEngine[Any] | None = None
    seen: set[str] = field(default_factory=set)
    _forms: dict[tuple[frozenset[str], bool], Boxed] = field(default_factory=dict)
    _undefined: dict[Any, frozenset[int]] = field(default_factory=dict)
    _inner: list[_Inner] = field(default_factory=list)

    def __call__(self, args: list[Any]) -> Any:
        traced = self.captured.joint.tangents
        given = {t.name: t.meta["val"] for t, tangent in zip(traced, args[-len(traced) :], strict=True) if tangent is not None}
        as_traced = all(map(_same_layout, given.values(), (t for t in args[-len(traced) :] if t is not None)))
        if not as_traced and self._addresses_storages:
            args[-len(traced) :] = [_laid_out(t.meta["val"], g) for t, g in zip(traced, args[-len(traced) :], strict=True)]
            as_traced = True
        self.seen |= given.keys()
        self._refuse_hooks_inside(given.keys())
        form = (frozenset(given), as_traced)
        if form not in self._forms:
            self._forms[form] = boxed_function(self._lowered(*form), "backward")
        try:
            UNDEFINED.found.clear()
            gradients = self._forms[form](args)
            missing = self._missing(form[0]) if any(UNDEFINED.found.values()) else ()
            return [None if i in missing else g for i, g in enumerate(gradients)] if missing else gradients
        finally:
            forget_running()

    def _missing(self, given: frozenset[str]) -> frozenset[int]:
        """Return which inputs get no gradient in the backward that has run, for what is left in eager has made none."""
        key = (given, frozenset(UNDEFINED.found.items()))
        if key not in self._undefined:
            joint = self.captured.joint if given == self.captured.tangents else self.captured.starting_from(given).joint
            self._undefined[key] = undefined_gradients(joint, UNDEFINED.found)
        return self._undefined[key]

    def watch(self, outputs: list[Any]) -> None:
        """Note the outputs of a forward that others are computed from."""
        self._inner = [inner for inner in self._inner if inner.hooks() is not None]
        for index, tangents in self._computed_from.items():
            output = outputs[index]
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(_nothing).remove()  # type: ignore[no-untyped-call]  # torch makes the dict with the first
                hooks = weakref.ref(output._backward_hooks)
                self._inner.append(_Inner(weakref.ref(output), hooks, tuple(output.shape), tangents))

    @cached_property
    def _computed_from(self) -> dict[int, frozenset[str]]:
        return computed_from(self.captured.full)

    def _refuse_hooks_inside(self, given: Collection[str]) -> None:
        """Raise if what is to see the gradient of an output would miss the part that comes from other outputs."""
        for inner in self._inner:
            output, hooks = inner.output(), inner.hooks()
            if not inner.tangents.isdisjoint(given) and (hooks or (output is not None and output.retains_grad)):
                what = "has a hook" if hooks else "is to retain its gradient"
                raise UsageError(
                    f"an output of shape {inner.shape} {what}, and the backward starts from one computed from it",
                    why="inside a planned step gradients do not pass through its outputs",
                    try_="the hook in the forward or in loss_fn, a loss computed outside of the model, or module.original",
                )

    def refuse_autocast(self) -> None:
        """Raise if the backward runs in an autocast region, and eager would therefore compute it otherwise than planned."""
        if self._has_full_precision_products and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise UsageError(
                "the backward runs inside an autocast region",
                why="it was planned to run outside, and autocast would lower the precision of its matrix products",
                try_="backward() after the region, as torch recommends",
            )

    @cached_property
    def _has_full_precision_products(self) -> bool:
        nodes = [n for n in self.captured.joint.module.graph.nodes if n.target in _PRODUCTS and is_backward(n)]
        return any(n.meta["val"].dtype is torch.float32 for n in nodes)

    @cached_property
    def _addresses_storages(self) -> bool:
        """Whether an op reads the storage of a gradient by offsets, which only the layout that was traced makes right."""
        targets = (aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default)
        return any(node.target in targets and is_backward(node) for node in self.captured.joint.module.graph.nodes)

    def _lowered(self, given: frozenset[str], as_traced: bool) -> torch.fx.GraphModule:
        if given == self.captured.tangents and as_traced:
            return self.lowered.backward
        try:
            captured, saved = self.captured.starting_from(given), self.lowered.saved
            return lower_backward(captured, saved, any_layout=not as_traced, engine=self.engine)
        except ScheduleError as error:
            raise UsageError(
                "the backward starts from other outputs than this step was planned for",
                where=error.where,
                why=f"it needs what the plan neither keeps nor can recompute ({error.what})",
                try_="the next step: it is planned for these outputs too",
            ) from error


def _nothing(_: torch.Tensor) -> None:
    pass


def _laid_out(traced: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor | None:
    if tangent is None:
        return None
    made = torch.empty_strided(traced.shape, traced.stride(), dtype=tangent.dtype, device=tangent.device)
    return made.copy_(tangent)


def _same_layout(traced: torch.Tensor, tangent: torch.Tensor) -> bool:
    strides = zip(traced.shape, traced.stride(), tangent.stride(), strict=True)
    return all(a == b for size, a, b in strides if size > 1)


@dataclass
class CompiledStep:
    """A planned step that can be called.

    Attributes:
        function: Differentiable function of the tensors of the module and its inputs.
        backward: What it runs in the backward.
        captured: What it was made from.
        planned: What is known of the plan.
    """

    function: Callable[..., list[Any]]
    backward: Backward
    captured: Captured
    planned: Planned

    def __call__(self, module: torch.nn.Module, places: list[Place], leaves: list[Any]) -> Any:
        if self.captured.graph.updates and in_recomputation():
            raise UsageError(
                "a checkpoint around the module runs it again, and it updates buffers",
                why="torch ends the second run before a planned step has updated them, as eager does",
                try_="no checkpoint around it, for a plan decides what is computed again; or use_reentrant=True",
            )
        with IN_TURN:
            state = [container[key] for container, key in places]
        for index in self._without_gradient:  # autograd would run their hooks, for a gradient that does not come
            state[index] = state[index].detach()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outputs = self.function(*state, *tensors)
        self.backward.watch(outputs)
        return self.captured.joint.layout.restore(module, outputs)

    @cached_property
    def _without_gradient(self) -> tuple[int, ...]:
        """The tensors of the module that require a gradient and get none, wherever the backward starts."""
        full = self.captured.full
        (output,) = full.module.graph.find_nodes(op="output")
        gradients = output.args[0][full.n_forward_outputs :]
        trained = full.leaf_indices.intersection(range(len(full.state))) - shown_inputs(full.export)
        return tuple(index for index in sorted(trained) if gradients[index] is None)

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """What it was traced for, of all that its forward asks."""
        return self.captured.joint.answers

    @property
    def eager(self) -> tuple[str, ...]:
        """Names of what it leaves in eager."""
        return self.captured.joint.eager

    @cached_property
    def draws_from(self) -> tuple[torch.Generator, ...]:
        """The generators that its forward may have drawn from before its last question: torch's, and the model's own."""
        module = self.captured.joint.module
        asked, nodes = set(self.captured.joint.questions[-1:]), list(module.graph.nodes)
        last = next((position for position, node in enumerate(nodes) if node in asked), 0)
        draws = [node for node in nodes[:last] if node.op == "call_function" and is_random(node)]
        given = [getattr(module, str(n.target)) for node in draws for n in node.all_input_nodes if n.op == "get_attr"]
        return tuple([*own_generators(), *(g for g in given if isinstance(g, torch.Generator))]) if draws else ()

    @property
    def outgrown(self) -> frozenset[str] | None:
        """The tangents to plan for, if the backward was given some that the plan did not expect."""
        expected = self.captured.tangents
        return None if self.backward.seen <= expected else expected | self.backward.seen


def compile_step(
    captured: Captured, planned: Planned, schedule: Schedule | None = None, options: CopyOptions = _AS_PLANNED
) -> CompiledStep:
    """Return a step that carries out the planned schedule, or ``schedule`` in its place.

    Args:
        captured: What was traced.
        planned: Its plan, with the links that are emulated where there is no accelerator.
        schedule: What to carry out instead.
        options: How copies run.

    Raises:
        UsageError: values are offloaded for which the host has not enough memory, or from a device that no engine is for.
    """
    schedule = schedule or planned.schedule
    engine = _engine(captured, planned, schedule, options)
    lowered = lower(captured, schedule, engine)
    if engine is not None:
        engine.prepare()
    backward = Backward(captured, lowered, engine)

    def partition(_joint: Any, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        assert num_fwd_outputs == captured.n_forward_outputs
        return lowered.forward, lowered.backward

    def forward_of(module: torch.fx.GraphModule, _inputs: Any) -> Boxed:
        return boxed_function(module, "forward")

    def backward_of(_module: torch.fx.GraphModule, _inputs: Any) -> Boxed:
        def run(args: list[Any]) -> Any:
            return backward(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    function = compile_joint(
        captured.joint.export,
        partition,
        forward=forward_of,
        backward=backward_of,
        before_backward=backward.refuse_autocast,
    )
    return CompiledStep(function, backward, captured, as_run(planned, captured))


def as_run(planned: Planned, captured: Captured) -> Planned:
    """Return a plan with the note that is due where it runs without an accelerator: that its copies are emulated."""
    if EMULATED in planned.notes or not _copies_on_cpu(captured, planned.schedule):
        return planned
    return replace(planned, notes=(*planned.notes, EMULATED))


def _copies_on_cpu(captured: Captured, schedule: Schedule) -> bool:
    return any(device.type == "cpu" for device in _offloads_from(captured, schedule))


def _offloads_from(captured: Captured, schedule: Schedule) -> set[torch.device]:
    """The devices that values are offloaded from."""
    offloaded = (captured.value_nodes[s.value] for s in schedule.steps if s.kind is StepKind.COPY_OUT and s.value is not None)
    return {node.meta["val"].device for node in offloaded if node is not None}


def _engine(captured: Captured, planned: Planned, schedule: Schedule, options: CopyOptions) -> CopyEngine[Any] | None:
    """Return what copies the values that ``schedule`` offloads; None if it does not offload any."""
    devices = _offloads_from(captured, schedule)
    if len(devices) > 1:
        raise UsageError("values on several devices are offloaded", why=", ".join(sorted(map(str, devices))))
    return new_engine(devices.pop(), planned.problem.links, options) if devices else None
