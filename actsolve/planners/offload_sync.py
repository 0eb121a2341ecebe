"""Offload every value that is saved and wait for each copy, as hooks on saved tensors do."""

from __future__ import annotations

from dataclasses import replace

from actsolve.plan import Plan
from actsolve.planners.offload_all import offload_all
from actsolve.planners.options import PlannerOptions
from actsolve.problem import Problem


def offload_sync(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan of `offload_all` with no copy beside the computation."""
    return replace(offload_all(problem), planner="offload_sync", synchronous=True)
