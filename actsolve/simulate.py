"""What a schedule does: memory at every step, two copy queues, stalls, and the time of the step.

Memory during a run = static + every value live before it + the outputs that it makes + its workspace; an output written
in place takes the storage of its input. Given values other than tangents are part of the static bytes. Tangents are held by
autograd during the whole backward. After the last run the optimizer works beside what the caller holds.

Copies run beside the computation, in order and one at a time per direction (`copy_queues`). A copy begins no earlier than the
computation reaches the step that queues it. A wait is a stall for as long as the copy takes from then on. What is copied
back takes device memory from the moment it is queued. What was copied out takes host memory to the end of the step: a second
backward may ask for it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actsolve.copy_queues import CopyQueues, QueuedCopy
from actsolve.errors import ScheduleError
from actsolve.graph import Kind
from actsolve.plan import Plan
from actsolve.plan_schedule import schedule_of
from actsolve.problem import Problem
from actsolve.schedule import Schedule, Step, StepKind
from actsolve.split import first_backward_step


@dataclass(frozen=True)
class Timeline:
    """The simulated training step.

    Attributes:
        problem: What was planned for.
        schedule: What was simulated.
        memory_bytes: Per step of the schedule, the device memory while it runs (after it, where nothing runs);
            one entry more at the end, for the optimizer step.
        start_s: Per step of the schedule, when it begins; one entry more, the end of the last one.
        step_s: Seconds of the whole step.
        recompute_s: Seconds of that spent in replays.
        stall_s: Seconds of that spent waiting for copies.
        copies: All copies, in the order in which they were queued.
    """

    problem: Problem
    schedule: Schedule
    memory_bytes: tuple[int, ...]
    start_s: tuple[float, ...]
    step_s: float
    recompute_s: float
    stall_s: float = 0.0
    copies: tuple[QueuedCopy, ...] = ()

    @property
    def extra_s(self) -> float:
        """Seconds over keeping everything: replays and stalls."""
        return self.recompute_s + self.stall_s

    @cached_property
    def d2h_bytes(self) -> int:
        """Bytes copied from device to host."""
        return self._copied_bytes(StepKind.COPY_OUT)

    @cached_property
    def h2d_bytes(self) -> int:
        """Bytes copied from host to device."""
        return self._copied_bytes(StepKind.COPY_BACK)

    @property
    def host_peak_bytes(self) -> int:
        """Bytes of host memory in use at the end of the step: all that was copied out."""
        return self.d2h_bytes

    def _copied_bytes(self, kind: StepKind) -> int:
        sizes = self.problem.graph.values
        return sum(sizes[s.value].size_bytes for s in self.schedule.steps if s.kind is kind and s.value is not None)

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
        """Whether the peak is within the budget, and the host's within its own."""
        host = self.problem.host_budget_bytes
        return self.peak_bytes <= self.problem.budget_bytes and (host is None or self.host_peak_bytes <= host)


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Run ``schedule`` on plain numbers. Takes O(steps + reads).

    The schedule is trusted; `actsolve.check.check` is the one that doubts it.

    Raises:
        ScheduleError: it copies, and the problem has no links.
    """
    return _Simulation(problem).run(schedule)


def timeline_of(problem: Problem, plan: Plan) -> Timeline:
    """Return the simulated schedule of a plan.

    Raises:
        ScheduleError: the plan does without what cannot be replayed, or replays what it cannot.
    """
    return simulate(problem, schedule_of(problem.graph, plan))


class _Simulation:
    """The state of the device while a schedule runs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = [v.size_bytes for v in problem.graph.values]
        self.live: set[int] = set()  # there, or on its way back
        self.current = problem.static_bytes
        self.now_s = self.recompute_s = self.stall_s = 0.0
        self.in_backward = False
        self.queues = CopyQueues(problem.links) if problem.links is not None else None
        self.latest: dict[tuple[int, bool], QueuedCopy] = {}  # (value, out) -> its copy

    def run(self, schedule: Schedule) -> Timeline:
        graph = self.problem.graph
        tangent_bytes = graph.given_bytes(Kind.TANGENT)
        backward = first_backward_step(graph, schedule)
        memory: list[int] = []
        starts: list[float] = []
        for number, step in enumerate(schedule.steps):
            starts.append(self.now_s)
            if step.op is None:
                self._move(step)
                memory.append(self.current)
                continue
            if not self.in_backward and number >= backward:
                self.in_backward = True
                self.current += tangent_bytes
            memory.append(self._compute(step))
        if self.in_backward:
            self.current -= tangent_bytes
        memory.append(self.current + self.problem.optimizer_bytes)
        starts.append(self.now_s)
        copies = tuple(self.queues.copies) if self.queues is not None else ()
        figures = (self.now_s, self.recompute_s, self.stall_s)
        return Timeline(self.problem, schedule, tuple(memory), tuple(starts), *figures, copies)

    def _compute(self, step: Step) -> int:
        """Run an op; return the memory meanwhile."""
        assert step.op is not None
        op, costs = self.problem.graph.ops[step.op], self.problem.costs
        made = sum(self.sizes[v] for v in op.outputs)
        left = sum(self.sizes[v] for v in op.outputs if v not in self.live)  # copies of live values are dropped at its end
        if step.in_place:
            assert op.in_place is not None
            made -= self.sizes[op.in_place[0]]
            left -= self.sizes[op.in_place[0]]
        memory = self.current + made + costs.workspace_bytes[step.op]
        self.current += left
        self.live.update(op.outputs)
        if step.in_place and op.in_place is not None:
            self.live.discard(op.in_place[0])
        if step.kind is StepKind.REPLAY:
            self.recompute_s += costs.replay_seconds[step.op]
            self.now_s += costs.replay_seconds[step.op]
        else:
            self.now_s += costs.seconds[step.op]
        return memory

    def _move(self, step: Step) -> None:
        """Free, copy or wait."""
        value = step.value
        assert value is not None
        if step.kind is StepKind.FREE:
            self.live.discard(value)
            self.current -= self.sizes[value]
            return
        if self.queues is None:
            raise ScheduleError("a schedule copies, and no link is known", where=self.problem.graph.values[value].name)
        if step.kind in (StepKind.COPY_OUT, StepKind.COPY_BACK):
            out = step.kind is StepKind.COPY_OUT
            self.latest[value, out] = self.queues.queue(value, self.sizes[value], out=out, at_s=self.now_s)
            if not out:
                self.live.add(value)
                self.current += self.sizes[value]
            return
        end_s = self.queues.wait(self.latest[value, step.kind is StepKind.WAIT_OUT], self.now_s)
        self.stall_s += end_s - self.now_s
        self.now_s = end_s
