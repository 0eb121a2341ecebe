"""What is made of Inductor's forward and backward before a plan: kernels, their order, and their layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from actsolve.cost.sample_call import sample_call
from actsolve.graph import Phase
from actsolve.inductor.kernels import base_of, kernels_of
from actsolve.inductor.layouts import as_called
from actsolve.inductor.operand_copies import with_operand_copies
from actsolve.inductor.split import split_of
from actsolve.inductor.torch_inductor import InLayoutsOfInductor, mark_planned
from actsolve.runtime.memory_events import measure_peak

aten = torch.ops.aten
Shapes = dict[str, tuple[int, ...]]


def traced(function: Callable[..., Any], shapes: Shapes) -> fx.GraphModule:
    """Return the graph of a function of tensors of these shapes, which its inputs are named by."""
    with FakeTensorMode():
        module = make_fx(function, tracing_mode="fake")(*(torch.empty(s) for s in shapes.values()))
    for node, name in zip(module.graph.find_nodes(op="placeholder"), shapes, strict=True):
        node.name = name
    return module


def names_of(nodes: Sequence[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def test_kernels_are_joined_as_inductor_would() -> None:
    """Elementwise ops and the reductions that follow share one; a product is called by itself; views are nobody's."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.relu().add(1) @ w.t()
        z = y.exp()
        return z * z.sum(1, keepdim=True)

    module = traced(step, {"x": (4, 8), "w": (16, 8)})
    names = [names_of(kernel.nodes) for kernel in kernels_of(module.graph)]
    assert names == [["relu", "add"], ["mm"], ["exp", "sum_1", "mul"]]
    (transposed,) = module.graph.find_nodes(op="call_function", target=aten.t.default)
    assert base_of(transposed).op == "placeholder"


def test_gradients_that_are_made_of_less_come_last() -> None:
    """Of a wide weight from few rows, and of a wide input; that of a narrow weight, of many rows, is made where it was."""

    def forward(x: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor) -> list[torch.Tensor]:
        h = aten.mm.default(x, narrow)
        return [aten.mm.default(aten.view.default(h, [2, 64]), wide), x, narrow, wide, h]

    def backward(
        x: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor, h: torch.Tensor, g: torch.Tensor
    ) -> list[torch.Tensor]:
        of_wide = aten.mm.default(aten.t.default(aten.view.default(h, [2, 64])), g)
        of_h = aten.view.default(aten.mm.default(g, aten.t.default(wide)), [32, 4])
        of_narrow = aten.mm.default(aten.t.default(x), of_h)
        return [aten.mm.default(of_h, aten.t.default(narrow)), of_narrow, of_wide]

    given: Shapes = {"x": (32, 8), "narrow": (8, 4), "wide": (64, 96)}
    split = split_of(traced(forward, given), traced(backward, given | {"mm": (32, 4), "g": (2, 96)}), 1)
    backwards = [k.name for op, k in zip(split.graph.ops, split.kernels, strict=True) if op.phase is Phase.BACKWARD]
    assert backwards == ["mm_1", "mm_2", "mm", "mm_3"]


def test_convolutions_are_called_with_channels_last() -> None:
    """A call in the layouts of a trace would take copies of its operands; where the strides are known these are taken."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    (call,) = traced(step, {"x": (4, 16, 32, 32), "w": (16, 16, 3, 3)}).graph.find_nodes(
        op="call_function", target=aten.convolution.default
    )
    ours = as_called(call, {})
    assert all(n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in (ours, *ours.all_input_nodes))
    result_bytes, taken = 4 * 4 * 16 * 32 * 32, []
    for node in (call, ours):
        run = sample_call(node)
        with torch.no_grad():
            run()
            taken.append(measure_peak(run).peak_bytes - result_bytes)
    assert taken[1] < result_bytes / 4 < taken[0]
    strides = ((16384, 1, 512, 16), (144, 9, 3, 1))
    assert [n.meta["val"].stride() for n in as_called(call, {call.name: strides}).all_input_nodes] == list(strides)


def test_copies_of_what_convolutions_read_are_nodes_of_both_graphs() -> None:
    """Of those that are laid out anew: of a kernel of one element both layouts are one."""
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def forward(x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> list[torch.Tensor]:
        y = aten.convolution.default(x, wide, None, *rest)
        return [aten.convolution.default(y, narrow, None, *rest), x, wide, narrow, y]

    def backward(
        x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor, y: torch.Tensor, g: torch.Tensor
    ) -> list[torch.Tensor]:
        to_y, of_narrow, _ = aten.convolution_backward.default(g, y, narrow, None, *rest, [True, True, False])
        _, of_wide, _ = aten.convolution_backward.default(to_y, x, wide, None, *rest, [False, True, False])
        return [of_wide, of_narrow]

    given: Shapes = {"x": (2, 4, 8, 8), "wide": (8, 4, 3, 3), "narrow": (8, 8, 1, 1)}
    one = traced(forward, given)
    two = traced(backward, given | {"convolution": (2, 8, 6, 6), "g": (2, 8, 6, 6)})
    ours, theirs = with_operand_copies(one, two, 1)
    image, made = ours.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert (image.args[0].name, made.args[0].name) == ("x", "wide")  # type: ignore[union-attr]
    assert all(n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in (image, made))
    (output,) = ours.graph.find_nodes(op="output")
    expected = [image.name, made.name, "narrow", "convolution"]
    assert names_of(output.args[0])[1:] == expected  # type: ignore[arg-type]
    assert names_of(theirs.graph.find_nodes(op="placeholder")) == [*expected, "g"]
    assert not one.graph.find_nodes(op="call_function", target=aten.clone.default), "Inductor's own graph stays as it is"


@pytest.mark.parametrize("forced", [False, True])
def test_a_planned_backward_is_laid_out_as_inductors_own(forced: bool) -> None:
    """Which has no convolutions, so that it is laid out with channels last only where the options say so."""
    graph = traced(lambda x: x + 1, {"x": (2, 3, 4, 5)}).graph
    with torch._inductor.config.patch(layout_optimization=True, force_layout_optimization=forced):
        InLayoutsOfInductor("a plan")(graph)
        assert torch._inductor.config.layout_optimization, "not planned"
        mark_planned(next(iter(graph.nodes)))
        InLayoutsOfInductor("a plan")(graph)
        assert torch._inductor.config.layout_optimization == forced
