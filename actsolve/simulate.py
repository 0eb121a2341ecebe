"""What a schedule does: memory at every step, and the time of the step.

Memory during a run = static + every value live before it + the outputs that it makes + its workspace; an output written
in place takes the storage of its input. Given values other than tangents are part of the static bytes. Tangents are held by
autograd during the whole backward. After the last run the optimizer works beside what the caller holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actsolve.graph import Kind
from actsolve.problem import Problem
from actsolve.schedule import Schedule, Step, StepKind


@dataclass(frozen=True)
class Timeline:
    """The simulated training step.

    Attributes:
        problem: What was planned for.
        schedule: What was simulated.
        memory_bytes: Per step of the schedule, the device memory while it runs (after it, for a FREE);
            one entry more at the end, for the optimizer step.
        step_s: Seconds of the whole step.
        recompute_s: Seconds of that spent in replays.
    """

    problem: Problem
    schedule: Schedule
    memory_bytes: tuple[int, ...]
    step_s: float
    recompute_s: float

    @cached_property
    def peak_bytes(self) -> int:
        """The most device memory in use at any moment."""
        return max(self.memory_bytes)

    @cached_property
    def peak_step(self) -> int:
        """Index of the first step at the peak; ``len(schedule.steps)`` is the optimizer step."""
        return self.memory_bytes.index(self.peak_bytes)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.problem.budget_bytes


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Run ``schedule`` on plain numbers. Takes O(steps + reads).

    The schedule is trusted; `actsolve.check.check` is the one that doubts it.
    """
    graph, costs = problem.graph, problem.costs
    sizes = [v.size_bytes for v in graph.values]
    tangent_bytes = graph.given_bytes(Kind.TANGENT)
    live: set[int] = set()
    current = problem.static_bytes
    memory: list[int] = []
    base_s = recompute_s = 0.0
    in_backward = False

    for step in schedule.steps:
        if step.kind is StepKind.FREE:
            assert step.value is not None
            live.discard(step.value)
            current -= sizes[step.value]
            memory.append(current)
            continue
        assert step.op is not None
        if not in_backward and (step.kind is StepKind.REPLAY or step.op >= graph.n_forward):
            in_backward = True
            current += tangent_bytes
        made, kept = _made_and_kept(problem, step, live, sizes)
        memory.append(current + made + costs.workspace_bytes[step.op])
        current += kept
        live.update(graph.ops[step.op].outputs)
        if step.in_place:
            live.discard(graph.ops[step.op].in_place[0])  # type: ignore[index]
        if step.kind is StepKind.REPLAY:
            recompute_s += costs.replay_seconds[step.op]
        else:
            base_s += costs.seconds[step.op]

    if in_backward:
        current -= tangent_bytes
    memory.append(current + problem.optimizer_bytes)
    return Timeline(problem, schedule, tuple(memory), base_s + recompute_s, recompute_s)


def _made_and_kept(problem: Problem, step: Step, live: set[int], sizes: list[int]) -> tuple[int, int]:
    """Bytes that a run adds while it runs, and bytes that it leaves: copies of live values are dropped at its end."""
    op = problem.graph.ops[step.op]  # type: ignore[index]
    made = sum(sizes[v] for v in op.outputs)
    kept = sum(sizes[v] for v in op.outputs if v not in live)
    if step.in_place:
        overwritten = sizes[op.in_place[0]]  # type: ignore[index]
        made -= overwritten
        kept -= overwritten
    return made, kept
