"""FLOPs of single calls against hand formulas, and of whole models against published counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import models_zoo
from actsolve.capture.flops import node_flops, overload_flops

aten = torch.ops.aten
B, C, D, H, T = 2, 6, 16, 4, 32


@dataclass(frozen=True)
class Index:
    """Stands for an int64 tensor."""

    shape: tuple[int, ...]


def flops(target: Any, *args: Any, **kwargs: Any) -> int | None:
    """FLOPs of one ATen call on fake tensors: a tuple of ints stands for a float tensor of that shape."""

    def made(arg: Any) -> Any:
        if isinstance(arg, Index):
            return torch.empty(arg.shape, dtype=torch.long)
        if isinstance(arg, list):
            return [made(a) for a in arg]
        return torch.empty(arg) if isinstance(arg, tuple) else arg

    with FakeTensorMode():
        made_args = [made(arg) for arg in args]
        return overload_flops(target, made_args, kwargs, target(*made_args, **kwargs))


# -- products ----------------------------------------------------------------------------------------------------------


def test_matrix_products() -> None:
    m, n, k = 3, 5, 7
    assert flops(aten.mm.default, (m, k), (k, n)) == 2 * m * n * k
    assert flops(aten.addmm.default, (n,), (m, k), (k, n)) == 2 * m * n * k
    assert flops(aten.bmm.default, (B, m, k), (B, k, n)) == 2 * B * m * n * k
    assert flops(aten.baddbmm.default, (B, m, n), (B, m, k), (B, k, n)) == 2 * B * m * n * k
    assert flops(aten.addbmm.default, (m, n), (B, m, k), (B, k, n)) == 2 * B * m * n * k


def test_vector_products() -> None:
    assert flops(aten.mv.default, (3, 7), (7,)) == 2 * 3 * 7
    assert flops(aten.addmv.default, (3,), (3, 7), (7,)) == 2 * 3 * 7
    assert flops(aten.dot.default, (7,), (7,)) == 2 * 7
    assert flops(aten.addr.default, (3, 7), (3,), (7,)) == 2 * 3 * 7


# -- convolutions ------------------------------------------------------------------------------------------------------


def conv(groups: int = 1, transposed: bool = False) -> tuple[Any, ...]:
    weight = (C, C // groups, 3, 3)
    return (B, C, 10, 12), weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups


@pytest.mark.parametrize("groups", [1, 2, C])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_honours_groups(groups: int, transposed: bool) -> None:
    by_hand = 2 * (B * 10 * 12) * C * (C // groups) * 9
    assert flops(aten.convolution.default, *conv(groups, transposed)) == by_hand


@pytest.mark.parametrize("groups", [1, 2, C])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, False]])
def test_convolution_backward_honours_mask_and_groups(groups: int, mask: list[bool]) -> None:
    source, weight, *rest = conv(groups)
    forward = 2 * (B * 10 * 12) * C * (C // groups) * 9
    bias = B * C * 10 * 12
    by_hand = forward * (mask[0] + mask[1]) + bias * mask[2]
    assert flops(aten.convolution_backward.default, (B, C, 10, 12), source, weight, [C], *rest[1:], mask) == by_hand


def test_strided_convolution_counts_output_positions() -> None:
    how = [2, 2], [2, 2], [1, 1], False, [0, 0], 1
    assert flops(aten.convolution.default, (B, 3, 32, 32), (8, 3, 5, 5), None, *how) == 2 * B * 16 * 16 * 8 * 3 * 25


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_cpu_attention_counts_all_scores_causal_or_not(causal: bool) -> None:
    qkv = [(B, H, T, D)] * 3
    forward = 2 * 2 * B * H * T * T * D  # scores, and scores times values
    assert flops(aten._scaled_dot_product_flash_attention_for_cpu.default, *qkv, 0.0, causal) == forward


def test_cpu_attention_backward_is_five_products() -> None:
    shape, rows = (B, H, T, D), (B, H, T)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(backward, shape, shape, shape, shape, shape, rows, 0.0, True) == 5 * 2 * B * H * T * T * D


def test_cross_attention_with_fewer_key_heads() -> None:
    query, key = (B, H, T, D), (B, H, 3 * T, D)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops(attention, query, key, key) == 2 * 2 * B * H * T * (3 * T) * D


# -- memory-bound ops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "each"),
    [
        (lambda x: torch.relu(x), 1),
        (lambda x: x + 1, 1),
        (lambda x: F.gelu(x), 1),
        (lambda x: x.sum(), 1),
        (lambda x: x.sum(0), 1),
        (lambda x: x.amax(1), 1),
        (lambda x: x.var(1), 4),
        (lambda x: torch.softmax(x, 1), 5),
        (lambda x: torch.log_softmax(x, 1), 5),
        (lambda x: F.layer_norm(x, (8,)), 8),
        (lambda x: torch.ops.aten.native_dropout(x, 0.1, True)[0], 2),
        (lambda x: x.cumsum(0), 1),
        (lambda x: x.clone(), 0),
        (lambda x: torch.cat([x, x]), 0),
        (lambda x: x.to(torch.bfloat16), 0),
        (lambda x: torch.full_like(x, 3.0), 0),
        (lambda x: F.pad(x, (1, 1)), 0),
        (lambda x: x.sort(dim=1)[0], 3),  # 8 elements a row, log2 8
    ],
)
def test_small_constants_by_element(call: Callable[[torch.Tensor], torch.Tensor], each: int) -> None:
    x = torch.empty(8, 8)
    graph = make_fx(call, tracing_mode="fake")(x).graph
    counted = [node_flops(node) for node in graph.nodes if node.op == "call_function"]
    assert None not in counted
    assert sum(c for c in counted if c is not None) == each * x.numel()


def test_pools_count_their_windows() -> None:
    image = (B, C, 8, 8)
    assert flops(aten.max_pool2d_with_indices.default, image, [2, 2], [2, 2]) == B * C * 4 * 4 * 4
    assert flops(aten.avg_pool2d.default, image, [2], [2]) == B * C * 4 * 4 * 4
    assert flops(aten._adaptive_avg_pool2d.default, image, [1, 1]) == B * C * 8 * 8


def test_embedding_losses_and_scatters() -> None:
    assert flops(aten.embedding.default, (100, D), Index((7,))) == 0
    assert flops(aten.embedding_dense_backward.default, (7, D), Index((7,)), 100, -1, False) == 7 * D
    assert flops(aten.nll_loss_forward.default, (7, 10), Index((7,)), None, 1, -100) == 7
    assert flops(aten.index_put.default, (10, D), [Index((7,))], (7, D), True) == 7 * D
    assert flops(aten.index_put.default, (10, D), [Index((7,))], (7, D)) == 0
    assert flops(aten.scatter_add.default, (10, D), 0, Index((7, D)), (7, D)) == 7 * D


def test_lookups_with_sums() -> None:
    bag = flops(aten._embedding_bag.default, (100, D), Index((12,)), Index((3,)))
    assert bag == 12 * D
    assert flops(aten.embedding_renorm.default, (100, D), Index((7,)), 1.0, 2.0) == 3 * 7 * D


def test_recurrent_layer_is_its_products() -> None:
    steps, width = 9, 8
    lstm = torch.nn.LSTM(D, width)
    graph = make_fx(lambda x: lstm(x)[0])(torch.randn(steps, B, D)).graph
    counted = [
        node_flops(n) or 0 for n in graph.nodes if n.op == "call_function" and ("mm" in str(n.target) or "rnn" in str(n.target))
    ]
    assert sum(counted) == 2 * steps * B * 4 * width * (D + width)


def test_fourier_transform() -> None:
    n = 64
    with FakeTensorMode():
        x = torch.empty(B, n, dtype=torch.complex64)
        assert overload_flops(aten._fft_c2c.default, [x, [1], 0, True], {}, x) == 5 * B * n * 6


def test_arguments_by_keyword() -> None:
    assert flops(aten.index_put.default, (10, D), [Index((7,))], (7, D), accumulate=True) == 7 * D


def test_unknown_is_none_not_zero() -> None:
    @torch.library.custom_op("actsolve_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    mystery.register_fake(lambda x: torch.empty_like(x))
    assert flops(torch.ops.actsolve_test.mystery.default, (3, 3)) is None
    assert flops(aten.linalg_qr.default, (8, 8)) is None


# -- whole models, against published counts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "giga_multiply_adds", "within"),
    [
        ("resnet18", 1.814, 0.01),  # torchvision's weights page, GFLOPS (it counts multiply-adds), 224 x 224
        ("resnet50", 4.089, 0.01),
        ("vgg16", 15.470, 0.01),
        ("mobilenet_v2", 0.301, 0.01),
    ],
)
def test_vision_models_match_published_counts(name: str, giga_multiply_adds: float, within: float) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = models_zoo.get(name)(batch=1)
        graph = make_fx(step.model.eval())(step.args[0]).graph
    total = sum(node_flops(n) or 0 for n in graph.nodes if n.op == "call_function" and is_product(n))
    assert total / 2e9 == pytest.approx(giga_multiply_adds, rel=within)


def is_product(node: torch.fx.Node) -> bool:
    return any(word in str(node.target) for word in ("convolution", "mm", "attention"))
