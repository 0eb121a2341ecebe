"""From a captured step and its settings to a `Problem` without a budget: costs, links, static memory, pins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actsolve.capture.captured import Captured
from actsolve.capture.eager_regions import call_of, taken_by
from actsolve.capture.joint import Joint
from actsolve.cost.hardware import profile
from actsolve.cost.known_links import LinkSpeed
from actsolve.cost.link_speed import host_budget_of, links_of
from actsolve.cost.measure import measure_costs
from actsolve.cost.optimizers import optimizer_memory
from actsolve.cost.roofline import roofline_costs
from actsolve.graph import Kind
from actsolve.links import Links
from actsolve.pins import pinned_values
from actsolve.problem import Costs, Problem
from actsolve.settings import Settings
from actsolve.static_memory import GPU_RESERVE, Reserve, StaticMemory, sharded, static_memory
from actsolve.training_step import TrainingStep
from actsolve.units import MAX_BYTES


def costs_of(captured: Captured, hardware: str, measuring: Callable[[int, int], None] | None = None) -> Costs:
    """Return what each op costs: measured here, or modelled by a profile.

    Args:
        captured: The trace.
        hardware: ``auto`` measures; else a profile's name.
        measuring: Called with how many op signatures have been measured, and of how many.
    """
    if hardware == "auto":
        return measure_costs(captured.graph, captured.op_nodes, progress=measuring)
    costs = roofline_costs(captured.graph, profile(hardware))
    workspace_bytes = list(costs.workspace_bytes)
    for index, op in enumerate(captured.graph.ops):  # of what is left in eager it is known, for that ran
        node = captured.op_nodes[index]
        if node is not None and (taken := taken_by(node)) is not None:
            workspace_bytes[index] = max(0, taken.peak_bytes - sum(captured.graph.values[v].size_bytes for v in op.outputs))
    return replace(costs, workspace_bytes=tuple(workspace_bytes))


def link_of(step: TrainingStep, settings: Settings) -> LinkSpeed:
    """Return how fast copies to the host are."""
    return links_of(
        settings.hardware, step.device, h2d=settings.h2d, d2h=settings.d2h, host_budget_bytes=settings.host_budget_bytes
    )


def problem_of(
    captured: Captured, costs: Costs, step: TrainingStep, settings: Settings, links: Links | None = None
) -> tuple[Problem, StaticMemory]:
    """Return the problem without a budget yet, and the static memory by kind, without a reserve.

    Of a shard, the gradients are scattered as they are made, so that the step holds none at its end; its part of them is static.
    """
    graph, n = captured.graph, settings.shards
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    memory = optimizer_memory(settings.optimizer, parameters)
    gradient_bytes = sum(p.numel() * p.element_size() for p in parameters) if n > 1 or settings.grads == "accumulate" else 0
    static = static_memory(graph, memory, accumulated_bytes=gradient_bytes, given_bytes=settings.static_bytes)
    kept, recomputed = pinned_values(graph, settings.keep, settings.recompute)
    if n > 1:
        graph, static = replace(graph, gradients=()), sharded(static, n)
    problem = Problem(
        graph,
        costs,
        MAX_BYTES,
        static.total_bytes,
        -(-memory.temporary_bytes // n),
        pinned_keep=kept,
        pinned_recompute=recomputed,
        links=links,
        host_budget_bytes=None if links is None else host_budget_of(settings.hardware, settings.host_budget_bytes),
    )
    return problem, static


def notes_of(settings: Settings, link: LinkSpeed, joint: Joint) -> tuple[str, ...]:
    """Return what a report has to say of the problem."""
    questions = [node for node in joint.questions if call_of(node) is None]
    asked = len(questions)
    source = joint.asked_at(joint.questions.index(questions[0])) if asked else None
    data = f"Python depends on data {asked} time{'s' if asked > 1 else ''}{f', first in {source}' if source else ''}."
    data += " The plan is for what it found; other data are planned for when they come."
    shard = (
        f"One of {settings.shards} shards: parameters that are gathered for a layer are not counted; --reserve leaves them room."
    )
    regions = f"Left in eager: {', '.join(joint.eager)}. They run once more in the backward, and may take more with other data."
    notes = (link.note, shard if settings.shards > 1 else "", data if asked else "", regions if joint.eager else "")
    return tuple(note for note in notes if note)


def reserve_of(step: TrainingStep, settings: Settings) -> Reserve:
    """Return what is to be left free for the allocator; a named profile is that of a GPU, wherever the tensors are."""
    if settings.static_bytes is not None:
        return Reserve()
    if settings.reserve_bytes is not None:
        return Reserve(size_bytes=settings.reserve_bytes)
    devices = {p.device.type for p in step.model.parameters()}
    return Reserve(share=GPU_RESERVE) if "cuda" in devices or settings.hardware != "auto" else Reserve()


def loss_inside(step: TrainingStep, captured: Captured) -> bool:
    """Whether the loss is part of the step: by `loss_fn`, or since scalars are all that the backward can start from."""
    tangents = [v for v in captured.graph.values if v.kind is Kind.TANGENT]
    return step.loss_fn is not None or all(v.shape == () for v in tangents)
