"""Wrap every layer in `torch.utils.checkpoint`: keep only what crosses the boundary of a layer."""

from __future__ import annotations

from actsolve.plan import Plan, Status
from actsolve.planners.keep_all import pins_note
from actsolve.planners.layers import crossing, layers
from actsolve.planners.options import PlannerOptions
from actsolve.planners.required import required
from actsolve.problem import Problem


def per_layer(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that replays every layer, from its inputs. The budget is not looked at."""
    graph = problem.graph
    return Plan("per_layer", required(graph, crossing(graph, layers(graph))), status=Status.FEASIBLE, note=pins_note(problem))
