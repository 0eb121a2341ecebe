"""`optimize`: the whole pipeline on one screen."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from actsolve.capture.captured import Captured
from actsolve.compiled import CompiledStep, compile_step
from actsolve.errors import UsageError
from actsolve.module import Runtime, optimized_module, runtime_of
from actsolve.plan_file import PlanFile, load_plan
from actsolve.planned import Planned
from actsolve.planning import Listener, plan_training_step, planned_from_file, refuse_wrong_arguments
from actsolve.runtime.copy_engine import CopyOptions
from actsolve.runtime.switches import Switch
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep
from actsolve.units import parse_bytes, parse_speed

__all__ = ["Listener", "Settings", "module_of", "optimize", "plan_training_step", "planned_from_file"]


def optimize(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mem_budget: str | int | float | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    host_budget: str | int | None = None,
    hardware: str = "auto",
    h2d: str | float | None = None,
    d2h: str | float | None = None,
    planner: str = "milp",
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    solver: str = "highs",
    grads: str = "none",
    static_bytes: int | None = None,
    reserve_bytes: int | None = None,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    plan: str | os.PathLike[str] | PlanFile | None = None,
    on_error: str = "raise",
    on_new_inputs: str = "plan",
    eager: Sequence[str] = (),
) -> torch.nn.Module:
    """Return ``model`` as a module that trains exactly as it does, within a memory budget, as fast as can be.

    Args:
        model: The module, in training mode, on its device. It is not changed; the result shares its parameters.
        args: Positional inputs of one batch, of the shapes that will be trained on. Where no inputs are given, the model is
            planned for at its first training call: for a trainer that makes the batches.
        kwargs: Keyword inputs of one batch.
        mem_budget: Cap on device memory of the whole training step: ``"8GiB"``, ``"8GB"``, bytes, a share such as ``"60%"``
            or 0.6 of what keeping everything needs above static memory, or ``"min"``.
        loss_fn: Maps the model's output to a scalar. With it a call returns ``(loss, output)``.
        optimizer: Its state is part of static memory: a name or an instance.
        host_budget: Cap on host memory for what is offloaded: ``"32GiB"``, or bytes; 0 offloads nothing. If left out it is 80% of
            what is available here, and without a limit for a profile.
        hardware: ``"auto"`` measures here; or a profile's name, such as ``"a100"``.
        h2d: Speed of copies from host to device: ``"25GB/s"``, or bytes per second. If left out, that of the hardware. On a CPU,
            which has none, values are offloaded over a link that is emulated at the speed given.
        d2h: Likewise from device to host; if only one of the two is known they are equal.
        planner: ``"milp"``, or a baseline: ``"keep_all"``, ``"sqrt_l"``, ``"rotor"``, ... (`actsolve.planners.BASELINES`).
        gap: Relative gap at which the solver may stop.
        time_limit_s: Seconds after which it stops all the same, with the best plan found.
        solver: ``"highs"``, ``"cbc"``, or another that PuLP knows.
        grads: ``"none"`` (gradients are None when a step begins) or ``"accumulate"``.
        static_bytes: Overrides the computed static memory.
        reserve_bytes: Left free for the allocator; by default 0 on a CPU and 5% of the budget on a GPU.
        keep: Paths of modules whose saved values must be kept, such as ``"blocks.0"``; the planner must be ``"milp"``.
        recompute: Paths of modules whose saved values must be recomputed; likewise.
        plan: A plan that was saved for this step, or its path: nothing is solved. ``mem_budget`` is then the plan's own if
            left out.
        on_error: ``"raise"``, or ``"original"``: warn, and let the original module run where planning fails. Arguments that
            cannot be used raise all the same.
        on_new_inputs: For inputs of another signature: ``"plan"`` once more, run the ``"original"`` with a warning, or
            ``"raise"``.
        eager: Names of what is not to be traced: submodules and methods by their paths, `loss_fn`, classes of modules that the
            forward makes. Their Python runs at each step, and once more in its backward.
            Those that no trace can follow are, unasked.

    Raises:
        UsageError: an argument cannot be used, the model cannot be traced, or the plan is of another step.
        SolverError: there is no such solver here, or it fails.
        InfeasibleBudget: no plan fits, or none was found; its message names the smallest budget that does.
    """
    _one_of("on_error", on_error, ("raise", "original"))
    _one_of("on_new_inputs", on_new_inputs, ("plan", "original", "raise"))
    file = plan if plan is None or isinstance(plan, PlanFile) else load_plan(plan)
    budget = mem_budget if mem_budget is not None or file is None else file.budget_bytes
    if budget is None:
        raise UsageError("mem_budget is missing", try_='mem_budget="8GiB", 0.6, "min", or plan= with a saved plan')
    settings = Settings(
        optimizer=optimizer,
        hardware=hardware,
        planner=planner,
        solver=solver,
        gap=gap,
        time_limit_s=time_limit_s,
        grads=grads,
        static_bytes=static_bytes,
        reserve_bytes=reserve_bytes,
        host_budget_bytes=parse_bytes(host_budget, what="host_budget") if isinstance(host_budget, str) else host_budget,
        h2d=parse_speed(h2d, what="h2d") if isinstance(h2d, str) else h2d,
        d2h=parse_speed(d2h, what="d2h") if isinstance(d2h, str) else d2h,
        keep=_as_tuple(keep),
        recompute=_as_tuple(recompute),
    )
    if file is not None:
        settings.refuse_pins_of_a_saved_plan()

    # What is wrong with the arguments is told here: from here on `on_error` decides what becomes of an error.
    step = TrainingStep(model, args, {} if kwargs is None else kwargs, loss_fn, _as_tuple(eager))
    step.verify()
    refuse_wrong_arguments(step, budget, settings)

    def plan_step(step: TrainingStep, tangents: frozenset[str] | None) -> CompiledStep:
        return compile_step(*plan_training_step(step, budget, settings, tangents=tangents))

    def first() -> CompiledStep:
        if file is None:
            return plan_step(step, None)
        return compile_step(*planned_from_file(step, file, settings, mem_budget=budget))

    runtime_there = runtime_of(model)
    model = model if runtime_there is None else runtime_there.original
    step = TrainingStep(model, tuple(args), dict(step.kwargs), loss_fn, step.eager)
    runtime = Runtime(model, loss_fn, plan_step, on_new_inputs, on_error, eager=step.eager)
    module = optimized_module(runtime)
    if file is not None or _has_inputs(step):
        runtime.plan_first(step, first)
    return module


def _has_inputs(step: TrainingStep) -> bool:
    """Whether inputs are given, or the model takes none."""
    return bool(step.args or step.kwargs) or not inspect.signature(step.model.forward).parameters


def module_of(step: TrainingStep, captured: Captured, planned: Planned, switch: Switch | None = None) -> torch.nn.Module:
    """Return a module that runs a plan, made before by `plan_training_step`; new inputs are refused.

    Args:
        step: What was planned for.
        captured: Its trace.
        planned: The plan.
        switch: What is to be broken in how it runs, for experiments.
    """
    schedule, options = (None, CopyOptions()) if switch is None else (switch.schedule(planned), switch.options)

    def refuse(_: TrainingStep, __: frozenset[str] | None) -> CompiledStep:
        raise AssertionError("new inputs are refused before this is called")

    runtime = Runtime(step.model, step.loss_fn, refuse, "raise")
    module = optimized_module(runtime)
    runtime.plan_first(step, lambda: compile_step(captured, planned, schedule, options))
    return module


def _as_tuple(paths: Any) -> Any:
    """Return ``paths`` as a tuple if it is a list or the like; what is not, a str among it, is refused by `Settings`."""
    return tuple(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else paths


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r} is not known", try_=" or ".join(map(repr, allowed)))
