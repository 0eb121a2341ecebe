"""AOTAutograd, as far as it is private in torch: a step's joint graph, and what compiles its two halves.

Written against torch 2.11 to 2.13 (`torch._functorch.aot_autograd`, the joint-graph export with descriptors).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils
import torch._functorch.config
import torch.fx.experimental.proxy_tensor
import torch.fx.traceback
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from actsolve.capture.answers import Answers, asks, is_through_masks, may_ask
from actsolve.capture.torch_engine import gradients_in_graph
from actsolve.capture.torch_internals import preserved_annotations
from actsolve.errors import UsageError

BoxedFunction = Callable[[list[Any]], Any]
Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], BoxedFunction]
JointExport = Any  # torch's JointWithDescriptors
Correct = Callable[[Any, Any, Any, Any], Any]
_MAX_VIEWS = 8


def export_joint(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    *,
    correct: Correct,
    kernels: Mapping[Any, Callable[..., Any]],
    answers: Answers | None = None,
) -> JointExport:
    """Return the joint forward and backward graph of ``module(*args)``, functionalised, on fake tensors.

    No kernel runs and the RNG state is left as it was. Tensors that are neither parameters, buffers nor arguments (those
    that a loss function closes over) become constants of the graph.

    Args:
        module: What to trace.
        args: Its inputs. Where they are fake already, their mode is used as it is.
        correct: Called as ``correct(kernel, args, kwargs, result)`` for each kernel; returns what its
            result really looks like.
        kernels: What to trace for some composite kernels of torch.
        answers: To what the forward asks of its tensors, if they are known.
    """
    tensors = [*args, *module.parameters(), *module.buffers()]
    given_mode = detect_fake_mode(tensors)
    fake_mode = given_mode or _CorrectedFakeTensorMode(correct, answers)
    no_autocast_in_backward = torch._functorch.config.patch(backward_pass_autocast="off")
    with contextlib.ExitStack() as stack, no_autocast_in_backward:
        if given_mode is not None:
            stack.enter_context(_fake_constants())
        for context in (tracing(TracingContext(fake_mode)), preserved_annotations(), _eager_kernels(kernels), _nothing_lost()):
            stack.enter_context(context)
        stack.enter_context(_no_record_of_errors())
        if answers is not None:
            stack.enter_context(_no_constants())
        return aot_export_joint_with_descriptors(stack, module, args, {})


@contextlib.contextmanager
def _no_record_of_errors() -> Iterator[None]:
    """Keep torch from logging an error with its traceback, which is raised too."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _no_constants() -> Iterator[None]:
    """Ask for what small constants hold, as a forward that runs for real does: a trace knows that of most by itself."""
    limit = "CONSTANT_NUMEL_LIMIT"
    with (
        mock.patch.object(torch.fx.experimental.proxy_tensor, limit, 0),
        mock.patch.object(torch._subclasses.fake_tensor, limit, 0),
    ):
        yield


def _fake_constants() -> contextlib.AbstractContextManager[Any]:
    """Let constants be fake, which torch refuses: where a whole step is, so are the tensors that its loss closes over."""
    return mock.patch.object(torch._dynamo.utils, "assert_no_fake_params_or_buffers", lambda _: None)


class _CorrectedFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors laid out as the kernels lay out real ones, where torch's meta functions say otherwise."""

    def __init__(self, correct: Correct, answers: Answers | None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._correct = correct
        self._answers = answers

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._answers is not None and asks(func, args):
            through_masks = is_through_masks(func)
            asked = self._answers.to(func, args)
            if asked is not None and not through_masks:
                return asked.traced(self)
            if not through_masks:
                with self:
                    args = self._answers.by_position(args)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return self._grouped_mm(types, args, kwargs or {})
        result = super().dispatch(func, types, args, kwargs or {})
        return self._correct(func, args, kwargs or {}, result)

    def _grouped_mm(self, types: Any, args: Any, kwargs: Any) -> Any:
        """Torch's meta function refuses what its kernels take on a CPU: products of groups in another precision than bf16."""
        with self:
            low = [arg.to(torch.bfloat16) for arg in args[:2]]
        result: Any = super().dispatch(torch.ops.aten._grouped_mm.default, types, (*low, *args[2:]), kwargs)
        with self:
            return result.to(args[0].dtype)


@contextlib.contextmanager
def _nothing_lost() -> Iterator[None]:
    """Keep calls of which nothing reads the result but that have an effect: random draws, checks that may raise, and questions.

    Fx takes some of both for dead code. The check of a decomposition's success is traced as an op like others, not as an
    effect that is threaded through.
    """
    check = torch.ops.aten._linalg_check_errors.default
    kept = {check, *(op for op in _aten_overloads() if torch.Tag.nondeterministic_seeded in op.tags or may_ask(op))}
    added = kept - torch.fx.node._side_effectful_functions
    effect = torch._library.simple_registry.singleton.find(check._name).effect
    before = effect.effect
    torch.fx.node._side_effectful_functions.update(added)
    effect.register(None)
    try:
        yield
    finally:
        effect.register(before)
        torch.fx.node._side_effectful_functions.difference_update(added)


_PYTHON_KERNELS_NEEDED = frozenset({"native_batch_norm", "cudnn_batch_norm", "one_hot", "tensor_split", "empty"})


@contextlib.contextmanager
def _eager_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While tracing, call the kernels that eager calls, not what torch has in Python in place of some of them.

    Those (LSTM, GRU, interpolation, matmul, ...) compute the same up to rounding, with more ops and memory. The few that
    are kept say what the C++ kernel does not, such as batch norm's new statistics.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    before = [(op, dict(op.py_kernels)) for op in {*_ops_with_python_kernels(keys), *kernels}]
    for op, _ in before:
        for key in keys:
            op.py_kernels.pop(key, None)
            if op in kernels:
                op.py_kernels[key] = kernels[op]
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, python_kernels in before:
            op.py_kernels.clear()
            op.py_kernels.update(python_kernels)
            op._dispatch_cache.clear()


def _ops_with_python_kernels(keys: tuple[Any, ...]) -> list[Any]:
    replaceable = (op for op in _aten_overloads() if op._opname not in _PYTHON_KERNELS_NEEDED)
    return [op for op in replaceable if any(key in op.py_kernels for key in keys)]


@functools.cache
def _aten_overloads() -> tuple[Any, ...]:
    packets: list[Any] = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    packets = [p for p in packets if isinstance(p, torch._ops.OpOverloadPacket)]
    return tuple(getattr(packet, name) for packet in packets for name in packet.overloads())


def compile_joint(
    export: JointExport,
    partition: Callable[..., Any],
    *,
    forward: Compiler,
    backward: Compiler,
    before_backward: Callable[[], None],
) -> Callable[..., list[Any]]:
    """Return a differentiable function of the flat tensors that an exported joint graph takes.

    Gradients of outputs reach the backward as autograd has them: undefined ones as None, others in any layout. It may run
    more than once (``retain_graph``).

    Args:
        export: From `export_joint`.
        partition: Called as ``partition(joint, inputs, num_fwd_outputs=...)``; returns the forward and the backward module.
        forward: Turns the forward module into a function of one list, which it empties.
        backward: The same for the backward module.
        before_backward: Called in each backward, in the modes of its caller; torch turns autocast off for the rest.
    """

    def as_given(tangent: Any, *_: Any) -> tuple[Any, list[Any]]:
        before_backward()
        return tangent, [tangent]

    # Without donated buffers: with them torch refuses retain_graph, for a compiler might have reused their memory.
    no_donation = torch._functorch.config.patch(donated_buffer=False)
    # And gradients of outputs as they come: torch would copy those that are not laid out as it has traced them.
    tangents_as_given = mock.patch.object(AOTDispatchAutograd, "process_runtime_tangent", staticmethod(as_given))
    with no_donation, tangents_as_given:
        function = aot_compile_joint_with_descriptors(
            _fresh(export),
            partition_fn=partition,
            fw_compiler=forward,  # type: ignore[arg-type]
            bw_compiler=backward,  # type: ignore[arg-type]
        )

    aot_id = export._aot_state.aot_config.aot_id

    def call(*tensors: Any) -> list[Any]:
        outputs = list(function(*tensors))
        _pass_undefined_gradients(outputs, aot_id)
        return outputs

    return call


def shown_inputs(export: JointExport) -> frozenset[int]:
    """Return which inputs the outputs show: these lead gradients past the graph, for torch makes them from the inputs."""
    kinds = (OutputType.is_input, OutputType.alias_of_input)
    infos = export._aot_state.fw_metadata.output_info
    return frozenset(info.base_idx for info in infos if info.output_type in kinds)


def _pass_undefined_gradients(outputs: list[Any], aot_id: int) -> None:
    """Keep autograd from making zeros for the gradient of an output that nothing was derived from.

    Torch's function does not say so in its forward; but its context is the ``grad_fn`` of its outputs, or of their bases.
    """
    seen = set()
    pending = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(getattr(node, "_forward_cls", None), "_aot_id", None) == aot_id:
            node.set_materialize_grads(False)  # type: ignore[attr-defined]
            node._forward_cls._double_backward = staticmethod(_refuse_double_backward)  # type: ignore[attr-defined]
        elif len(seen) < _MAX_VIEWS * (len(outputs) + 1):  # views of what the function returned
            pending += [parent for parent, _ in node.next_functions if parent is not None]


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients that are part of autograd's graph, to which they may not lead back."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *led_to: torch.Tensor) -> Any:
        with gradients_in_graph():
            return run()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UsageError(
            "a planned step is differentiated twice",
            why="its gradients were computed by a planned backward, of which there is no derivative",
            try_="module.original for terms that need second derivatives (gradient penalties)",
        )


def _refuse_double_backward(_ctx: Any, run: Callable[[], Any], _args: list[Any]) -> Any:
    """Stands in for torch's function of this name, which raises of torch.compile instead.

    The result leads to all leaves, so that a backward for some of them alone comes through here too, and is refused.
    """
    leaves = [node.variable for node, _ in _ctx.next_functions if hasattr(node, "variable")]
    others = [arg for arg in _args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    anchor = torch.empty(0, requires_grad=True)
    return _OnceDifferentiable.apply(run, anchor, *leaves, *others)  # type: ignore[no-untyped-call]


def _fresh(export: JointExport) -> JointExport:
    """Return ``export`` with metadata of its own: compiling strips it, and one capture is compiled once per plan."""
    state = export._aot_state
    metadata = dataclasses.replace(state.fw_metadata, bw_donated_idxs=[])
    return dataclasses.replace(export, _aot_state=dataclasses.replace(state, fw_metadata=metadata))
