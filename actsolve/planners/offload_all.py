"""Offload every value that is saved, as `torch.autograd.graph.save_on_cpu` does, but beside the computation."""

from __future__ import annotations

from actsolve.plan import Plan, Status
from actsolve.planners.keep_all import keep_all, pins_note
from actsolve.planners.options import PlannerOptions
from actsolve.planners.placement import place
from actsolve.problem import Problem


def offload_all(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that offloads all that `keep_all` keeps and that is not too small, each copy where it costs least."""
    return offloading("offload_all", problem, keep_all(problem).kept)


def offloading(name: str, problem: Problem, saved: frozenset[int], wanted: frozenset[int] | None = None) -> Plan:
    """Return the plan that offloads what it may of ``wanted``, by default all that is ``saved``, and keeps the rest of that."""
    if problem.links is None:
        return Plan(name, status=Status.UNKNOWN, note="no link speed is known")
    offloaded = problem.offloadable & (saved if wanted is None else wanted)
    kept = saved - offloaded
    return Plan(name, kept, offloaded=place(problem, kept, offloaded), note=pins_note(problem))
