"""All that is private in torch, in one place.

Everything else imports these few names, so that a new torch release needs only this file and its tests looked at.
Written against torch 2.11 to 2.13 (`torch._functorch.aot_autograd`, the joint-graph export with descriptors).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils
import torch._functorch.config
import torch.fx.experimental.proxy_tensor
import torch.fx.traceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from actsolve.capture.answers import Answers, asks, is_through_masks, may_ask
from actsolve.capture.torch_engine import gradients_in_graph
from actsolve.errors import UsageError

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "InputRole",
    "JointExport",
    "annotation",
    "annotate",
    "bound_kernel",
    "compile_joint",
    "export_joint",
    "fake_building",
    "being_traced",
    "in_function_transform",
    "input_role",
    "leaked_tensors",
    "output_index",
    "partitioner_saves",
    "preserved_annotations",
    "storage_key",
    "reentrant_checkpoints_run_once",
    "within_unpreserved_checkpoints",
]

BoxedFunction = Callable[[list[Any]], Any]
Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], BoxedFunction]
JointExport = Any  # torch's JointWithDescriptors
Correct = Callable[[Any, Any, Any, Any], Any]
_ANNOTATION = "actsolve"

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)
"""What a trace raises where Python, or the shape of a result, depends on what tensors hold."""


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


@contextlib.contextmanager
def within_unpreserved_checkpoints(
    context: Callable[[], contextlib.AbstractContextManager[Any]], once: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Enter ``context`` around each `torch.utils.checkpoint` that does not keep the random state for its second run."""
    original = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def generator(fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        inner = original(fn, preserve_rng_state, *args, **kwargs)
        next(inner)
        with contextlib.nullcontext() if preserve_rng_state else context(), once():
            try:
                yield
            except BaseException as error:
                inner.throw(error)
        next(inner, None)

    with mock.patch.object(torch.utils.checkpoint, original.__name__, generator):
        yield


@contextlib.contextmanager
def reentrant_checkpoints_run_once(
    context: Callable[[], contextlib.AbstractContextManager[Any]], once: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Call what a `torch.utils.checkpoint` with ``use_reentrant=True`` would run without gradients, and in the backward again.

    A backward within the backward cannot be traced. As in eager nothing gets a gradient where no argument requires one;
    ``context`` is entered around those that do not keep the random state for their second run.
    """

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        trained = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(trained), contextlib.nullcontext() if preserve_rng_state else context(), once():
            return function(*args)

    with mock.patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", apply):
        yield


def leaked_tensors() -> list[torch.Tensor]:
    """Return the tensors of a trace that has ended which are still referred to: they escaped into Python objects.

    Looks at all that the garbage collector tracks, which takes about a tenth of a second. Those that it has returned before
    are not returned again.
    """

    def alive() -> list[torch.Tensor]:
        known = {id(t) for ref in _KNOWN_LEAKS if (t := ref()) is not None}
        return [t for t in gc.get_objects() if type(t) is FunctionalTensor and id(t) not in known]

    if not alive():
        return []
    gc.collect()
    leaked = alive()
    _KNOWN_LEAKS.extend(map(weakref.ref, leaked))
    return leaked


def is_of_trace(value: Any) -> bool:
    """Whether ``value`` is a tensor as a trace has them."""
    return isinstance(value, (FunctionalTensor, FakeTensor))


_KNOWN_LEAKS: list[weakref.ref[torch.Tensor]] = []


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


_MAX_VIEWS = 8


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


@contextlib.contextmanager
def fake_building() -> Iterator[None]:
    """Build modules and inputs of fake CPU tensors: shapes and dtypes without memory.

    ``module.to(...)`` and its kin, which swap the contents of tensors, refuse fake ones; here they set new parameters. A
    parameter that modules share stays shared.
    """
    made: dict[tuple[int, int], tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def converted(fn: Callable[[torch.Tensor], torch.Tensor], old: torch.Tensor) -> torch.Tensor:
        if (id(fn), id(old)) not in made:
            with torch.no_grad():
                new = fn(old)
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(fn), id(old)] = (fn, old, new)  # the first two are held, so that their ids stay theirs
        return made[id(fn), id(old)][2]

    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for tensors in (self._parameters, self._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = converted(fn, old)  # type: ignore[assignment]
        return self

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), mock.patch.object(torch.nn.Module, "_apply", apply):
        yield


@dataclass(frozen=True)
class InputRole:
    """What an input of a joint graph stands for.

    Attributes:
        is_tangent: Whether it is the gradient of an output.
        index: Position among the flat inputs of the traced module; of a tangent, position of its
            output among the flat outputs. -1 where there is none.
        output: Torch's descriptor of the output that a tangent is the gradient of.
    """

    is_tangent: bool = False
    index: int = -1
    output: Any = None


def input_role(placeholder: torch.fx.Node) -> InputRole:
    """Return what ``placeholder`` stands for; kinds that we do not know are refused, never guessed."""
    desc = placeholder.meta.get("desc")
    if isinstance(desc, descriptors.TangentAOTInput):
        output: Any = desc.output
        while isinstance(output, descriptors.IntermediateBaseAOTOutput):
            output = output.base_of
        index = output.idx if isinstance(output, descriptors.PlainAOTOutput) else -1
        return InputRole(is_tangent=True, index=index, output=desc.output)
    if isinstance(desc, descriptors.PlainAOTInput):
        return InputRole(index=desc.idx)
    raise NotImplementedError(f"joint-graph input {placeholder.name} of kind {type(desc).__name__}")


def mutated_input(output_desc: Any) -> Any | None:
    """Return the descriptor of the input that a joint-graph output is copied into, or None."""
    if isinstance(output_desc, descriptors.InputMutationAOTOutput):
        return output_desc.mutated_input
    return None


def output_descriptors(joint: torch.fx.GraphModule) -> list[Any]:
    """Return torch's descriptor of each output of a joint graph, in order."""
    (output,) = joint.graph.find_nodes(op="output")
    return list(output.meta["desc"])


def output_index(output_desc: Any) -> int | None:
    """Return the position among the flat outputs of the traced module, or None where it is none of these."""
    return int(output_desc.idx) if isinstance(output_desc, descriptors.PlainAOTOutput) else None


def n_forward_outputs(joint: torch.fx.GraphModule) -> int:
    """Return how many outputs of a joint graph the forward returns: all but one for each of its inputs, the gradients."""
    descs = output_descriptors(joint)
    n_primals = sum(n.op == "placeholder" and not input_role(n).is_tangent for n in joint.graph.nodes)
    n_forward: int = len(descs) - n_primals
    if any(desc.is_grad() for desc in descs[:n_forward]):
        raise NotImplementedError("a joint graph whose gradients do not follow its outputs")
    return n_forward


def n_mutations(tensor: torch.Tensor) -> int:
    """Return how often the content of ``tensor`` was changed, also where it is one of a trace."""
    if isinstance(tensor, FunctionalTensor):
        return int(torch._functionalize_mutation_counter(tensor.elem))
    return int(tensor._version)


class NotGiven(torch.Tensor):
    """Looks like a tensor, and holds nothing: whatever is computed with it raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, refusal: Callable[[tuple[int, ...]], Exception]) -> NotGiven:
        made: NotGiven = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.requires_grad,
        )
        return made

    def __init__(self, like: torch.Tensor, refusal: Callable[[tuple[int, ...]], Exception]) -> None:
        self._refusal = refusal
        if isinstance(like, torch.nn.Parameter):
            self._is_param = True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NotGiven({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        used = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, cls))
        raise used._refusal(tuple(used.shape))


real_tensors = _disable_current_modes
"""Context in which tensors are real, also while something is traced or inside a ``FakeTensorMode``."""


@contextlib.contextmanager
def preserved_annotations() -> Any:
    """Let nodes made while tracing carry what `annotate` says."""
    with torch.fx.traceback.preserve_node_meta():
        yield


def annotate(value: Any) -> None:
    """Attach ``value`` to every node traced from here on, and to the backward nodes of those."""
    meta = torch.fx.traceback.get_current_meta()
    meta["custom"] = {**meta.get("custom", {}), _ANNOTATION: value}


def annotation(node: torch.fx.Node) -> Any | None:
    """Return what `annotate` attached to ``node``, or None."""
    return (node.meta.get("custom") or {}).get(_ANNOTATION)


def partitioner_saves(joint: torch.fx.GraphModule, n_forward_outputs: int, memory_budget: float) -> list[str]:
    """Return the names of the nodes that torch's min-cut partitioner saves for the backward; ``joint`` stays as it is.

    Args:
        joint: A joint forward and backward graph.
        n_forward_outputs: How many of its outputs are the forward's.
        memory_budget: Torch's ``activation_memory_budget``: 1 saves what is fastest, 0 only the inputs.
    """
    with torch._functorch.config.patch(activation_memory_budget=memory_budget), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copied = torch.fx.GraphModule(joint, copy.deepcopy(joint.graph))
        forward, _ = min_cut_rematerialization_partition(copied, (), num_fwd_outputs=n_forward_outputs)
    (output,) = forward.graph.find_nodes(op="output")
    return [node.name for node in output.args[0][n_forward_outputs:] if isinstance(node, torch.fx.Node)]


def being_traced() -> bool:
    """Whether a trace goes on in this thread: one of ours, or of torch's."""
    return TracingContext.try_get() is not None


@contextlib.contextmanager
def as_if_traced() -> Iterator[None]:
    """Let `being_traced` be true of a run for real that a trace needs."""
    with tracing(TracingContext(None)):
        yield


def in_recomputation() -> bool:
    """Whether a `torch.utils.checkpoint` without ``use_reentrant`` runs its function again now, which it ends early."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def in_function_transform() -> bool:
    """Whether ``torch.func.grad``, ``vmap`` or the like run now: they wrap tensors, which a planned step cannot take."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share a storage, while both are alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def bound_kernel(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return what an ATen overload calls: one Python frame less."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target
