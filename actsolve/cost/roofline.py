"""Costs of a graph on a device that is not here: a roofline from the device's profile.

An op takes the longer of its FLOPs at the achieved rate and its bytes at the achieved memory bandwidth, plus a launch. Not
modelled: caches, kernels too small to fill the device, and in-op workspace, which is taken as 0 and said so in
`Costs.source`: a real step peaks higher where convolutions or attention backward set the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from actsolve.cost.hardware import HardwareProfile, Rate
from actsolve.graph import RNG_STATE_TARGET, Graph, Op, Value
from actsolve.problem import Costs

LAUNCH_S = 3e-6
"""Seconds of launching one kernel: a few us on every CUDA device; the prototype's figure (DESIGN.md, section 4)."""

RNG_RESTORE_S = 12e-6
"""Seconds that a replay of a random op takes besides the op: save the state in the forward, for only then is it saved at all; and
there save the state of then, set the saved one, and set the first back. A state is a seed and an offset on CUDA, 5 KB on CPU."""

MEMORY_BOUND_FLOPS_PER_BYTE = 4
"""At or below this an op is bound by memory on every listed device: the A100 does 8.5 fp32 FLOPs a byte, all others more."""

_GATHERS = frozenset(
    {
        "aten.embedding",
        "aten.gather",
        "aten.index",
        "aten.index_select",
        "aten.nll_loss2d_forward",
        "aten.nll_loss_forward",
        "aten.select_copy",
        "aten.slice_copy",
        "aten.take",
    }
)
_WRITES_NOTHING = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.empty_permuted",
        "aten.empty_strided",
        "aten.new_empty",
        "aten.new_empty_strided",
    }
)
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def roofline_costs(graph: Graph, profile: HardwareProfile, *, dtype_of: Callable[[Op], str | None] | None = None) -> Costs:
    """Return what each op costs by the roofline of ``profile``.

    Args:
        graph: The training step, with FLOPs per op.
        profile: The device. Its tensor-core rate is used for bf16 and fp16, its fp32 rate for fp32.
        dtype_of: The dtype in which an op computes, such as ``bfloat16``; None if it computes on no
            floats. Left out: that of the largest floating-point value that it reads, or else writes.

    Returns:
        Costs whose `unknown` lists ops of unknown FLOPs: they are costed by their bytes alone.

    Raises:
        UsageError: an op is bound by compute in a dtype for which the profile has no rate.
    """
    memory = profile.memory_rate()
    rates: dict[str, Rate] = {}
    seconds = [_op_seconds(graph, op, profile, memory, rates, dtype_of) for op in graph.ops]
    return Costs(
        seconds=tuple(seconds),
        replay_seconds=tuple(s + RNG_RESTORE_S if op.random else s for op, s in zip(graph.ops, seconds, strict=True)),
        workspace_bytes=(0,) * len(graph.ops),
        source=f"roofline of {profile.name} ({_sources(memory, rates)})",
        unknown=tuple(op.name for op in graph.ops if op.flops is None),
    )


def _op_seconds(
    graph: Graph,
    op: Op,
    profile: HardwareProfile,
    memory: Rate,
    rates: dict[str, Rate],
    dtype_of: Callable[[Op], str | None] | None,
) -> float:
    """Return the seconds of one run, adding to ``rates`` the FLOP rate that was looked up, by dtype."""
    if op.target == RNG_STATE_TARGET:
        return 0.0  # it is the replay's to pay
    size_bytes = moved_bytes(graph, op)
    memory_s = size_bytes / memory.per_s
    if not op.flops or op.flops <= MEMORY_BOUND_FLOPS_PER_BYTE * size_bytes:
        return memory_s + LAUNCH_S
    dtype = dtype_of(op) if dtype_of else compute_dtype(graph, op)
    if dtype is None:  # integers, which no profile has a rate for
        return memory_s + LAUNCH_S
    if dtype not in rates:
        rates[dtype] = profile.flop_rate(dtype)
    return max(memory_s, op.flops / rates[dtype].per_s) + LAUNCH_S


def moved_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes that one run reads and writes: each input and each output once.

    A view counts its whole storage, so an op that reads a third of a fused projection is charged for all
    of it. An op that picks rows (embedding, gather) is charged for what it picks, not for the table.
    """
    if _packet(op) in _WRITES_NOTHING:
        return 0
    written = sum(graph.values[v].size_bytes for v in op.outputs)
    most_read: float = written if _packet(op) in _GATHERS else inf
    read = 0
    for value in (graph.values[v] for v in op.inputs):
        is_index = value.dtype.startswith(("int", "uint"))
        read += value.size_bytes if is_index else int(min(value.size_bytes, most_read))
    return written + read


def compute_dtype(graph: Graph, op: Op) -> str | None:
    """Return the dtype of the largest floating-point value that ``op`` reads, or else writes; None if there is none.

    The largest, because attention in bf16 reads a small fp32 log-sum-exp in its backward.
    """
    for values in (op.inputs, op.outputs):
        floats: list[Value] = [graph.values[v] for v in values if graph.values[v].dtype in _FLOATS]
        if floats:
            return max(floats, key=lambda value: value.size_bytes).dtype
    return None


def _packet(op: Op) -> str:
    """``aten.mm`` of ``aten.mm.default``."""
    return ".".join(op.target.split(".")[:2])


def _sources(memory: Rate, rates: dict[str, Rate]) -> str:
    used = dict.fromkeys([memory.source, *(rate.source for rate in rates.values())])
    return "; ".join([*used, f"{LAUNCH_S * 1e6:g} us a launch", "workspace unknown, taken as 0"])
