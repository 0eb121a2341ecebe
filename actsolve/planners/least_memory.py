"""The smallest budget that any plan is found for, verified by exact simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from actsolve.dag import Dag, dag_of
from actsolve.plan import Plan
from actsolve.planners.certified import nodes_of, plan_of
from actsolve.planners.dag_search import DagPlan, DagSearch, too_large
from actsolve.planners.options import PlannerOptions
from actsolve.planners.rotor import rotor
from actsolve.planners.sequence import Runner, Sequence
from actsolve.planners.smallest import smallest_budget as of_windows
from actsolve.planners.smallest_dag import smallest_dag_budget
from actsolve.problem import Problem
from actsolve.replays import replays_in_forward
from actsolve.simulate import timeline_of

# Whether ops are replayed in the forward too: seconds for such plans, and the most ops of which they would find any in that time.
_SEARCHES = {False: (8.0, 3000), True: (4.0, 1000)}


def smallest_budget(problem: Problem, options: PlannerOptions | None = None) -> tuple[int, Plan]:
    """Return the smallest budget found, in bytes, and a plan that meets it.

    It is the least exact peak among those of windows (`smallest`), of the dynamic program for chains (`rotor`), and of a search
    that replays ops as often as it takes. The budget of ``problem`` is not looked at. The plan is not minimised for time: hand it
    to the planner as a seed, at that budget.

    Raises:
        InfeasibleBudget: the pinned values leave no plan.
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    options = options or PlannerOptions()
    deeper = tuple(seed for seed in options.seeds if seed.replays is not None)
    peak_bytes, plan = of_windows(problem, replace(options, seeds=tuple(s for s in options.seeds if s.replays is None)))
    for other in deeper:
        if (other_bytes := timeline_of(problem, other).peak_bytes) < peak_bytes:
            peak_bytes, plan = other_bytes, other
    if problem.offloadable or problem.pinned_recompute or problem.pinned_keep:
        return peak_bytes, plan
    dag = dag_of(problem)
    held_bytes = problem.static_bytes + problem.optimizer_bytes + sum(dag.sizes[v] for v in dag.held)
    least_bytes = max(held_bytes, *map(dag.needs, range(dag.n_nodes)))
    if peak_bytes <= least_bytes:
        return peak_bytes, plan
    chain = rotor(replace(problem, budget_bytes=least_bytes), options)
    if chain.found and (chain_bytes := timeline_of(problem, chain).peak_bytes) < peak_bytes:
        peak_bytes, plan = chain_bytes, chain
    for anywhere, (limit_s, most_ops) in _SEARCHES.items():
        if dag.n_nodes > most_ops or peak_bytes <= least_bytes or (replays_in_forward(problem.graph, plan) and not anywhere):
            continue
        dag = dag_of(problem, anywhere=anywhere)
        start = Runner(dag).run(nodes_of(problem, timeline_of(problem, plan).schedule))
        brief = replace(options, time_limit_s=min(limit_s, options.time_limit_s))
        found = plan_of(problem, smallest_dag_budget(dag, brief, _fitting, start, least_bytes))
        if (found_bytes := timeline_of(problem, found).peak_bytes) < peak_bytes:
            peak_bytes, plan = found_bytes, found
    return peak_bytes, replace(plan, planner="milp", note="smallest budget found")


def least_budget(problem: Problem, options: PlannerOptions) -> tuple[int, Plan]:
    """Return the smallest budget found, in bytes, and a plan that meets it; never more than what is found without links.

    The search is short, and where much can be offloaded and the host takes little of it, it ends early: then a plan that only
    recomputes may be the better one.
    """
    if problem.links is None or problem.host_budget_bytes is None:
        return smallest_budget(problem, options)
    _, recomputing = smallest_budget(replace(problem, links=None, host_budget_bytes=None), options)
    return smallest_budget(problem, replace(options, seeds=(*options.seeds, recomputing)))


def _fitting(dag: Dag, options: PlannerOptions, start: Sequence | None) -> DagPlan:
    """Return some schedule that fits, if one is found."""
    if reason := too_large(dag):
        return DagPlan(None, 0.0, reason)
    search = DagSearch(dag, options)
    search.take(search.runner.run(np.arange(dag.n_nodes)))
    if start is not None:
        search.take(start)
    search.prove(0.5)
    search.around(1.0)
    return DagPlan(search.best, search.bound, search.infeasible, search.interrupted)
