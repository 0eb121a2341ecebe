"""Kernels of our own against ATen's, to the bit, and the code that calls them."""

from __future__ import annotations

import operator
import traceback
from typing import Any

import pytest
import torch
from torch import fx

from actsolve.runtime.boxed import boxed_function, shorten_views
from actsolve.runtime.exactness import bitwise_equal
from actsolve.runtime.kernels import dropout, dropout_backward, kernel_of
from actsolve.runtime.rng import replay_random, rng_state

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.15, 1.0])
@pytest.mark.parametrize("train", [True, False])
def test_dropout_is_that_of_aten_to_the_bit(dtype: torch.dtype, p: float, train: bool) -> None:
    values = torch.randn(8, 6, 4, 4, dtype=dtype)
    values[0, 0, 0] = torch.tensor([float("inf"), float("nan"), -0.0, float("-inf")])
    for x in (
        values,
        values.transpose(0, 1),
        values.to(memory_format=torch.channels_last),
        values[::2],
        values[:1].expand(4, -1, -1, -1),
    ):
        _assert_same_dropout(x, p, train)


def _assert_same_dropout(x: torch.Tensor, p: float, train: bool) -> None:
    torch.manual_seed(3)
    expected, mask = aten.native_dropout.default(x, p, train)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    found, found_mask = dropout(x, p, train)
    assert bitwise_equal(found, expected) and bitwise_equal(found_mask, mask)
    assert found.stride() == expected.stride() and found_mask.stride() == mask.stride()
    assert torch.equal(torch.get_rng_state(), state)
    scale = 1 / (1 - p) if p < 1 else 0.0
    for gradient in (x, torch.randn_like(mask, dtype=x.dtype)):
        expected = aten.native_dropout_backward.default(gradient, mask, scale)
        found = dropout_backward(gradient, mask, scale)
        assert bitwise_equal(found, expected) and found.stride() == expected.stride()


def test_kernels_of_our_own_are_for_float32_and_float64_on_a_cpu() -> None:
    def asked(value: Any) -> Any:
        node = fx.Graph().placeholder("x")
        node.meta["val"] = value
        return kernel_of(aten.native_dropout.default, (node, 0.1, True))

    assert asked(torch.ones(2)) is dropout and asked(torch.ones(2, dtype=torch.float64)) is dropout
    for other in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta"), None):
        assert asked(other) is aten.native_dropout.default
    assert kernel_of(aten.add.Tensor, ()) is aten.add.Tensor


def a_module(graph: fx.Graph, **attributes: Any) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return fx.GraphModule(root, graph)


def placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call whose result is computed, as its fake one."""
    node = graph.call_function(target, args, kwargs)
    real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*real_args, **real_kwargs)
    return node


def test_code_computes_what_its_graph_says_and_empties_the_list() -> None:
    graph = fx.Graph()
    x = placeholder(graph, "x", torch.ones(2, 3))
    placeholder(graph, "unused", torch.ones(1))
    constant = graph.get_attr("constant")
    constant.meta["val"] = torch.full((3, 2), 2.0)
    twice = call(graph, aten.add.Tensor, x, x, alpha=2)
    flat = call(graph, aten.view.default, twice, [6])
    both = call(graph, aten.cat.default, [flat, flat], 0)
    limited = call(graph, aten.clamp.default, both, float("-inf"), 2.5)
    as_double = call(graph, aten._to_copy.default, limited, dtype=torch.float64)
    parts = call(graph, aten.split.Tensor, as_double, 5)
    first = graph.call_function(operator.getitem, (parts, 0))
    product = call(graph, aten.mm.default, x, constant)
    call(graph, aten.neg.default, x)  # nobody reads it
    graph.output((first, None, product))
    function = boxed_function(a_module(graph, constant=torch.full((3, 2), 2.0)), "small")

    arguments = [torch.ones(2, 3), torch.ones(1)]
    first_part, nothing, matrix = function(arguments)
    assert arguments == [] and nothing is None
    assert torch.equal(first_part, torch.full((5,), 2.5, dtype=torch.float64)) and torch.equal(matrix, torch.full((2, 2), 6.0))


def test_values_are_freed_at_their_last_use() -> None:
    freed: list[str] = []
    graph = fx.Graph()
    x = placeholder(graph, "x", None)

    class Held:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            freed.append(self.name)

    def made(_: Any, name: str) -> Held:
        freed.append(f"before {name}")
        return Held(name)

    a = graph.call_function(made, (x, "a"))
    b = graph.call_function(made, (a, "b"))
    graph.call_function(made, (a, "c"))
    graph.output((b,))
    result = boxed_function(a_module(graph), "frees")([Held("x")])
    assert freed[:4] == ["before a", "x", "before b", "before c"] and sorted(freed[4:]) == ["a", "c"]
    assert [r.name for r in result] == ["b"]


def test_an_error_shows_the_line_that_raised() -> None:
    graph = fx.Graph()
    graph.output(
        (call(graph, aten.mm.default, placeholder(graph, "x", torch.ones(2, 2)), placeholder(graph, "y", torch.ones(2, 2))),)
    )
    with pytest.raises(RuntimeError) as caught:
        boxed_function(a_module(graph), "raises")([torch.ones(2, 2), torch.ones(3, 3)])
    line = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert line.filename.startswith("<actsolve raises") and "(x, y)" in (line.line or "")


def test_replays_of_dropout_draw_the_same_numbers() -> None:
    x = torch.ones(64)
    graph = fx.Graph()
    argument = placeholder(graph, "x", x)
    state = graph.call_function(rng_state, (CPU,))
    first = graph.call_function(aten.native_dropout.default, (argument, 0.5, True))
    again = graph.call_function(replay_random, (CPU, state, aten.native_dropout.default, argument, 0.5, True))
    graph.output((first, again))
    module = a_module(graph)
    (a, mask_a), (b, mask_b) = boxed_function(module, "replays")([x])
    assert torch.equal(a, b) and torch.equal(mask_a, mask_b) and 0 < mask_a.sum() < 64


def test_views_are_shortened_where_the_base_allows_it() -> None:
    graph = fx.Graph()
    x = placeholder(graph, "x", torch.arange(12.0).view(3, 4))
    same = call(graph, aten.t.default, call(graph, aten.t.default, x))
    whole = call(graph, aten.view.default, call(graph, aten.view.default, x, [12]), [2, 6])
    inner = call(graph, aten.view.default, x, [4, 3])
    outer = call(graph, aten.view.default, inner, [6, 2])
    graph.output((same, whole, inner, outer))
    shorten_views(graph)
    graph.lint()
    (output,) = graph.find_nodes(op="output")
    assert [n.all_input_nodes for n in output.args[0][1:]] == [[x]] * 3 and output.args[0][0] is x
    assert len(graph.find_nodes(op="call_function", target=aten.t.default)) == 0
    assert len(graph.find_nodes(op="call_function", target=aten.view.default)) == 3
