"""The layouts in which Inductor computes convolutions, which no graph shows.

Where it computes with channels last, what a convolution reads is in that layout. An input of the step that is not is copied when
the forward begins, and it is the copy that is saved for the backward. A convolution that is measured in another layout takes
copies of all that it reads, and of its results, as workspace, and the time for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.torch_internals import FakeTensor
from actsolve.inductor.torch_inductor import Strides

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def as_called(call: Node, strides: Mapping[str, Strides]) -> Node:
    """Return a call like ``call`` on tensors that are laid out as Inductor lays them out, if it is a convolution.

    Args:
        call: A node of Inductor's forward or backward.
        strides: Per name of a node those of the tensors that it is called with, as far as they are known; those of the others are
            taken to be channels last.
    """
    if call.target not in _CONVOLUTIONS:
        return call
    graph, laid_out = fx.Graph(), {}
    known = strides.get(call.name, ())
    known = known if len(known) == len(call.all_input_nodes) else (None,) * len(call.all_input_nodes)
    for node, wanted in zip(call.all_input_nodes, known, strict=True):
        laid_out[node] = graph.placeholder(node.name)
        laid_out[node].meta["val"] = _laid_out(node.meta["val"], wanted)
    return _with_value(graph.node_copy(call, laid_out.__getitem__))


def copied(graph: fx.Graph, node: Node) -> Node:
    """Add a copy of ``node`` with channels last to ``graph``."""
    return _with_value(graph.call_function(aten.clone.default, (node,), {"memory_format": torch.channels_last}))


def is_laid_out_anew(node: Node) -> bool:
    """Whether ``node`` is an input that Inductor copies into channels last where it computes with them, for nothing else.

    Of one that is also read by others these may read the copy: a sum of it adds up its terms in the order of that.
    """
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    if any(user.op != "output" and user.target not in (*_CONVOLUTIONS, aten.clone.default) for user in node.users):
        return False
    return value.is_contiguous() and not value.is_contiguous(memory_format=torch.channels_last)


def _with_value(node: Node) -> Node:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = _called(node.target, *args, **kwargs)
    return node


def _laid_out(value: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    made = value
    if strides is not None and len(strides) == value.dim():
        made = _called(aten.new_empty_strided.default, value, list(value.shape), list(strides))
    elif value.dim() == 4:
        made = _called(aten.clone.default, value, memory_format=torch.channels_last)
    return made


def _called(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a call gives for fake tensors."""
    with next(t.fake_mode for t in args if isinstance(t, FakeTensor)):
        return target(*args, **kwargs)
