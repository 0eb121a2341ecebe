"""The whole pipeline: capture, cost, plan, schedule, check, simulate, lower."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actsolve.capture.captured import Captured, capture
from actsolve.check import check
from actsolve.cost.hardware import profile
from actsolve.cost.measure import measure_costs
from actsolve.cost.optimizers import optimizer_memory
from actsolve.cost.roofline import roofline_costs
from actsolve.errors import ActsolveError, UsageError
from actsolve.graph import Kind
from actsolve.infeasible import infeasible_budget
from actsolve.module import CompiledStep, Runtime, compile_schedule, optimized_module, signature, state_slots
from actsolve.pins import pinned_values
from actsolve.plan import Plan, Status
from actsolve.planned import BaselineResult, Planned
from actsolve.planners import BASELINES, PlannerOptions, Progress, plan, smallest_budget
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, build_schedule
from actsolve.simulate import Timeline, simulate
from actsolve.static_memory import parse_budget, static_memory
from actsolve.training_step import TrainingStep

Stage = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to plan. What `optimize` takes, with its defaults.

    Attributes:
        optimizer: A name (``adamw``, ``sgd``, ``none``, ...) or an instance, for its state and its step's temporaries.
        hardware: ``auto`` measures each op here; a profile's name models them.
        planner: A name in `actsolve.planners.PLANNERS`.
        solver: ``highs``, or a solver that PuLP knows.
        gap: Proven relative distance from the optimum at which to stop.
        time_limit_s: When to stop all the same.
        grads: ``none`` if ``.grad`` is None when a step begins (``set_to_none``), ``accumulate`` if it is there already.
        static_bytes: Stands for parameters, buffers, inputs, optimizer state and reserve if given.
        reserve_bytes: Left free for the allocator; None is 0 on CPU and 5% of the budget elsewhere.
        keep: Module paths whose values must be kept.
        recompute: Module paths whose values must not be kept.
    """

    optimizer: str | torch.optim.Optimizer = "adamw"
    hardware: str = "auto"
    planner: str = "milp"
    solver: str = "highs"
    gap: float = 0.01
    time_limit_s: float = 60.0
    grads: str = "none"
    static_bytes: int | None = None
    reserve_bytes: int | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def planner_options(self, progress: Progress | None = None) -> PlannerOptions:
        return PlannerOptions(gap=self.gap, time_limit_s=self.time_limit_s, solver=self.solver, progress=progress)


def optimize(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mem_budget: str | int | float,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    host_budget: str | int | None = None,
    hardware: str = "auto",
    planner: str = "milp",
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    solver: str = "highs",
    grads: str = "none",
    static_bytes: int | None = None,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    on_error: str = "raise",
    on_new_inputs: str = "plan",
) -> torch.nn.Module:
    """Return ``model`` as a module that trains exactly as it does, within a memory budget, as fast as can be.

    Args:
        model: The module, in training mode, on its device. It is not changed; the result shares its parameters.
        args: Positional inputs of one batch, of the shapes that will be trained on.
        kwargs: Keyword inputs of one batch.
        mem_budget: Cap on device memory of the whole training step: ``"8GiB"``, ``"8GB"``, bytes, a share such as ``"60%"`` or 0.6
            of what keeping everything needs above static memory, or ``"min"``.
        loss_fn: Maps the model's output to a scalar. With it a call returns ``(loss, output)``.
        optimizer: Its state is part of static memory: a name or an instance.
        host_budget: Reserved for offloading, which is not there yet.
        hardware: ``"auto"`` measures here; or a profile's name, such as ``"a100"``.
        planner: ``"milp"``, or a baseline: ``"keep_all"``, ``"sqrt_l"``, ``"per_layer"``.
        gap: Relative gap at which the solver may stop.
        time_limit_s: Seconds after which it stops all the same, with the best plan found.
        solver: ``"highs"``, ``"cbc"``, or another that PuLP knows.
        grads: ``"none"`` (gradients are None when a step begins) or ``"accumulate"``.
        static_bytes: Overrides the computed static memory.
        keep: Paths of modules whose saved values must be kept, such as ``"blocks.0"``.
        recompute: Paths of modules whose saved values must be recomputed.
        on_error: ``"raise"``, or ``"original"``: warn, and let the original module run.
        on_new_inputs: For inputs of another signature: ``"plan"`` once more, run the ``"original"`` with a warning, or ``"raise"``.

    Raises:
        UsageError: an argument cannot be used, or the model cannot be traced.
        InfeasibleBudget: no plan fits, or none was found; its message names the smallest budget that does.
    """
    for name, value, allowed in (("on_error", on_error, ("raise", "original")), ("on_new_inputs", on_new_inputs, ("plan", "original", "raise"))):
        if value not in allowed:
            raise UsageError(f"{name}={value!r} is not known", try_=" or ".join(map(repr, allowed)))
    if host_budget is not None:
        raise UsageError("host_budget is given, but offloading is not available yet", try_="leave it out")
    settings = Settings(
        optimizer, hardware, planner, solver, gap, time_limit_s, grads, static_bytes, None, tuple(keep), tuple(recompute)
    )

    def plan_and_compile(step: TrainingStep) -> CompiledStep | None:
        try:
            captured, planned = plan_training_step(step, mem_budget, settings)
            return CompiledStep(compile_schedule(captured, planned.schedule), captured, planned)
        except ActsolveError as error:
            if on_error == "raise":
                raise
            warnings.warn(f"actsolve: the original module runs, unplanned.\n{error}", stacklevel=2)
            return None

    step = TrainingStep(model, tuple(args), dict(kwargs or {}), loss_fn)
    runtime = Runtime(model, loss_fn, plan_and_compile, on_new_inputs)
    module = optimized_module(runtime)
    runtime.first = plan_and_compile(step)
    leaves, spec = pytree.tree_flatten((step.args, step.kwargs))
    runtime.steps[signature(module, state_slots(module), leaves, spec)] = runtime.first
    return module


def plan_training_step(
    step: TrainingStep,
    mem_budget: str | int | float,
    settings: Settings | None = None,
    *,
    target: str = "",
    on_stage: Stage | None = None,
    progress: Progress | None = None,
) -> tuple[Captured, Planned]:
    """Capture, cost and plan ``step``; nothing runs but, with ``hardware="auto"``, each op by itself.

    Args:
        step: What to train.
        mem_budget: As in `optimize`.
        settings: As in `optimize`.
        target: What the step is called in reports.
        on_stage: Told what is being done.
        progress: Told how the solve goes.
    """
    budget = parse_budget(mem_budget)
    settings = settings or Settings()
    tell = on_stage or (lambda _: None)
    tell("tracing")
    start = time.perf_counter()
    captured = capture(step, name=target or type(step.model).__name__)
    capture_s = time.perf_counter() - start
    tell("costing ops")
    start = time.perf_counter()
    costs = costs_of(captured, settings.hardware)
    cost_s = time.perf_counter() - start

    problem, static = problem_of(captured, costs, step, settings)
    keep_all = timeline_of(problem, plan(problem, "keep_all"))
    options = settings.planner_options(progress)
    tell("planning")
    if budget.is_smallest:
        found_bytes, found = smallest_budget(problem, options)
        problem = replace(problem, budget_bytes=found_bytes)
        options = replace(options, seeds=(found.kept,))
    else:
        problem = replace(problem, budget_bytes=budget.resolve(static.total_bytes, keep_all.peak_bytes))
    problem = replace(problem, **pinned_values(problem.graph, settings.keep, settings.recompute))
    result = plan(problem, settings.planner, options)
    keep_all = replace(keep_all, problem=problem)
    if not result.found:
        raise infeasible_budget(problem, result, static, options)
    timeline = timeline_of(problem, result)
    if not timeline.fits:
        raise infeasible_budget(problem, replace(result, status=Status.UNKNOWN), static, options)
    check(problem, timeline.schedule)
    planned = Planned(
        target=target or type(step.model).__name__,
        problem=problem,
        plan=result,
        timeline=timeline,
        keep_all=keep_all,
        baselines=baselines_of(problem),
        static=static,
        capture_s=capture_s,
        cost_s=cost_s,
        loss_inside=loss_inside(captured),
    )
    return captured, planned


def costs_of(captured: Captured, hardware: str) -> Costs:
    """Return what each op costs: measured here, or modelled by a profile."""
    if hardware == "auto":
        return measure_costs(captured.graph, captured.op_nodes)
    return roofline_costs(captured.graph, profile(hardware))


def problem_of(captured: Captured, costs: Costs, step: TrainingStep, settings: Settings) -> tuple[Problem, Any]:
    """Return the problem without a budget yet, and the static memory by kind."""
    graph = captured.graph
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    memory = optimizer_memory(settings.optimizer, parameters)
    if settings.grads not in ("none", "accumulate"):
        raise UsageError(f"grads={settings.grads!r} is not known", try_="'none' or 'accumulate'")
    accumulated = sum(p.numel() * p.element_size() for p in parameters) if settings.grads == "accumulate" else 0
    static = static_memory(
        graph,
        memory,
        accumulated_bytes=accumulated,
        reserve_bytes=settings.reserve_bytes or 0,
        given_bytes=settings.static_bytes,
    )
    unlimited = 1 << 62
    return Problem(graph, costs, unlimited, static.total_bytes, memory.temporary_bytes), static


def timeline_of(problem: Problem, found: Plan) -> Timeline:
    """Return the simulated schedule of a plan."""
    return simulate(problem, build_schedule(problem.graph, found.kept))


def baselines_of(problem: Problem) -> dict[str, BaselineResult]:
    """Return every baseline in the simulator, fitting or not."""
    results = {}
    for name in BASELINES:
        found = plan(problem, name)
        results[name] = BaselineResult(timeline_of(problem, found) if found.found else None, found.note)
    return results


def loss_inside(captured: Captured) -> bool:
    """Whether the step ends in a scalar whose gradient is all that the backward starts from."""
    tangents = [v for v in captured.graph.values if v.kind is Kind.TANGENT]
    return all(v.shape == () for v in tangents)


def compile_plan(captured: Captured, planned: Planned, schedule: Schedule) -> CompiledStep:
    """Return a step that runs ``schedule`` in place of the planned one."""
    return CompiledStep(compile_schedule(captured, schedule), captured, planned)
