"""Segments of sqrt(L) layers, each wrapped in `torch.utils.checkpoint`.

Source:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4. They cut a chain; we cut
    the list of layers, as `torch.utils.checkpoint.checkpoint_sequential` does, but replay the last segment too.
"""

from __future__ import annotations

import math

from actsolve.plan import Plan, Status
from actsolve.planners.keep_all import pins_note
from actsolve.planners.layers import crossing, layers
from actsolve.planners.options import PlannerOptions
from actsolve.planners.required import required
from actsolve.problem import Problem


def sqrt_l(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that keeps only what crosses the boundary of a segment. The budget is not looked at."""
    graph = problem.graph
    found = layers(graph)
    length = max(1, math.isqrt(max(0, len(found) - 1)) + 1 if found else 1)  # ceil of the root
    segments = [[op for layer in found[i : i + length] for op in layer] for i in range(0, len(found), length)]
    return Plan("sqrt_l", required(graph, crossing(graph, segments)), status=Status.FEASIBLE, note=pins_note(problem))
