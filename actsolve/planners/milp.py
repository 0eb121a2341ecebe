"""Keep, recompute or offload, by mixed-integer programming over replay windows and slots of a link, with a proven gap.

The steps: the baselines and keep-all first; where values can be offloaded, the best plans that only recompute, or only offload;
the MILP (`passes`, `model`, `milp_rows`, `moments`, `slots`), seeded with the best of these that fits; the exact schedule of what
it decides; and an exact local improvement. The rows are conservative, so what is returned may be a little better than the solver
believes, never worse than the best baseline, and never over budget.
"""

from __future__ import annotations

import time

from actsolve.errors import UsageError
from actsolve.plan import Plan, Status
from actsolve.planners.improve import Candidate, candidate, improved
from actsolve.planners.keep_all import keep_all
from actsolve.planners.offload_all import offload_all
from actsolve.planners.offload_boundaries import offload_boundaries
from actsolve.planners.one_pass import status_of
from actsolve.planners.options import PlannerOptions
from actsolve.planners.passes import LAST_S, Search
from actsolve.planners.per_layer import per_layer
from actsolve.planners.sqrt_l import sqrt_l
from actsolve.problem import Problem

_EPSILON_S = 1e-9


def milp(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that takes the least time within the budget, to within the gap.

    Raises:
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    options = options or PlannerOptions()
    check_pins(problem)
    begin = time.perf_counter()
    everything = candidate(problem, keep_all(problem).kept)
    if everything.fits and everything.extra_s < _EPSILON_S:
        return Plan("milp", everything.kept, status=Status.OPTIMAL, bound_s=0.0)
    best = _best_seed(problem, options, everything)
    search = Search(problem, options, best, begin)
    if problem.offloadable:
        search.begin_with_simpler_plans()
    search.run()
    best, bound = search.best, search.bound_s
    if best is None:
        status = Status.INFEASIBLE if search.proven_infeasible else Status.UNKNOWN
        return Plan("milp", status=status, bound_s=bound, interrupted=search.interrupted)
    good_enough_s = 0.0 if bound is None else bound * (1 + options.gap / 5)
    best = improved(problem, best, good_enough_s, deadline=max(search.deadline, time.perf_counter()) + LAST_S)
    if bound is not None and problem.offloadable and best.extra_s < bound * (1 - options.gap) - _EPSILON_S:
        bound = None  # slots are too coarse for so many stalls: what they prove is not true of whole copies
    bound = None if bound is None else min(bound, best.extra_s)
    return Plan(
        "milp",
        best.kept,
        best.early,
        best.offloaded,
        status=status_of(problem, options, best.extra_s, bound),
        bound_s=bound,
        interrupted=search.interrupted,
    )


def check_pins(problem: Problem) -> None:
    """Raise UsageError if a pin names what cannot be decided, or asks for what cannot be done."""
    graph = problem.graph
    decidable = set(graph.decidable)
    for v in sorted(problem.pinned_keep | problem.pinned_recompute):
        name = graph.values[v].name
        if v not in decidable:
            raise UsageError(f"{name} is pinned, but there is nothing to decide", why="no backward op or replay reads it")
        if v in problem.pinned_keep and v in problem.pinned_recompute:
            raise UsageError(f"{name} is pinned both to be kept and to be recomputed")
        producer = graph.values[v].producer
        assert producer is not None
        op = graph.ops[producer]
        if v in problem.pinned_recompute and not op.replayable:
            raise UsageError(
                f"{name} is pinned to be recomputed, and its op cannot be replayed", where=op.name, why=op.why_not, try_="keep it"
            )


def _best_seed(problem: Problem, options: PlannerOptions, everything: Candidate) -> Candidate | None:
    """The fastest of the baselines, and of the plans given, that fits."""
    seeds = [everything]
    for found in (*options.seeds, *(b(problem) for b in (sqrt_l, per_layer, offload_all, offload_boundaries))):
        if found.found:
            seeds.append(candidate(problem, found.kept, found.early, frozenset(found.offloaded)))
    fitting = [s for s in seeds if s.fits and not s.kept & problem.pinned_recompute]
    return min(fitting, key=lambda s: s.extra_s, default=None)
