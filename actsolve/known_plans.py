"""The plans that the solver found here before, on disk: one file for each problem and way to solve it.

A plan serves again where it is proven to the gap that is asked for, or was searched for at least as long and as closely as is
asked now. Where more is asked, the search begins with it. What the user cut short is not kept. Neither is that nothing fits: a
plan can be checked, and that there is none cannot.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from importlib.resources import files

from actsolve.cache_dir import plans_are_kept
from actsolve.kept_plan import Kept, Place
from actsolve.known_least import from_known
from actsolve.plan import Plan, Status
from actsolve.planners import PlannerOptions, plan
from actsolve.planners.one_pass import status_of
from actsolve.problem import Problem
from actsolve.simulate import timeline_of
from actsolve.units import format_seconds

_SOLVER = "milp"
_EPSILON_S = 1e-9


def plan_known(problem: Problem, options: PlannerOptions) -> Plan:
    """Return the plan that ``milp`` finds, or found before: that has `Plan.earlier_s`.

    Raises:
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    start = time.perf_counter()
    place = _place(problem, options)
    kept = place.read(problem) if plans_are_kept() else None
    if kept is not None:
        extra_s = timeline_of(problem, kept.plan).extra_s
        status = status_of(problem, options, extra_s, kept.plan.bound_s)
        if _serves(kept, status, extra_s, problem, options):
            return replace(kept.plan, status=status, earlier_s=kept.plan.solve_s, solve_s=time.perf_counter() - start)
        options = replace(options, seeds=(*options.seeds, kept.plan))
    found = plan(problem, _SOLVER, from_known(problem, options))
    if plans_are_kept() and found.found and not found.interrupted:
        place.write(Kept(found, options.gap, options.time_limit_s))
    return found


def notes_of(found: Plan) -> Iterator[str]:
    """Yield what a report says of a plan that was found before."""
    if found.earlier_s is not None:
        yield f"The plan was found before, in {format_seconds(found.earlier_s)}; ACTSOLVE_PLAN_CACHE=off searches anew."


def _serves(kept: Kept, status: Status, extra_s: float, problem: Problem, options: PlannerOptions) -> bool:
    """Whether a search as ``options`` ask for has nothing to add to a plan that was found before."""
    bound_s = kept.plan.bound_s
    if bound_s is not None and extra_s - bound_s <= options.gap * extra_s + _EPSILON_S:
        return True
    if kept.gap > options.gap or (kept.time_limit_s < options.time_limit_s and status is not Status.OPTIMAL):
        return False
    seeds = (timeline_of(problem, seed) for seed in options.seeds if seed.found)
    return not any(seed.fits and seed.extra_s < extra_s - _EPSILON_S for seed in seeds)


def _place(problem: Problem, options: PlannerOptions) -> Place:
    """Return where the plan of a problem is kept, by all that the answer depends on, but for the time and the gap."""
    costs = problem.costs.seconds, problem.costs.replay_seconds, problem.costs.workspace_bytes
    sizes = problem.budget_bytes, problem.static_bytes, problem.optimizer_bytes
    pins = sorted(problem.pinned_keep), sorted(problem.pinned_recompute)
    links = None if problem.links is None else (astuple(problem.links), problem.host_cap_bytes, problem.min_offload_bytes)
    how = _SOLVER, _version(), options.solver.lower(), options.window, options.torch_saved is not None
    rest = hashlib.sha256(repr((costs, sizes, pins, links, how)).encode()).hexdigest()
    return Place("plan", "plan", f"{problem.graph.fingerprint}-{rest[:32]}")


@functools.cache
def _version() -> str:
    """Return a hash of the planners' sources: what one version found is not what the next one finds.

    A number would have to be remembered with each change, and a stale plan hides what the change has brought.
    """
    digest = hashlib.sha256()
    for file in sorted(files("actsolve.planners").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
