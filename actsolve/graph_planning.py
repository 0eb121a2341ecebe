"""From the graph of a training step, as a file holds it, to a plan: without the model, and without torch.

What only the model knows is taken from the graph: all its parameters are trained, each counts for the optimizer by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from actsolve.check import check
from actsolve.cost.hardware import profile
from actsolve.cost.known_links import Known, LinkSpeed, chosen_links, known_of_profile
from actsolve.cost.optimizer_kinds import optimizer_memory_of
from actsolve.cost.roofline import roofline_costs
from actsolve.errors import InfeasibleBudget, UsageError
from actsolve.graph import Graph, Kind
from actsolve.graph_file import FORMAT
from actsolve.graph_plan import GraphPlan, proved
from actsolve.known_least import least_budget_known
from actsolve.known_plans import notes_of, plan_known
from actsolve.not_fitting import baseline_too_large, nothing_fits
from actsolve.peak import peak_of
from actsolve.plan import Plan, Status
from actsolve.planned import Attempt, BaselineResult, Planned
from actsolve.planners import QUICK, PlannerOptions, plan
from actsolve.problem import Costs, Problem
from actsolve.schedule import StepKind
from actsolve.simulate import Timeline, timeline_of
from actsolve.static_memory import GPU_RESERVE, Reserve, StaticMemory, parse_budget, static_memory
from actsolve.units import MAX_BYTES

_NO_LINK = Known(missing="Nothing is offloaded: a graph file has no link; --h2d and --d2h give one, or --hardware.")


@dataclass(frozen=True)
class GraphTask:
    """A graph of a training step to be planned for.

    Attributes:
        name: What it is called.
        graph: The step.
        costs: What its ops cost, if the file says it.
        options: How to plan.
        planner: Its name.
        hardware: A profile, whose costs count in place of the file's.
        optimizer: Its name.
        static_bytes: Stands for all static memory if given.
        reserve_bytes: Left free; None is 5% of the budget where costs are those of a profile.
        h2d: Bytes per second from host to device, if given.
        d2h: Bytes per second from device to host, if given.
        host_budget_bytes: Cap on what is offloaded; None for no cap.
        stage: Called with what is being done.
    """

    name: str
    graph: Graph
    costs: Costs | None
    options: PlannerOptions
    planner: str = "milp"
    hardware: str | None = None
    optimizer: str = "adamw"
    static_bytes: int | None = None
    reserve_bytes: int | None = None
    h2d: float | None = None
    d2h: float | None = None
    host_budget_bytes: int | None = None
    stage: Callable[[str], None] = lambda _: None

    def known_costs(self) -> Costs:
        """Return what the ops cost.

        Raises:
            UsageError: neither the file nor a profile says it.
        """
        if self.hardware == "auto":
            raise UsageError("ops cannot be measured here", where="--hardware auto", why="a file has none to run", try_="a100")
        if self.hardware is not None:
            return roofline_costs(self.graph, profile(self.hardware))
        if self.costs is None:
            raise UsageError(
                "what the ops cost is not known",
                where=self.name,
                why="the file holds no costs, and no hardware is named",
                try_="--hardware a100, or another profile; or actsolve trace --hardware ... --out, which writes costs",
            )
        return self.costs

    def links(self) -> LinkSpeed:
        """Return how fast copies to the host are; none where nothing is said of it."""
        hardware = self.hardware
        known = (lambda: _NO_LINK) if hardware is None else (lambda: known_of_profile(hardware))
        tells = hardware is not None or self.host_budget_bytes is not None
        host = self.host_budget_bytes
        return chosen_links(known, h2d=self.h2d, d2h=self.d2h, host_budget_bytes=host, tells=tells)

    def reserve(self, costs: Costs) -> Reserve:
        """Return what is to be left free for the allocator."""
        if self.static_bytes is not None:
            return Reserve()
        if self.reserve_bytes is not None:
            return Reserve(size_bytes=self.reserve_bytes)
        return Reserve(share=GPU_RESERVE if costs.source.startswith("roofline") else 0.0)


def plan_graph_within(task: GraphTask, mem_budget: str) -> Planned:
    """Return the plan of a training step within a budget, simulated and checked.

    Args:
        task: The graph, and how to plan.
        mem_budget: Bytes, a share of what keeping everything needs above static, or ``min``.

    Raises:
        UsageError: an argument cannot be used; the costs are not known; or the planner does not apply.
        InfeasibleBudget: no plan fits, or none was found.
        SolverError: the solver asked for is missing or fails.
    """
    start = _prepared(task, mem_budget)
    options = replace(task.options, seeds=start.seeds)
    task.stage(f"planning by {task.planner}")
    found = plan_known(start.problem, options) if task.planner == "milp" else plan(start.problem, task.planner, options)
    if not found.found and task.planner != "milp":
        raise UsageError(f"the planner {task.planner} does not apply here", why=found.note, try_="another planner")
    if not found.found:
        task.stage("searching for the smallest budget")
        smallest = _smallest(start, options)
        if smallest[0] > start.problem.budget_bytes:
            raise _nothing_fits(start, found, smallest)
        task.stage(f"planning by {task.planner} from the smallest plan")
        found = plan_known(start.problem, replace(options, seeds=(smallest[1],)))
        if not found.found:
            raise _nothing_fits(start, found, smallest)
    timeline = timeline_of(start.problem, found)
    if not timeline.fits:
        raise _too_large(start.attempt(found), timeline, task)
    check(start.problem, timeline.schedule)
    return start.attempt(found).with_timeline(timeline)


@dataclass(frozen=True)
class _Start:
    """All but a plan."""

    task: GraphTask
    problem: Problem
    static: StaticMemory
    reserve: Reserve
    link: LinkSpeed
    seeds: tuple[Plan, ...] = ()

    def attempt(self, found: Plan) -> Attempt:
        problem = self.problem
        plans = {name: plan(problem, name) for name in QUICK}
        return Attempt(
            target=self.task.name,
            problem=problem,
            plan=found,
            keep_all=timeline_of(problem, plans["keep_all"]),
            baselines={n: BaselineResult(timeline_of(problem, p) if p.found else None, p.note) for n, p in plans.items()},
            static=self.static,
            links_source=self.link.source,
            notes=(*notes_of(found), *filter(None, [self.link.note])),
        )


def _prepared(task: GraphTask, mem_budget: str) -> _Start:
    budget = parse_budget(mem_budget)
    graph, costs, link = task.graph, task.known_costs(), task.links()
    parameters = [v.size_bytes for v in graph.values if v.kind is Kind.PARAMETER]
    memory = optimizer_memory_of(task.optimizer, parameters, loops=True)
    static = static_memory(graph, memory, given_bytes=task.static_bytes)
    host = None if link.links is None else task.host_budget_bytes
    problem = Problem(
        graph, costs, MAX_BYTES, static.total_bytes, memory.temporary_bytes, links=link.links, host_budget_bytes=host
    )
    start = _Start(task, problem, static, task.reserve(costs), link)
    if budget.is_smallest:
        task.stage("searching for the smallest budget")
        size_bytes, found = _smallest(start, task.options)
        start = replace(start, seeds=(found,))
    elif budget.size_bytes is not None:
        size_bytes = budget.size_bytes
    else:
        keep_all = timeline_of(problem, plan(problem, "keep_all")).peak_bytes
        size_bytes = start.reserve.budget_for(budget.resolve(static.total_bytes, keep_all))
    static = replace(static, reserve=start.reserve.of(size_bytes))
    return replace(start, static=static, problem=replace(problem, budget_bytes=size_bytes, static_bytes=static.total_bytes))


def _smallest(start: _Start, options: PlannerOptions) -> tuple[int, Plan]:
    """Return the smallest budget found, the reserve included, and its plan; links never raise it."""
    problem = replace(start.problem, static_bytes=start.static.total_bytes - start.static.reserve)
    size_bytes, found = least_budget_known(problem, replace(options, seeds=()))
    return start.reserve.budget_for(size_bytes), found


def _nothing_fits(start: _Start, plan: Plan, smallest: tuple[int, Plan]) -> InfeasibleBudget:
    """The error where the planner found nothing, with the smallest budget that a plan was found for."""
    size_bytes, found = smallest
    attempt = start.attempt(plan)
    static = replace(start.static, reserve=start.reserve.of(size_bytes))  # a share of a larger budget is more
    there = replace(attempt.problem, budget_bytes=size_bytes, static_bytes=static.total_bytes)
    peak = peak_of(timeline_of(there, found), static)
    attempt = replace(attempt, smallest_bytes=size_bytes, smallest_plan=found, peak=peak)
    error = nothing_fits(attempt, (), time_limit_s=start.task.options.time_limit_s)
    error.attempt = graph_plan_of(attempt)
    return error


def _too_large(attempt: Attempt, timeline: Timeline, task: GraphTask) -> InfeasibleBudget:
    """The error for a baseline, which looks at no budget, whose plan does not fit."""
    error = baseline_too_large(timeline, attempt.static, task.planner)
    error.attempt = graph_plan_of(replace(attempt, peak=peak_of(timeline, attempt.static)))
    return error


def graph_plan_of(attempt: Attempt, gap: float = 0.01) -> GraphPlan:
    """Return what ``actsolve plan`` says of a plan, or of an attempt that found none.

    The bound is global where the plan has one of that kind, else that of the planner's class of plans.
    """
    base_s = attempt.keep_all.step_s
    found = GraphPlan(
        graph=attempt.target,
        format=FORMAT,
        status=attempt.plan.status,
        base_time=base_s,
        lower_bound_kind="plan class",
        budget_bytes=attempt.problem.budget_bytes,
        peak_bytes_in_order=attempt.keep_all.peak_bytes,
        planner=attempt.plan.planner,
        solve_s=attempt.plan.solve_s,
        smallest_budget_bytes=attempt.smallest_bytes,
        notes=attempt.notes,
    )
    if not isinstance(attempt, Planned):
        return replace(found, status=found.status if not attempt.plan.found else Status.UNKNOWN)
    bound_s = attempt.bound_s
    global_s = attempt.global_bound_s
    if global_s is not None:
        bound_s = global_s
    status = found.status
    if bound_s is not None and proved(gap, attempt.objective_s, bound_s, base_s) is Status.OPTIMAL:
        status = Status.OPTIMAL
    return replace(
        found,
        status=status,
        objective=base_s + attempt.objective_s,
        lower_bound=None if bound_s is None else base_s + bound_s,
        lower_bound_kind=attempt.global_bound_over or "plan class",
        peak_bytes=attempt.timeline.peak_bytes,
        schedule=tuple(s.op for s in attempt.schedule.steps if s.kind in _RUNS and s.op is not None),
        copies=_copies(attempt),
    )


_RUNS = (StepKind.COMPUTE, StepKind.REPLAY)


def _copies(planned: Planned) -> tuple[dict[str, int | str], ...]:
    """What is offloaded: when its device memory is freed, and when its copy back is queued, before these ops."""
    values = planned.graph.values
    return tuple(
        {
            "value": v,
            "name": values[v].name,
            "size_bytes": values[v].size_bytes,
            "free_at": copies.free_at,
            "back_at": copies.back_at,
        }
        for v, copies in sorted(planned.plan.offloaded.items())
    )
