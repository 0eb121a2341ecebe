"""The copies of what convolutions read that Inductor makes, as nodes of its forward and backward.

Where its convolutions compute with channels last, it copies their weights and the step's images into that layout, all when its
forward begins, and saves the copies for the backward; no graph shows them. Here they are nodes: a plan counts them, and may make
them again in the backward in place of saving them. Inductor finds the layout that it wants, and makes no copies of its own.
"""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch.fx import Node

from actsolve.inductor.layouts import copied, is_laid_out_anew
from actsolve.inductor.torch_inductor import Modules, computes_with_channels_last

aten = torch.ops.aten


def with_operand_copies(forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int) -> Modules:
    """Return copies of Inductor's forward and backward with a node for each input that it would lay out anew.

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
    for operand in filter(is_laid_out_anew, forward.graph.find_nodes(op="placeholder")):
        convolutions = [n for n in operand.users if n is not output]
        if not convolutions:
            continue
        with forward.graph.inserting_before(convolutions[0]):
            laid_out = copied(forward.graph, operand)
        for convolution in convolutions:
            convolution.replace_input_with(operand, laid_out)
        if operand in saved and (given := _placeholder_of(backward, operand)) is not None and _only_for_convolutions(given):
            saved[saved.index(operand)] = laid_out
            with backward.graph.inserting_before(given):
                other = backward.graph.placeholder(laid_out.name)
            other.meta = {**given.meta, "val": laid_out.meta["val"]}
            given.replace_all_uses_with(other)
            backward.graph.erase_node(given)
    returned = [_as_traced(forward.graph, node) for node in output.args[0][:n_outputs]]
    output.args = (type(output.args[0])([*returned, *saved]),)
    for module in (forward, backward):
        module.recompile()
    return forward, backward


def _as_traced(graph: fx.Graph, node: Node | None) -> Node | None:
    """Return ``node`` in the layout of its trace: a caller is given that, whatever its convolutions read."""
    if not isinstance(node, Node) or node.meta["val"].dim() != 4:
        return node
    made: Node
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(torch.ops.prims.inductor_force_stride_order.default, (node, node.meta["val"].stride()))
    made.meta = {**node.meta}
    return made


def _placeholder_of(backward: fx.GraphModule, node: Node) -> Node | None:
    return next((n for n in backward.graph.find_nodes(op="placeholder") if n.name == node.name), None)


def _only_for_convolutions(given: Node) -> bool:
    return all(n.target is aten.convolution_backward.default and n.args[0] is not given for n in given.users)
