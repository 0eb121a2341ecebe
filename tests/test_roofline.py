"""Roofline costs against hand counts."""

from __future__ import annotations

import pytest

from actsolve.cost.hardware import profile, profiles
from actsolve.cost.roofline import (
    LAUNCH_S,
    MEMORY_BOUND_FLOPS_PER_BYTE,
    RNG_RESTORE_S,
    compute_dtype,
    moved_bytes,
    roofline_costs,
)
from actsolve.errors import UsageError
from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op, Phase, Value

A100 = profile("a100")
MEMORY = 2039e9 * 0.9


def one_op(
    target: str,
    inputs: list[tuple[int, str]],
    outputs: list[tuple[int, str]],
    *,
    flops: int | None = 0,
    random: bool = False,
) -> Graph:
    """A graph of one op whose inputs and outputs have the bytes and dtypes given."""
    values = [Value(f"in{i}", size, Kind.INPUT, dtype=dtype) for i, (size, dtype) in enumerate(inputs)]
    values += [Value(f"out{i}", size, producer=0, dtype=dtype) for i, (size, dtype) in enumerate(outputs)]
    reads, writes = tuple(range(len(inputs))), tuple(range(len(inputs), len(values)))
    op = Op("op", target, Phase.FORWARD, reads, writes, flops=flops, random=random)
    return Graph((op,), tuple(values)).verify()


def seconds(graph: Graph) -> float:
    return roofline_costs(graph, A100).seconds[0]


def test_matmul_is_bound_by_compute_at_the_rate_of_its_dtype() -> None:
    n = 4096
    bf16 = one_op("aten.mm.default", [(2 * n * n, "bfloat16")] * 2, [(2 * n * n, "bfloat16")], flops=2 * n**3)
    fp32 = one_op("aten.mm.default", [(4 * n * n, "float32")] * 2, [(4 * n * n, "float32")], flops=2 * n**3)
    assert seconds(bf16) == pytest.approx(2 * n**3 / 271e12 + LAUNCH_S)
    assert seconds(fp32) == pytest.approx(2 * n**3 / (19.5e12 * 0.8) + LAUNCH_S)


def test_pointwise_is_bound_by_memory() -> None:
    graph = one_op("aten.add.Tensor", [(4000, "float32"), (4000, "float32")], [(4000, "float32")], flops=1000)
    assert seconds(graph) == pytest.approx(12000 / MEMORY + LAUNCH_S)


def test_gather_moves_what_it_picks() -> None:
    table, index, out = 10**9, 8 * 100, 4 * 64 * 100
    graph = one_op("aten.embedding.default", [(table, "float32"), (index, "int64")], [(out, "float32")])
    assert moved_bytes(graph, graph.ops[0]) == 2 * out + index


def test_empty_moves_nothing() -> None:
    graph = one_op("aten.empty.memory_format", [], [(10**9, "float32")])
    assert seconds(graph) == LAUNCH_S


def test_rng_state_and_random_ops() -> None:
    graph = one_op(RNG_STATE_TARGET, [], [(5056, "uint8")])
    assert seconds(graph) == 0.0  # what it takes is the replay's to pay
    graph = one_op("aten.native_dropout.default", [(4000, "float32")], [(4000, "float32")], flops=2000, random=True)
    costs = roofline_costs(graph, A100)
    assert costs.replay_seconds[0] == pytest.approx(costs.seconds[0] + RNG_RESTORE_S)


def test_replay_costs_the_same_where_not_random() -> None:
    costs = roofline_costs(one_op("aten.add.Tensor", [(4000, "float32")], [(4000, "float32")], flops=1000), A100)
    assert costs.replay_seconds == costs.seconds


def test_unknown_flops_are_listed_and_costed_by_bytes() -> None:
    costs = roofline_costs(one_op("mylib.op.default", [(10**6, "float32")], [(10**6, "float32")], flops=None), A100)
    assert costs.unknown == ("op",)
    assert costs.seconds[0] == pytest.approx(2e6 / MEMORY + LAUNCH_S)


def test_source_says_what_was_assumed() -> None:
    n = 4096
    graph = one_op("aten.mm.default", [(2 * n * n, "bfloat16")] * 2, [(2 * n * n, "bfloat16")], flops=2 * n**3)
    assert roofline_costs(graph, A100).source == (
        "roofline of a100-sxm-80gb (memory 2039 GB/s peak x 0.9 assumed achieved; bf16 271 TFLOP/s measured; 3 us a launch; "
        "workspace unknown, taken as 0)"
    )


def test_missing_rate_raises_only_where_it_matters() -> None:
    n = 4096
    t4 = profile("t4")
    pointwise = one_op("aten.add.Tensor", [(2000, "bfloat16")], [(2000, "bfloat16")], flops=1000)
    roofline_costs(pointwise, t4)
    product = one_op("aten.mm.default", [(2 * n * n, "bfloat16")] * 2, [(2 * n * n, "bfloat16")], flops=2 * n**3)
    with pytest.raises(UsageError, match="t4 has no rate for bfloat16"):
        roofline_costs(product, t4)


def test_every_listed_device_is_bound_by_memory_below_the_threshold() -> None:
    for device in profiles().values():
        rates = [device.flop_rate(d) for d in ("fp32", "fp16") if getattr(device, f"{d}_tflops") is not None]
        for rate in rates:
            assert rate.per_s / device.memory_rate().per_s > MEMORY_BOUND_FLOPS_PER_BYTE


def test_compute_dtype_is_that_of_the_largest_float() -> None:
    graph = one_op("aten.attention_backward", [(1000, "bfloat16"), (100, "float32"), (5000, "int64")], [(1000, "bfloat16")])
    assert compute_dtype(graph, graph.ops[0]) == "bfloat16"
    graph = one_op("aten.rand.default", [], [(1000, "float32")])
    assert compute_dtype(graph, graph.ops[0]) == "float32"
    graph = one_op("aten.add.Tensor", [(8, "int64")], [(8, "int64")])
    assert compute_dtype(graph, graph.ops[0]) is None


def test_dtype_can_be_given() -> None:
    n = 4096
    graph = one_op("aten.mm.default", [(2 * n * n, "")] * 2, [(2 * n * n, "")], flops=2 * n**3)
    costs = roofline_costs(graph, A100, dtype_of=lambda op: "float32")
    assert costs.seconds[0] == pytest.approx(2 * n**3 / (19.5e12 * 0.8) + LAUNCH_S)
