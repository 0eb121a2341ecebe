"""Wrap every layer in `torch.utils.checkpoint` and offload its inputs, as DeepSpeed, Unsloth and TRL do.

Source:
    Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.1.2: activation checkpoints offloaded to CPU memory.
"""

from __future__ import annotations

from actsolve.plan import Plan
from actsolve.planners.layers import boundaries, layers
from actsolve.planners.offload_all import offloading
from actsolve.planners.options import PlannerOptions
from actsolve.planners.per_layer import per_layer
from actsolve.problem import Problem


def offload_boundaries(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that replays every layer from its inputs, which are on the host meanwhile."""
    wanted = boundaries(problem.graph, layers(problem.graph))
    return offloading("offload_boundaries", problem, per_layer(problem).kept, wanted)
