"""From a general graph to a schedule: plan, check by a replay, say what is proven; where nothing fits, what would."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from actsolve.check_dag import replayed_peak_bytes
from actsolve.dag import Dag
from actsolve.dag_file import FORMAT
from actsolve.errors import InfeasibleBudget, ScheduleError
from actsolve.graph_plan import GraphPlan, proved
from actsolve.plan import Status
from actsolve.planners.dag_search import DagPlan, plan_dag
from actsolve.planners.options import PlannerOptions
from actsolve.planners.sequence import Sequence
from actsolve.planners.smallest_dag import smallest_dag_budget
from actsolve.static_memory import Budget, parse_budget
from actsolve.units import format_bytes

_SEARCH = 0.25  # of the time limit, for the smallest budget
_SEARCH_S = 15.0  # and no more than that


@dataclass(frozen=True)
class DagTask:
    """A graph to be planned for.

    Attributes:
        name: What it is called.
        dag: Its nodes; their budget is not looked at.
        options: How to plan.
        stage: Called with what is being done.
    """

    name: str
    dag: Dag
    options: PlannerOptions
    stage: Callable[[str], None] = lambda _: None

    @property
    def search_options(self) -> PlannerOptions:
        """How to look for the smallest budget."""
        return replace(self.options, time_limit_s=min(_SEARCH * self.options.time_limit_s, _SEARCH_S))


def plan_dag_within(task: DagTask, mem_budget: str) -> GraphPlan:
    """Return the schedule of least time that was found within a budget, replayed, and what is proven of it.

    Args:
        task: The graph, and how to plan.
        mem_budget: Bytes, a share of the peak of the plain order, or ``min``.

    Raises:
        UsageError: the budget cannot be read.
        InfeasibleBudget: no schedule fits, or none was found.
        SolverError: the solver asked for is missing or fails.
    """
    begin = time.perf_counter()
    budget = parse_budget(mem_budget)
    dag = task.dag
    in_order = replayed_peak_bytes(dag, range(dag.n_nodes))
    seed: Sequence | None = None
    if budget.is_smallest:
        task.stage("searching for the smallest budget")
        seed = smallest_dag_budget(dag, task.search_options, plan_dag)
        budget = Budget(size_bytes=seed.peak_bytes)
    dag = replace(dag, budget_bytes=budget.resolve(0, in_order))
    task.stage(f"planning {dag.n_nodes} nodes")
    found = plan_dag(dag, task.options, seed)
    smallest = None
    if found.sequence is None and not found.interrupted:
        task.stage("searching for the smallest budget")
        smallest = smallest_dag_budget(dag, task.search_options, plan_dag)
        if smallest.peak_bytes <= dag.budget_bytes:  # here a schedule is, to start from
            bound = found.bound
            found = plan_dag(dag, task.search_options, smallest)
            found = replace(found, bound=max(bound, found.bound))
    plan = replace(_graph_plan(task, dag, found, in_order), solve_s=time.perf_counter() - begin)
    if plan.schedule is None:
        raise _nothing_fits(task, plan, found, smallest)
    return plan


def _graph_plan(task: DagTask, dag: Dag, found: DagPlan, in_order: int) -> GraphPlan:
    base = _total(dag.time)
    plan = GraphPlan(
        graph=task.name,
        format=FORMAT,
        status=Status.INFEASIBLE if found.infeasible else Status.UNKNOWN,
        base_time=base,
        budget_bytes=dag.budget_bytes,
        peak_bytes_in_order=in_order,
    )
    if found.sequence is None:
        return plan if found.infeasible else replace(plan, lower_bound=base + found.bound)
    schedule = tuple(map(int, found.sequence.nodes))
    peak = replayed_peak_bytes(dag, schedule)
    if peak > dag.budget_bytes:
        raise ScheduleError("a schedule exceeds its budget", why=f"{peak} bytes, of {dag.budget_bytes}")
    objective = _total(dag.time[node] for node in schedule)
    extra = objective - base
    bound = min(max(0.0, found.bound), extra)
    return replace(
        plan,
        status=proved(task.options.gap, extra, bound, base),
        objective=objective,
        lower_bound=objective if bound == extra else base + bound if bound else base,
        peak_bytes=peak,
        schedule=schedule,
        notes=("Interrupted: this is the best so far.",) if found.interrupted else (),
    )


def _total(times: Iterable[float]) -> float:
    """Return the sum: exact for integers, correctly rounded for others."""
    listed = list(times)
    return sum(listed) if all(isinstance(t, int) for t in listed) else math.fsum(listed)


def _nothing_fits(task: DagTask, plan: GraphPlan, found: DagPlan, smallest: Sequence | None) -> InfeasibleBudget:
    budget = f"{format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes)"
    why, limit_s = found.infeasible, task.options.time_limit_s
    what = f"no schedule fits {budget}" if why else f"no schedule was found for {budget} in {limit_s:g} s"
    try_: str | None = "more time"
    if found.interrupted and not why:
        what = f"no schedule was found for {budget} before Ctrl-C"
    if smallest is not None:
        plan = replace(plan, smallest_budget_bytes=smallest.peak_bytes)
        share = smallest.peak_bytes / plan.peak_bytes_in_order if plan.peak_bytes_in_order else 1.0
        try_ = f"--mem-budget {smallest.peak_bytes} ({format_bytes(smallest.peak_bytes)}, {share:.1%} of the plain order), "
        try_ += "the smallest found to work" + ("" if why else f"\nor --time-limit {4 * limit_s:g}")
    error = InfeasibleBudget(
        what,
        where=f"{task.name}, {task.dag.n_nodes} nodes",
        why=why or f"this is not proven to be impossible; the plain order needs {format_bytes(plan.peak_bytes_in_order)}",
        try_=try_,
        smallest_bytes=plan.smallest_budget_bytes,
    )
    error.attempt = plan
    return error
