"""All that is private in torch's Inductor, in one place; the rest of torch's is in `capture.torch_internals`.

Written against torch 2.13. `compile_fx` traces with AOTAutograd, decomposes, runs Inductor's joint passes and hands the joint
graph to a partitioner, which returns the forward and the backward graph; each is then compiled.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch.partitioners import has_recomputable_ops, min_cut_rematerialization_partition
from torch._guards import CompileContext, tracing
from torch._inductor import lowering
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.graph import GraphLowering
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes

from actsolve.errors import ActsolveError

Modules = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[[fx.GraphModule, Callable[[], Modules], int], Modules]
"""Called with the joint graph, Inductor's own partition of it as a function, and how many outputs are the forward's."""

_PLANNED = "actsolve_planned"
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "lift_fresh"})  # the others say so themselves
_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin", "max", "min"}
)


class Partitioner(CustomPartitionerFn):
    """Inductor's hook, with what a compiled step is looked up by in torch's caches.

    Args:
        partition: What splits the joint graph.
        key: Equal only where ``partition`` does the same; None keeps the step out of the caches.
    """

    def __init__(self, partition: Partition, key: str | None) -> None:
        self._partition, self._key = partition, key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Modules:
        return self._partition(
            gm, lambda: min_cut_rematerialization_partition(gm, joint_inputs, **kwargs), kwargs["num_fwd_outputs"]
        )

    def uuid(self) -> str | None:
        return self._key

    def __reduce__(self) -> tuple[Any, ...]:
        """Torch's caches pickle it, to tell it from others."""
        return str, (self._key,)


class _KeepOrder(CustomGraphPass):
    """Has the kernels that a planned backward calls run in the order of its graph.

    Inductor fuses generated kernels across any distance, and then sorts all anew. So a replay that nothing ties to the
    backward, but for its reader, would become part of an early one, or an early one of it, and what they read stays. Where the
    calls between them keep their order, that would be a cycle, and Inductor refrains from it.
    """

    def __call__(self, graph: fx.Graph) -> None:
        calls = [node for node in graph.nodes if _is_call(node)]
        if any(node.meta.get(_PLANNED) for node in graph.nodes):
            preserve_node_ordering(graph, {node: OrderedSet([before]) for before, node in itertools.pairwise(calls)})

    def uuid(self) -> str:
        return "actsolve: calls in order"


def mark_planned(node: fx.Node) -> None:
    """Mark ``node`` as one of a planned backward, whose calls keep their order."""
    node.meta[_PLANNED] = True


def _is_call(node: fx.Node) -> bool:
    """Whether Inductor will call a kernel for ``node`` that only computes a result."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return not is_view(node) and not is_fused(node) and not draws_seeds(node)


def compiled(
    module: fx.GraphModule, inputs: Sequence[Any], partitioner: Partitioner | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return what Inductor makes of a graph of torch.compile's, which stays as it is.

    Args:
        module: The graph.
        inputs: Its inputs.
        partitioner: In place of Inductor's own.
        options: Of `torch._inductor.config`.
    """
    patches, settings = dict(options), {"force_non_lazy_backward_lowering": True}
    if partitioner is not None:
        patches["custom_partitioner_fn"] = partitioner
        patches["post_grad_custom_post_pass"] = [*_listed(patches.get("post_grad_custom_post_pass")), _KeepOrder()]
        if partitioner.uuid() is None:
            patches["fx_graph_cache"] = settings["enable_autograd_cache"] = False
    # The backward too is compiled now: torch would leave it to the first one, within which nothing else can be compiled.
    with torch._functorch.config.patch(settings):
        function: Any = compile_fx(copy.deepcopy(module), inputs, config_patches=patches)
    return function  # type: ignore[no-any-return]


def _listed(passes: Any) -> list[Any]:
    return list(passes) if isinstance(passes, (list, tuple)) else [] if passes is None else [passes]


@contextlib.contextmanager
def real_run() -> Iterator[None]:
    """Run compiled code while torch.compile is still at work: on real tensors, and unseen by what it traces."""
    with _disable_current_modes(), tracing(None):
        yield


def frame_id() -> object:
    """Return what tells the piece of Python code that torch.compile works on from others; equal when it is compiled again."""
    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def passing_through(error: ActsolveError) -> ActsolveError:
    """Return ``error`` as one that torch.compile lets through to its caller; others it wraps as BackendCompilerFailed."""
    kind: Any = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    through: ActsolveError = kind.__new__(kind)
    through.__dict__.update(error.__dict__, first_useful_frame=None, msg=str(error))
    through.args = error.args
    return through


def has_checkpoints(joint: fx.GraphModule) -> bool:
    """Whether the model has calls of ``torch.utils.checkpoint``."""
    return bool(has_recomputable_ops(joint))


def saved_desc(index: int, node: fx.Node) -> Any:
    """Return torch's descriptor of the ``index``-th value that a forward saves."""
    if has_no_version_check(node):
        return descriptors.SavedForBackwardsNoVcCheckAOTOutput(index)
    return descriptors.SavedForBackwardsAOTOutput(index)


def has_no_version_check(node: fx.Node) -> bool:
    """Whether torch saves this value without a check that it stays as it is; such values come last."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


# -- how Inductor will lower a node -------------------------------------------------------------------------------------


def computes_with_channels_last(forward: fx.GraphModule) -> bool:
    """Whether Inductor lays out what convolutions read with channels last."""
    return bool(GraphLowering.decide_layout_opt(forward, is_inference=False))


def is_view(node: fx.Node) -> bool:
    """Whether Inductor makes no buffer for ``node``: it shows the one of its first argument in another way."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or _packet(target) in _VIEWS)


def is_fused(node: fx.Node) -> bool:
    """Whether Inductor generates the code of ``node``, so that it can share a kernel with others; else it calls one."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target in lowering.fallbacks
        or target.overloadpacket in lowering.fallbacks
    ):
        return False
    return (target in lowering.lowerings or target.overloadpacket in lowering.lowerings) and not _is_template(target)


def _is_template(target: torch._ops.OpOverload) -> bool:
    """Matrix products, convolutions and attention: those that torch counts the FLOPs of."""
    from torch.utils.flop_counter import flop_registry

    return target.overloadpacket in flop_registry or target in flop_registry


def is_reduction(node: fx.Node) -> bool:
    """Whether ``node`` sums up or the like, so that the order of its terms shows in its bits."""
    target = node.target
    tag = getattr(torch.Tag, "reduction", None)
    return isinstance(target, torch._ops.OpOverload) and (tag in target.tags or _packet(target) in _REDUCTIONS)


def draws_seeds(node: fx.Node) -> bool:
    """Whether ``node`` draws from a random generator: Inductor makes seeds so, and all other random numbers from them."""
    return isinstance(node.target, torch._ops.OpOverload) and _packet(node.target) in ("inductor_seed", "inductor_seeds")


def is_random_number(node: fx.Node) -> bool:
    """Whether ``node`` makes random numbers from a seed: it may run again, and costs more than its bytes."""
    return isinstance(node.target, torch._ops.OpOverload) and _packet(node.target) in ("inductor_random", "inductor_randint")


def _packet(target: torch._ops.OpOverload) -> str:
    return str(target.overloadpacket.__name__)
