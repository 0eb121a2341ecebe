"""Why nothing fits, and what would: the message of exit code 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from actsolve.errors import InfeasibleBudget
from actsolve.graph import Graph, Kind
from actsolve.plan import Plan, Status
from actsolve.plan_schedule import schedule_of
from actsolve.problem import Problem
from actsolve.schedule import Step, StepKind
from actsolve.simulate import Timeline, simulate
from actsolve.static_memory import Reserve, StaticMemory
from actsolve.units import format_bytes

_WORTHWHILE = 0.05  # of the peak
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")


def infeasible_budget(
    problem: Problem, result: Plan, static: StaticMemory, reserve: Reserve, smallest: tuple[int, Plan], time_limit_s: float
) -> InfeasibleBudget:
    """Return the error for a budget that no plan was found for.

    It names the smallest budget that a plan was found for, verified by simulation, and what holds the peak there.

    Args:
        problem: What was planned for.
        result: What the planner returned: infeasible, or unknown.
        static: The static memory by kind.
        reserve: What must stay free; more of it in a larger budget, if it is a share.
        smallest: What `smallest_budget` found without the reserve.
        time_limit_s: That the planner had.
    """
    needed_bytes, found = smallest
    smallest_bytes = reserve.budget_for(needed_bytes)
    at_smallest = replace(static, reserve=reserve.of(smallest_bytes))
    there = replace(problem, budget_bytes=smallest_bytes, static_bytes=at_smallest.total_bytes)
    timeline = simulate(there, schedule_of(problem.graph, found))
    budget = f"{format_bytes(problem.budget_bytes)} ({problem.budget_bytes} bytes)"
    proven = result.status is Status.INFEASIBLE or problem.budget_bytes < problem.static_bytes
    what = f"no plan fits {budget}" if proven else f"no plan was found for {budget} in {time_limit_s:g} s"
    return InfeasibleBudget(
        what,
        where=_where(timeline),
        why=f"the smallest peak found is {format_bytes(timeline.peak_bytes)}: {_listed(timeline, at_smallest)}",
        try_=f"--mem-budget {smallest_bytes} ({format_bytes(smallest_bytes)}), the smallest found to work; or {_help(timeline)}",
        smallest_bytes=smallest_bytes,
    )


def _help(timeline: Timeline) -> str:
    """What would lower the peak."""
    problem, static_bytes = timeline.problem, timeline.problem.static_bytes
    held_bytes = sum(problem.graph.values[v].size_bytes for v in problem.graph.gradients)
    if static_bytes + held_bytes + problem.optimizer_bytes >= 0.99 * timeline.peak_bytes:  # the loss is held too
        return "an optimizer with less state, or a smaller model"
    op = timeline.schedule.steps[timeline.peak_step].op if timeline.peak_step < len(timeline.schedule.steps) else None
    in_loss = op is not None and any(word in problem.graph.ops[op].target for word in _LOSSES)
    helps = ["the loss in chunks"] if in_loss else []
    if problem.links is None and _idle_bytes(timeline) >= _WORTHWHILE * timeline.peak_bytes:
        helps.append("offloading to host memory, with --h2d and --d2h")
    return ", or ".join([*helps, "a smaller batch"])


def _idle_bytes(timeline: Timeline) -> int:
    """Bytes at the peak that could be on the host meanwhile: values that the op there does not read."""
    graph, steps = timeline.problem.graph, timeline.schedule.steps
    op = steps[timeline.peak_step].op if timeline.peak_step < len(steps) else None
    read = () if op is None else (*graph.ops[op].inputs, *graph.ops[op].replay_inputs)
    idle = _live_before(graph, steps, timeline.peak_step).intersection(graph.decidable).difference(read)
    return sum(graph.values[v].size_bytes for v in idle if graph.values[v].size_bytes >= timeline.problem.min_offload_bytes)


def baseline_too_large(timeline: Timeline, name: str) -> InfeasibleBudget:
    """Return the error for a baseline, which looks at no budget, whose plan does not fit."""
    budget = f"{format_bytes(timeline.problem.budget_bytes)} ({timeline.problem.budget_bytes} bytes)"
    return InfeasibleBudget(
        f"the plan of {name} does not fit {budget}",
        where=_where(timeline),
        why=f"its peak is {format_bytes(timeline.peak_bytes)}",
        try_="--planner milp, which looks for one that does",
    )


def loaded_too_large(timeline: Timeline, static: StaticMemory) -> InfeasibleBudget:
    """Return the error for a loaded plan that needs more than its budget, with the figures of here."""
    problem = timeline.problem
    host = problem.host_budget_bytes
    if host is not None and timeline.host_peak_bytes > host:
        return InfeasibleBudget(
            f"the loaded plan does not fit {format_bytes(host)} ({host} bytes) of host memory here",
            why=f"it offloads {format_bytes(timeline.host_peak_bytes)}",
            try_=f"--host-budget {timeline.host_peak_bytes} if that much can be had, or plan again here",
        )
    budget = f"{format_bytes(problem.budget_bytes)} ({problem.budget_bytes} bytes)"
    return InfeasibleBudget(
        f"the loaded plan does not fit {budget} here",
        where=_where(timeline),
        why=f"its peak is {format_bytes(timeline.peak_bytes)}: {_listed(timeline, static)}",
        try_="plan again here, or with the optimizer and options that the plan was made with",
    )


def _where(timeline: Timeline) -> str:
    """The op at the peak, with its source line."""
    if timeline.peak_step == len(timeline.schedule.steps):
        return "the optimizer step"
    step = timeline.schedule.steps[timeline.peak_step]
    if step.op is None:
        assert step.value is not None
        return f"{step.kind.value.replace('_', ' ')} of {timeline.problem.graph.values[step.value].name}"
    op = timeline.problem.graph.ops[step.op]
    phase = "replayed in the backward" if step.kind.value == "replay" else op.phase.value
    at = f" at {op.source}" if op.source else ""
    return f"{op.target}{at} ({phase})"


def _listed(timeline: Timeline, static: StaticMemory) -> str:
    """The bytes that are live at the peak, by kind."""
    parts = {"static": static.total_bytes, **bytes_at_peak(timeline)}
    return " + ".join(f"{kind} {format_bytes(size)}" for kind, size in parts.items() if size)


def bytes_at_peak(timeline: Timeline) -> dict[str, int]:
    """Return what is live at the peak of ``timeline`` besides static memory, in bytes by kind.

    Kinds: ``saved`` forward values, ``gradients`` that the caller holds, ``backward temporaries``, the peak op's ``outputs`` and
    ``workspace``, ``tangents``, and ``optimizer temporaries``.
    """
    problem, graph, steps = timeline.problem, timeline.problem.graph, timeline.schedule.steps
    at_rest = timeline.peak_step < len(steps) and steps[timeline.peak_step].op is None  # after a step where nothing runs
    totals: Counter[str] = Counter()
    for value in _live_before(graph, steps, timeline.peak_step + at_rest):
        totals[_kind_of(problem, value)] += graph.values[value].size_bytes
    if timeline.peak_step == len(steps):
        totals["optimizer temporaries"] = problem.optimizer_bytes
        return dict(totals)
    if any(_is_backward(graph, s) for s in steps[: timeline.peak_step + 1]):
        totals["tangents"] = graph.given_bytes(Kind.TANGENT)
    step = steps[timeline.peak_step]
    if step.op is None:
        return dict(totals)
    op = graph.ops[step.op]
    totals["workspace"] = problem.costs.workspace_bytes[step.op]
    outputs = sum(graph.values[v].size_bytes for v in op.outputs)
    if step.in_place and op.in_place is not None:
        outputs -= graph.values[op.in_place[0]].size_bytes
    totals["outputs"] = outputs
    return dict(totals)


def _live_before(graph: Graph, steps: Sequence[Step], end: int) -> set[int]:
    """Return the values that are live, or on their way back, before step ``end``."""
    live: set[int] = set()
    for step in steps[:end]:
        if step.op is not None:
            live.update(graph.ops[step.op].outputs)
            if step.in_place:
                live.discard(graph.ops[step.op].in_place[0])  # type: ignore[index]
        elif step.value is not None and step.kind is StepKind.FREE:
            live.discard(step.value)
        elif step.value is not None and step.kind is StepKind.COPY_BACK:
            live.add(step.value)
    return live


def _is_backward(graph: Graph, step: Step) -> bool:
    return step.kind is StepKind.REPLAY or (step.op is not None and step.op >= graph.n_forward)


def _kind_of(problem: Problem, value: int) -> str:
    if value in problem.graph.gradients:
        return "gradients"
    return "saved" if problem.graph.is_forward_value[value] else "backward temporaries"
