"""What is private in torch, behind names of ours; besides, `torch_aot`, `torch_engine` and `inductor.torch_inductor`.

All else imports these few names, so that a new torch release needs only these files and their tests looked at.
Written against torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch.fx.traceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

_ANNOTATION = "actsolve"

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)
"""What a trace raises where Python, or the shape of a result, depends on what tensors hold."""


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
