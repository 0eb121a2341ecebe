"""From a training step to a plan: capture, cost, budget, plan, schedule, check, simulate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from actsolve.capture.captured import Captured
from actsolve.capture.torch_partitioner import saved_by_torch
from actsolve.check import check
from actsolve.cost.hardware import profile
from actsolve.cost.known_links import LinkSpeed
from actsolve.cost.layout_check import capture_as_laid_out
from actsolve.cost.link_speed import EMULATED, links_of
from actsolve.errors import FileFormatError, InfeasibleBudget, UsageError
from actsolve.infeasible import infeasible_budget, shortage_of
from actsolve.json_file import shown
from actsolve.known_least import least_budget_known
from actsolve.known_plans import notes_of as notes_of_plan
from actsolve.known_plans import plan_known
from actsolve.not_fitting import baseline_too_large, loaded_too_large
from actsolve.peak import peak_of
from actsolve.pins import refuse_unknown_modules
from actsolve.plan import Plan
from actsolve.plan_file import PlanFile, load_plan, offloaded_by
from actsolve.planned import Attempt, BaselineResult, Planned
from actsolve.planners import BASELINES, PLANNERS, QUICK, PlannerOptions, Progress, plan, require_solver
from actsolve.problem import Problem
from actsolve.settings import Settings
from actsolve.simulate import Timeline, simulate, timeline_of
from actsolve.static_memory import Reserve, StaticMemory, parse_budget
from actsolve.step_problem import costs_of, link_of, loss_inside, notes_of, problem_of, reserve_of
from actsolve.training_step import TrainingStep
from actsolve.units import MAX_BYTES

Budget = str | int | float


@dataclass(frozen=True)
class Listener:
    """Who is told how planning goes.

    Attributes:
        stage: Called with what is being done.
        measuring: Called with how many op signatures have been measured, and of how many.
        solving: Called during a solve with elapsed seconds, incumbent and bound.
    """

    stage: Callable[[str], None] = lambda _: None
    measuring: Callable[[int, int], None] | None = None
    solving: Progress | None = None


@dataclass(frozen=True)
class Prepared:
    """A training step that is captured and costed and has a budget: all but a plan.

    Attributes:
        target: What the step is called in reports.
        captured: The trace.
        problem: What is to be planned.
        static: The static memory by kind.
        reserve: What is left free for the allocator.
        capture_s: Wall seconds of tracing.
        cost_s: Wall seconds of measuring or modelling op costs.
        loss_inside: Whether the loss is part of the step.
        links_source: Where the speeds of the problem's links come from.
        notes: What a report has to say of the problem.
        seeds: Plans to start from.
    """

    target: str
    captured: Captured
    problem: Problem
    static: StaticMemory
    reserve: Reserve
    capture_s: float
    cost_s: float
    loss_inside: bool
    links_source: str = ""
    notes: tuple[str, ...] = ()
    seeds: tuple[Plan, ...] = field(default=())

    @cached_property
    def baselines(self) -> dict[str, BaselineResult]:
        """Every quick baseline, simulated: once, however many planners are compared."""
        return baselines_of(self.problem)


def plan_training_step(
    step: TrainingStep,
    mem_budget: Budget,
    settings: Settings | None = None,
    *,
    target: str = "",
    tangents: frozenset[str] | None = None,
    listener: Listener | None = None,
) -> tuple[Captured, Planned]:
    """Capture, cost and plan ``step``; nothing runs but, with ``hardware="auto"``, each op by itself.

    Args:
        step: What to train.
        mem_budget: As in `optimize`.
        settings: As in `optimize`.
        target: What the step is called in reports.
        tangents: Which outputs the backward starts from, if an earlier step has shown it.
        listener: Told how it goes.

    Raises:
        UsageError: an argument cannot be used, or the model cannot be traced.
        InfeasibleBudget: no plan fits, or none was found.
    """
    settings, listener = settings or Settings(), listener or Listener()
    prepared = prepare(step, mem_budget, settings, target=target, tangents=tangents, listener=listener)
    return prepared.captured, planned_by(prepared, settings, listener=listener)


def prepare(
    step: TrainingStep,
    mem_budget: Budget,
    settings: Settings,
    *,
    target: str = "",
    tangents: frozenset[str] | None = None,
    listener: Listener | None = None,
    suits: Callable[[Captured], None] = lambda _: None,
    link: LinkSpeed | None = None,
) -> Prepared:
    """Return ``step`` captured, costed, and with its budget resolved and its pins in place.

    Args:
        step: What to train.
        mem_budget: As in `optimize`.
        settings: As in `optimize`.
        target: What the step is called in reports.
        tangents: Which outputs the backward starts from, if an earlier step has shown it.
        listener: Told how it goes.
        suits: Looks at the trace before any op is measured, and raises if it is not the one wanted.
        link: How fast copies to the host are, if that is known; else as the settings say.
    """
    listener = listener or Listener()
    target = target or type(step.model).__name__
    refuse_wrong_arguments(step, mem_budget, settings)  # before the tracing, which takes a while
    listener.stage("tracing")
    start = time.perf_counter()
    captured = capture_as_laid_out(step, name=target, tangents=tangents)
    captured = captured.accumulating() if settings.grads == "accumulate" else captured
    capture_s = time.perf_counter() - start
    suits(captured)
    listener.stage("costing ops")
    start = time.perf_counter()
    costs = costs_of(captured, settings.hardware, listener.measuring)
    if link is None:
        link = link_of(step, settings)
    cost_s = time.perf_counter() - start

    problem, static = problem_of(captured, costs, step, settings, link.links)
    reserve, inside = reserve_of(step, settings), loss_inside(step, captured)
    notes = notes_of(settings, link, captured.joint)
    prepared = Prepared(target, captured, problem, static, reserve, capture_s, cost_s, inside, link.source, notes)
    return with_budget(prepared, mem_budget, settings, listener=listener)


def refuse_wrong_arguments(step: TrainingStep, mem_budget: Budget, settings: Settings) -> None:
    """Raise for all that can be known to be wrong without a trace.

    Raises:
        UsageError: an argument cannot be used.
        SolverError: there is no such solver here.
    """
    step.verify()
    parse_budget(mem_budget)
    if settings.hardware != "auto":
        profile(settings.hardware)
    require_solver(settings.solver)
    refuse_unknown_modules([name for name, _ in step.model.named_modules(remove_duplicate=False)], settings.pins)


def with_budget(prepared: Prepared, mem_budget: Budget, settings: Settings, *, listener: Listener | None = None) -> Prepared:
    """Return ``prepared`` with another budget: one trace serves many."""
    budget = parse_budget(mem_budget)
    listener, reserve = listener or Listener(), prepared.reserve
    static = replace(prepared.static, reserve=0)
    problem = replace(prepared.problem, budget_bytes=MAX_BYTES, static_bytes=static.total_bytes)
    seeds: tuple[Plan, ...] = ()
    if budget.size_bytes is not None:
        size_bytes = budget.size_bytes
    elif budget.share is not None:
        keep_all_bytes = timeline_of(problem, plan(problem, "keep_all")).peak_bytes
        size_bytes = reserve.budget_for(budget.resolve(static.total_bytes, keep_all_bytes))
    else:
        listener.stage("searching for the smallest budget")
        found_bytes, found = least_budget_known(problem, settings.planner_options(listener.solving))
        size_bytes, seeds = reserve.budget_for(found_bytes), (found,)
    static = replace(static, reserve=reserve.of(size_bytes))
    problem = replace(problem, budget_bytes=size_bytes, static_bytes=static.total_bytes)
    return replace(prepared, problem=problem, static=static, seeds=seeds)


def planned_by(
    prepared: Prepared, settings: Settings, planner: str | None = None, *, listener: Listener | None = None, helps: bool = True
) -> Planned:
    """Return the plan of a planner, by default that of the settings, simulated and checked.

    Args:
        prepared: What to plan.
        settings: How.
        planner: Its name, if not that of the settings.
        listener: Told how it goes.
        helps: Whether to look for what would help where nothing fits, which takes some seconds.

    Raises:
        UsageError: the planner does not apply: one that offloads where no link is known.
        InfeasibleBudget: it does not fit, or none was found.
    """
    listener, planner = listener or Listener(), planner or settings.planner
    problem, static, reserve = prepared.problem, prepared.static, prepared.reserve
    options = _options(prepared, settings, listener)
    listener.stage(f"planning by {planner}")
    found = plan(problem, planner, options) if planner in BASELINES else plan_known(problem, options)
    if planner in BASELINES and not found.found:
        try_ = "--h2d and --d2h, or another planner" if planner.startswith("offload") else "another planner"
        raise UsageError(f"the planner {planner} does not apply here", why=found.note, try_=try_)
    if not found.found:
        listener.stage("searching for the smallest budget")
        unreserved = replace(problem, static_bytes=static.total_bytes - static.reserve)
        smallest = least_budget_known(unreserved, options)
        shortage = shortage_of(problem, static, reserve, smallest, settings)
        if shortage.smallest_bytes > problem.budget_bytes:
            if helps:
                listener.stage("searching for what would help")
            raise infeasible_budget(shortage, _attempt(prepared, found), helps=helps)
        # The solver's rows are conservative, and its time is limited: here a plan is, to start it from.
        listener.stage(f"planning by {planner} from the smallest plan")
        found = plan_known(problem, replace(options, seeds=(smallest[1],)))
        if not found.found:
            raise infeasible_budget(shortage, _attempt(prepared, found))
    timeline = timeline_of(problem, found)
    if not timeline.fits:
        error = baseline_too_large(timeline, static, planner)
        raise _with_attempt(error, timeline, _attempt(prepared, found))
    check(problem, timeline.schedule)
    return _attempt(prepared, found).with_timeline(timeline)


def attempts(prepared: Prepared, settings: Settings, *, listener: Listener | None = None) -> dict[str, Attempt]:
    """Return what every planner makes of a step, by its name: a `Planned` where there is a plan, fitting or not."""
    listener = listener or Listener()
    found: dict[str, Attempt] = {}
    for name in PLANNERS:
        if name in BASELINES:
            listener.stage(f"planning by {name}")
            baseline = plan(prepared.problem, name, _options(prepared, settings, listener))
            found[name] = _attempt(prepared, baseline)
            if baseline.found:
                found[name] = found[name].with_timeline(timeline_of(prepared.problem, baseline))
            continue
        try:
            found[name] = planned_by(prepared, settings, name, listener=listener, helps=False)
        except InfeasibleBudget as error:
            found[name] = error.attempt
    return found


def _options(prepared: Prepared, settings: Settings, listener: Listener) -> PlannerOptions:
    options = settings.planner_options(listener.solving)
    return replace(options, seeds=prepared.seeds, torch_saved=saved_by_torch(prepared.captured))


def planned_from_file(
    step: TrainingStep,
    file: str | os.PathLike[str] | PlanFile,
    settings: Settings | None = None,
    *,
    mem_budget: Budget | None = None,
    target: str = "",
    listener: Listener | None = None,
) -> tuple[Captured, Planned]:
    """Capture ``step`` and return it with a plan that was saved for it, checked against the budget with the costs of here.

    Args:
        step: What to train.
        file: The plan, or its path.
        settings: As in `optimize`; the planner is not used.
        mem_budget: What the plan must fit; its own budget if left out.
        target: What the step is called in reports.
        listener: Told how it goes.

    Raises:
        UsageError: values are pinned besides.
        FileFormatError: the plan cannot be read, or is of another training step.
        InfeasibleBudget: with the workspace and static memory of here it does not fit.
    """
    where = f"plan of {file.target}" if isinstance(file, PlanFile) else file
    if not isinstance(file, PlanFile):
        file = load_plan(file)
    _refuse_unknown_planner(file, where)
    settings = settings or Settings()
    settings.refuse_pins_of_a_saved_plan()
    step.verify()
    prepared = prepare(
        step,
        file.budget_bytes if mem_budget is None else mem_budget,
        settings,
        target=target or file.target,
        listener=listener,
        suits=lambda captured: file.check_matches(captured.graph),
        link=_link_of_file(file, step, settings),
    )
    schedule, kept = file.decode(prepared.captured.graph)
    offloaded = offloaded_by(prepared.captured.graph, schedule)
    note = "The plan was loaded; what was proved of it when it was made may not hold for the costs of here."
    attempt = _attempt(prepared, Plan(file.planner, kept, offloaded=offloaded, solve_s=file.solve_s))
    attempt = replace(attempt, notes=(note, *prepared.notes))
    timeline = simulate(prepared.problem, schedule)
    if not timeline.fits:
        raise _with_attempt(loaded_too_large(timeline, prepared.static), timeline, attempt)
    check(prepared.problem, schedule)
    return prepared.captured, attempt.with_timeline(timeline)


def _refuse_unknown_planner(file: PlanFile, where: str | os.PathLike[str]) -> None:
    if file.planner not in PLANNERS:
        known = ", ".join(PLANNERS)
        why = f"its planner, {shown(file.planner)!r}, is none of {known}"
        raise FileFormatError("cannot use the plan file", where=shown(where), why=why)


def _link_of_file(file: PlanFile, step: TrainingStep, settings: Settings) -> LinkSpeed:
    """The link that a saved plan was made for, if the settings name no other. Nothing is measured for a plan that is made."""
    if settings.h2d is not None or settings.d2h is not None:
        return links_of(settings.hardware, step.device, h2d=settings.h2d, d2h=settings.d2h)
    links = file.link_speeds()
    emulated = links is not None and settings.hardware == "auto" and step.device.type != "cuda"
    return LinkSpeed(links, "the plan file" if links is not None else "", EMULATED if emulated else "")


def _attempt(prepared: Prepared, found: Plan) -> Attempt:
    problem = prepared.problem
    return Attempt(
        target=prepared.target,
        problem=problem,
        plan=found,
        keep_all=timeline_of(problem, plan(problem, "keep_all")),
        baselines=prepared.baselines,
        static=prepared.static,
        capture_s=prepared.capture_s,
        cost_s=prepared.cost_s,
        loss_inside=prepared.loss_inside,
        links_source=prepared.links_source,
        notes=(*notes_of_plan(found), *prepared.notes),
    )


def _with_attempt(error: InfeasibleBudget, timeline: Timeline, attempt: Attempt) -> InfeasibleBudget:
    error.attempt = replace(attempt, peak=peak_of(timeline, attempt.static))
    return error


def baselines_of(problem: Problem) -> dict[str, BaselineResult]:
    """Return every quick baseline in the simulator, fitting or not."""
    results = {}
    for name in QUICK:
        found = plan(problem, name)
        results[name] = BaselineResult(timeline_of(problem, found) if found.found else None, found.note)
    return results
