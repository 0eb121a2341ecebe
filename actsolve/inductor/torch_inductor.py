"""All that is private in torch's Inductor, in one place; the rest of torch's is in `capture.torch_internals`.

Written against torch 2.13. `compile_fx` traces with AOTAutograd, decomposes, runs Inductor's joint passes and hands the joint
graph to a partitioner, which returns the forward and the backward graph; each is then compiled.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
import sympy
import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch.partitioners import has_recomputable_ops, min_cut_rematerialization_partition
from torch._guards import CompileContext, tracing
from torch._inductor import lowering
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode, MultiOutput
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

from actsolve.errors import ActsolveError

Modules = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[[fx.GraphModule, Callable[[], Modules], int], Modules]
"""Called with the joint graph, Inductor's own partition of it as a function, and how many outputs are the forward's."""

Strides = tuple[tuple[int, ...] | None, ...]
"""Of the tensors that a kernel is called with; None where they are not known."""

_PLANNED = "actsolve_planned"
_AS_GIVEN = "actsolve_as_given"
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "lift_fresh"})  # the others say so themselves
_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin", "max", "min"}
)


class Partitioner(CustomPartitionerFn):
    """Inductor's hook, with what a compiled step is looked up by in torch's caches.

    Args:
        partition: What splits the joint graph.
        key: Equal only where ``partition`` does the same; None keeps the step out of the caches.

    Attributes:
        strides: Per name of a node that Inductor calls a kernel for, those of the tensors that it is given; empty where a step
            comes from the caches.
    """

    def __init__(self, partition: Partition, key: str | None) -> None:
        self._partition, self._key = partition, key
        self.strides: dict[str, Strides] = {}

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Modules:
        return self._partition(
            gm, lambda: min_cut_rematerialization_partition(gm, joint_inputs, **kwargs), kwargs["num_fwd_outputs"]
        )

    def uuid(self) -> str | None:
        return self._key

    def __reduce__(self) -> tuple[Any, ...]:
        """Torch's caches pickle it, to tell it from others."""
        return str, (self._key,)


class _InOrder(CustomSchedulerPass):
    """Has kernels run in the order that is meant, whatever Inductor fuses and moves.

    Of a planned graph: in the order of that graph, each kernel that is called, and around it those generated. Inductor fuses
    generated kernels across any distance, and then sorts all anew. So a replay that nothing ties to the backward, but for its
    reader, would become part of an early one, or an early one of it, and what they read stays. Here each call waits for what is
    generated before it, and what is generated after it waits for the call: what would be fused across a call is not. Done to
    the graph itself, such ties would keep Inductor from seeing what it calls, so that it would store other values, in other
    layouts.

    Of every graph: what reads a buffer that another kernel writes into, after that one. On a CPU torch 2.13 forgets this of a
    kernel whose loops it changes in order to fuse it, but for kernels with such ties (`SchedulerNode.recompute_size_and_body`),
    and so may move it before: VGG's convolutions, behind an adaptive pool, then get gradients of zero.
    """

    def __init__(self, strides: dict[str, Strides]) -> None:
        self._strides = strides

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        makers = {name: node for node in nodes for name in node.get_buffer_names()}
        for node in nodes:
            writers = (makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers)
            _tie(node, [other for other in writers if other is not node and other.has_aliasing_or_mutation()])
        graph: Any = V.graph.module.graph
        places = {node: place for place, node in enumerate(graph.nodes)}
        for node in filter(_is_call, nodes):
            if origins := _origins(node, places):
                self._strides[max(origins, key=places.__getitem__).name] = tuple(map(_strides_of, node.node.inputs))  # type: ignore[union-attr]
        if _is_planned(graph):
            nodes = _in_order(nodes, [_place(node, places) for node in nodes])
            _tie_to_calls(nodes)
        V.graph.scheduler.nodes = nodes
        V.graph.scheduler.compute_ancestors()
        return nodes

    def uuid(self) -> str:
        return "actsolve: kernels in order"


class InLayoutsOfInductor(CustomGraphPass):
    """Has a planned backward laid out as Inductor lays out its own: a graph in which there are no convolutions.

    Those that are replayed would else have it lay out all there is with channels last, unless its options ask for that anyway,
    and other layouts round otherwise. They come out as they did in the forward all the same, from what they read. And has a
    planned forward save inputs as they are, as it returns what its caller sees.

    Args:
        key: Equal only where the same plan is compiled.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, graph: fx.Graph) -> None:
        meta = graph.output_node().meta
        if as_given := meta.get(_AS_GIVEN):
            meta["user_visible_output_idxs"] = [*meta.get("user_visible_output_idxs", ()), *as_given]
        if _is_planned(graph):
            config = torch._inductor.config
            config.layout_optimization &= config.force_layout_optimization  # `compiled` puts it back

    def uuid(self) -> str:
        return f"actsolve: layouts of Inductor's backward {self._key}"


def _is_call(node: BaseSchedulerNode) -> bool:
    return isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def _strides_of(buffer: Any) -> tuple[int, ...] | None:
    """Return the strides of what a kernel is given; None of what is no tensor, or of no fixed layout."""
    strides = buffer.maybe_get_stride() if isinstance(buffer, IRNode) else None
    return None if strides is None or not all(isinstance(s, (int, sympy.Integer)) for s in strides) else tuple(map(int, strides))


def _tie_to_calls(nodes: list[BaseSchedulerNode]) -> None:
    call: BaseSchedulerNode | None = None
    since: list[BaseSchedulerNode] = []
    for node in nodes:
        if _is_call(node):
            _tie(node, [*since, *([] if call is None else [call])])
            call, since = node, []
        elif isinstance(node, SchedulerNode):
            _tie(node, [] if call is None else [call])
            since.append(node)


def _place(node: BaseSchedulerNode, places: Mapping[fx.Node, int]) -> int:
    """Return where in its graph a kernel belongs: a generated one at the last op that it computes, be it for a later call.

    What only lays an input out for a call belongs to the call.
    """
    origins = _origins(node, places)
    computed = [o for o in origins if is_fused(o) and not is_view(o)] if isinstance(node, SchedulerNode) else []
    return max((places[origin] for origin in computed or origins), default=-1)


def _origins(node: BaseSchedulerNode, places: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the nodes of its graph that a kernel is made for."""
    return [origin for origin in (node.node.get_origins() if node.node is not None else ()) if origin in places]


def _in_order(nodes: list[BaseSchedulerNode], places: list[int]) -> list[BaseSchedulerNode]:
    """Return ``nodes`` by their places, but none before what it waits for."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for i, node in enumerate(nodes):
        graph.add_edges_from((makers[dep.name], i) for dep in node.unmet_dependencies if makers.get(dep.name, i) != i)
    return [nodes[i] for i in nx.lexicographical_topological_sort(graph, key=lambda i: (places[i], i))]


def _tie(node: BaseSchedulerNode, before: list[BaseSchedulerNode]) -> None:
    """Have ``node`` wait for what is ``before`` it, whose memory does not wait for it."""
    for other in before:
        for name in other.get_buffer_names():
            node.add_fake_dep(WeakDep(name, node.get_first_name(), is_fake=True))


def mark_as_given(output: fx.Node, indices: list[int]) -> None:
    """Mark which results of a planned forward are inputs that are to be saved as they are."""
    output.meta[_AS_GIVEN] = indices


def _is_planned(graph: fx.Graph) -> bool:
    """Whether ``graph`` is a planned backward."""
    return any(node.meta.get(_PLANNED) for node in graph.nodes)


def mark_planned(node: fx.Node) -> None:
    """Mark ``node`` as one of a planned backward, whose calls keep their order."""
    node.meta[_PLANNED] = True


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
    key = "" if partitioner is None else partitioner.uuid() or ""
    patches["_pre_fusion_custom_pass"] = _InOrder({} if partitioner is None else partitioner.strides)
    patches["post_grad_custom_post_pass"] = [*_listed(patches.get("post_grad_custom_post_pass")), InLayoutsOfInductor(key)]
    patches.setdefault("layout_optimization", torch._inductor.config.layout_optimization)
    if partitioner is not None:
        patches["custom_partitioner_fn"] = partitioner
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
