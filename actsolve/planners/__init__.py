"""Planners: each turns a Problem into a Plan. A new one is one file and one line here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from actsolve.errors import UsageError
from actsolve.plan import Plan
from actsolve.planners.certified import certified
from actsolve.planners.checkmate import checkmate
from actsolve.planners.chen_greedy import chen_greedy
from actsolve.planners.greedy import greedy
from actsolve.planners.keep_all import keep_all
from actsolve.planners.least_memory import least_budget, smallest_budget
from actsolve.planners.lp import Limits, LinearModel, solve
from actsolve.planners.offload_all import offload_all
from actsolve.planners.offload_boundaries import offload_boundaries
from actsolve.planners.offload_sync import offload_sync
from actsolve.planners.options import PlannerOptions, Progress
from actsolve.planners.per_layer import per_layer
from actsolve.planners.rotor import rotor
from actsolve.planners.selective import selective
from actsolve.planners.sqrt_l import sqrt_l
from actsolve.planners.torch_budget import torch_budget
from actsolve.planners.treeverse import treeverse
from actsolve.problem import Problem

__all__ = [
    "BASELINES",
    "PLANNERS",
    "QUICK",
    "PlannerOptions",
    "Progress",
    "least_budget",
    "plan",
    "require_solver",
    "smallest_budget",
]

PLANNERS: dict[str, Callable[[Problem, PlannerOptions], Plan]] = {
    "milp": certified,
    "keep_all": keep_all,
    "sqrt_l": sqrt_l,
    "per_layer": per_layer,
    "chen_greedy": chen_greedy,
    "selective": selective,
    "greedy": greedy,
    "treeverse": treeverse,
    "rotor": rotor,
    "checkmate": checkmate,
    "torch_budget": torch_budget,
    "offload_all": offload_all,
    "offload_boundaries": offload_boundaries,
    "offload_sync": offload_sync,
}

BASELINES = tuple(name for name in PLANNERS if name != "milp")

# Shown with every plan; the others take seconds on a large model, and are for `compare`.
_SLOW = frozenset({"chen_greedy", "greedy", "treeverse", "rotor", "checkmate", "torch_budget"})
QUICK = tuple(name for name in BASELINES if name not in _SLOW)


def plan(problem: Problem, name: str = "milp", options: PlannerOptions | None = None) -> Plan:
    """Return the plan of the planner called ``name``.

    Raises:
        UsageError: there is no such planner, or a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    if name not in PLANNERS:
        raise UsageError(f"no planner is called {name!r}", try_="one of " + ", ".join(PLANNERS))
    options = options or PlannerOptions()
    if name == "milp":
        require_solver(options.solver)
    start = time.perf_counter()
    found = PLANNERS[name](problem, options)
    return replace(found, solve_s=time.perf_counter() - start)


def require_solver(name: str) -> None:
    """Raise unless the solver called ``name`` works here: one that comes with us does, others are tried on a program of one row.

    Raises:
        SolverError: it is missing or fails.
    """
    if name.lower() != "highs":
        smallest = LinearModel()
        smallest.row(0.5, 1.0, [smallest.column(1.0, integer=True)], [1.0])
        solve(smallest, name, Limits(time_limit_s=10.0))
