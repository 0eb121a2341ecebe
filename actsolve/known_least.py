"""The plans of least memory that were found here before, on disk: one file for each training step.

The search for the smallest budget is cut off by the clock. What it found, and a message has named, must be found again whatever
the machine is busy with: so it is kept (`kept_plan`), and every later search begins with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from actsolve.kept_plan import Kept, Place
from actsolve.plan import Plan
from actsolve.planners import PlannerOptions, least_budget
from actsolve.problem import Problem
from actsolve.simulate import timeline_of
from actsolve.units import MAX_BYTES


def least_budget_known(problem: Problem, options: PlannerOptions) -> tuple[int, Plan]:
    """Return the smallest budget found, now or before, in bytes, and a plan that meets it; otherwise as `least_budget`."""
    begun = from_known(problem, options)
    found_bytes, found = least_budget(problem, begun)
    if begun is options or found_bytes < timeline_of(problem, begun.seeds[-1]).peak_bytes:
        # What is proven of the extra time is proven for one budget, and is not what was searched for here.
        _place(problem).write(Kept(replace(found, bound_s=None, global_bound_s=None, bounds_forward=False)))
    return found_bytes, found


def from_known(problem: Problem, options: PlannerOptions) -> PlannerOptions:
    """Return ``options`` with the plan of least memory that was found before as its last seed; as they are if there is none."""
    known = known_least(problem)
    return options if known is None else replace(options, seeds=(*options.seeds, known))


def known_least(problem: Problem) -> Plan | None:
    """Return the plan of least memory that was found before for such a step, if there is one that can be carried out."""
    kept = _place(problem).read(replace(problem, budget_bytes=MAX_BYTES))
    return None if kept is None else kept.plan


def _place(problem: Problem) -> Place:
    """Return where the plan of a step is kept, by all that its plans of least memory depend on."""
    pins = sorted(problem.pinned_keep), sorted(problem.pinned_recompute)
    host = problem.host_cap_bytes if problem.links is not None else 0
    of_values = problem.min_offload_bytes, problem.optimizer_bytes, pins, host
    rest = hashlib.sha256(repr((problem.costs.workspace_bytes, of_values)).encode()).hexdigest()
    return Place("plan of least memory", "least", f"{problem.graph.fingerprint}-{rest[:16]}")
