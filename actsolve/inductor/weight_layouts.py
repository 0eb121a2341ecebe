"""The copies of weights that Inductor makes for convolutions, as nodes of its forward and backward.

Where its convolutions compute with channels last, it copies their weights into that layout, all when its forward begins, and
saves the copies for the backward; no graph shows them. Here they are nodes: a plan counts them, and may make them again in the
backward in place of saving them. Inductor finds the layout that it wants, and makes no copies of its own.
"""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch.fx import Node

from actsolve.inductor.torch_inductor import Modules, computes_with_channels_last

aten = torch.ops.aten


def with_weight_copies(forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int) -> Modules:
    """Return copies of Inductor's forward and backward with a node for each weight that it would lay out anew.

    Args:
        forward: Inductor's own.
        backward: Inductor's own.
        n_outputs: How many outputs of the forward are the step's.
    """
    forward, backward = (fx.GraphModule(module, copy.deepcopy(module.graph)) for module in (forward, backward))
    if not computes_with_channels_last(forward):
        return forward, backward
    (output,) = forward.graph.find_nodes(op="output")
    saved = list(output.args[0][n_outputs:])
    for weight in forward.graph.find_nodes(op="placeholder"):
        convolutions = [n for n in weight.users if n.target is aten.convolution.default and n.args[1] is weight]
        if not convolutions or not _is_laid_out_anew(weight.meta["val"]):
            continue
        with forward.graph.inserting_before(convolutions[0]):
            laid_out = _copy_of(forward.graph, weight)
        for convolution in convolutions:
            convolution.update_arg(1, laid_out)
        if weight in saved and (given := _placeholder_of(backward, weight)) is not None and _only_for_convolutions(given):
            saved[saved.index(weight)] = laid_out
            with backward.graph.inserting_before(given):
                other = backward.graph.placeholder(laid_out.name)
            other.meta = {**given.meta, "val": laid_out.meta["val"], "tensor_meta": laid_out.meta.get("tensor_meta")}
            given.replace_all_uses_with(other)
            backward.graph.erase_node(given)
    output.args = (type(output.args[0])([*output.args[0][:n_outputs], *saved]),)
    for module in (forward, backward):
        module.recompile()
    return forward, backward


def _is_laid_out_anew(weight: torch.Tensor) -> bool:
    return weight.dim() == 4 and not weight.is_contiguous(memory_format=torch.channels_last)


def _copy_of(graph: fx.Graph, weight: Node) -> Node:
    made = graph.call_function(aten.clone.default, (weight,), {"memory_format": torch.channels_last})
    value = weight.meta["val"]
    with value.fake_mode:
        made.meta["val"] = aten.clone.default(value, memory_format=torch.channels_last)
    return made


def _placeholder_of(backward: fx.GraphModule, node: Node) -> Node | None:
    return next((n for n in backward.graph.find_nodes(op="placeholder") if n.name == node.name), None)


def _only_for_convolutions(given: Node) -> bool:
    return all(n.target is aten.convolution_backward.default and n.args[2] is given for n in given.users)
