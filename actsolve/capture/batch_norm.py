"""Batch norm's backward without the running statistics that it is handed and, in training mode, does not read.

Torch's trace hands it the new statistics, as values of the graph. Left in, they would have to be kept or replayed for every
batch norm, and a replay cannot make them: it must not update them twice.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

aten = torch.ops.aten
_RUNNING_MEAN, _RUNNING_VAR, _TRAIN = 3, 4, 7


def drop_unread_statistics(joint: GraphModule) -> int:
    """Replace, in each training-mode batch norm backward of ``joint``, the running statistics by None; return how many."""
    changed = 0
    for node in joint.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[_TRAIN]:
            args = list(node.args)
            args[_RUNNING_MEAN] = args[_RUNNING_VAR] = None
            node.args = tuple(args)
            changed += 1
    return changed
