"""Replays a schedule step by step and trusts nobody.

The rules that a schedule must obey, checked here from the graph alone; no code is shared with the planners, the builder of
schedules or the simulator:

- every op that always runs is computed exactly once, in graph order; an optional op at most once, in its place;
- the forward part ends with the last first run of a forward op, and the frees and waits that follow it; the backward part starts
  with the replay, copy back or backward op after that;
- forward ops are replayed in either part, after their first run, and only where the graph says that a second run gives the same
  bits; backward ops never;
- every read finds a copy: the inputs of each run, and what a replay reads besides;
- only a live copy is freed, never a given value, nor one that the caller holds;
- a value is copied out while it is live, once, in the forward part; it is neither freed nor overwritten before that copy was
  waited for, and its copy back is queued after that, in the backward part, while it is not on the device; it is read, and
  freed, only after its return was waited for;
- an op works in place only where its graph allows it and the input may end there; not in the backward part over a copy that the
  forward part made, for a second backward may read that again;
- at the end of the forward the new values of buffers are still there, to be copied: they stay from their first making on, for a
  replay may not make them;
- at the end of the step exactly what the caller holds is live;
- the memory, what is on its way back, tangents (in the backward part), workspace and the optimizer step counted, never exceeds
  the budget; nor does what was copied out exceed the host budget.

Not looked at: whether the steps are the cheapest ones. A replay that nobody needs is allowed if it is freed again. Whether a
replay sees the buffers that its first run saw is for the graph to say (`Op.replayable`): batch norm may be replayed, for its
results do not depend on the statistics that it updates.
"""

from __future__ import annotations

from actsolve.errors import ScheduleError
from actsolve.graph import Kind, Op
from actsolve.problem import Problem
from actsolve.schedule import Schedule, Step, StepKind


def check(problem: Problem, schedule: Schedule) -> int:
    """Return the exact peak of ``schedule`` in bytes, having replayed it. Takes O(steps + reads).

    Counted are the static bytes, every live copy, all outputs of an op while it runs (also where a copy
    is live already), its workspace, the tangents during the whole backward part, and the temporaries of the
    optimizer beside what the caller holds.

    Raises:
        ScheduleError: a rule of this module's opening text is broken; the message names the step, the
            op or value, and the rule.
    """
    replayer = _Replayer(problem, schedule)
    for number, step in enumerate(schedule.steps):
        replayer.take(number, step)
    return replayer.finish()


class _Replayer:
    """The state of the device while a schedule is replayed."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        graph = problem.graph
        if len(problem.costs.workspace_bytes) != len(graph.ops) or min(problem.costs.workspace_bytes, default=0) < 0:
            raise ScheduleError("the workspace bytes of the problem are not one non-negative number per op")
        self.problem = problem
        self.graph = graph
        self.n_forward = sum(1 for op in graph.ops if op.phase.value == "forward")
        self.held = {*graph.outputs, *graph.gradients}
        self.updates = {new: buffer for new, buffer in graph.updates if graph.values[new].kind is Kind.ACTIVATION}
        self.tangent_bytes = sum(v.size_bytes for v in graph.values if v.kind is Kind.TANGENT)
        first_runs = (number for number, step in enumerate(schedule.steps) if self._is_of_forward(step))
        self.last_first_run = max(first_runs, default=-1)  # of the forward

        self.live: set[int] = set()
        self.of_backward: set[int] = set()  # values whose latest copy the backward part made
        self.leaving: set[int] = set()  # live, with a copy out that was not waited for
        self.on_host: set[int] = set()  # with a whole copy there
        self.arriving: set[int] = set()  # with memory on the device, and not readable yet
        self.host_bytes = 0
        self.current = problem.static_bytes
        self.next_op = 0
        self.in_backward = False
        self.peak, self.peak_where = problem.static_bytes, "before the first step"
        self.freed_new: dict[int, str] = {}  # values for buffers that were freed: right if the forward has ended by then

    def _is_of_forward(self, step: Step) -> bool:
        return step.kind is StepKind.COMPUTE and type(step.op) is int and 0 <= step.op < self.n_forward

    def take(self, number: int, step: Step) -> None:
        """Do one step, or raise."""
        if step.kind is StepKind.FREE:
            self._free(number, step)
        elif step.kind in (StepKind.COMPUTE, StepKind.REPLAY):
            self._run(number, step)
        elif step.kind in (StepKind.COPY_OUT, StepKind.WAIT_OUT, StepKind.COPY_BACK, StepKind.WAIT_BACK):
            self._copy(number, step)
        else:
            raise ScheduleError(f"step {number} is of no known kind", why=repr(step.kind))

    def finish(self) -> int:
        """Check what must hold after the last step; return the peak."""
        end = len(self.graph.ops)
        self._skip_to(end, where="the end of the schedule")
        if not self.in_backward:
            self._check_updates()
        held = {v for v in self.held if self.graph.values[v].kind is Kind.ACTIVATION}
        if leaked := sorted(self.live - held):
            raise ScheduleError(
                f"{self._name(leaked[0])} is still live at the end of the step", why="only what the caller holds may be"
            )
        if lost := sorted(held - self.live):
            raise ScheduleError(f"{self._name(lost[0])} is not live at the end of the step", why="the caller holds it")
        for left, what in ((self.leaving, "copied out"), (self.arriving, "copied back")):
            if left:
                raise ScheduleError(f"{self._name(min(left))} is {what} and that is never waited for")
        if self.in_backward:
            self.current -= self.tangent_bytes
        self._reach(self.current + self.problem.optimizer_bytes, "the optimizer step")
        if self.peak > self.problem.budget_bytes:
            raise ScheduleError(
                f"the schedule needs {self.peak} bytes, more than its budget of {self.problem.budget_bytes} bytes",
                where=self.peak_where,
            )
        host_budget = self.problem.host_budget_bytes
        if host_budget is not None and self.host_bytes > host_budget:
            raise ScheduleError(f"{self.host_bytes} bytes are offloaded, more than the host's budget of {host_budget} bytes")
        return self.peak

    def _copy(self, number: int, step: Step) -> None:
        value = step.value
        if type(value) is not int or not 0 <= value < len(self.graph.values) or step.op is not None or step.in_place:
            raise ScheduleError(f"step {number} copies no value of the graph", why=repr(step))
        name, where = self._name(value), f"step {number}: {step.kind.value} {self._name(value)}"
        if step.kind is StepKind.COPY_OUT:
            if value not in self.live:
                raise ScheduleError(f"{name} is copied out and not live", where=where)
            if value in self.leaving or value in self.on_host:
                raise ScheduleError(f"{name} is copied out twice", where=where)
            if self.in_backward:
                raise ScheduleError(f"{name} is copied out in the backward", where=where)
            self.leaving.add(value)
            self.host_bytes += self.graph.values[value].size_bytes
        elif step.kind is StepKind.WAIT_OUT:
            if value not in self.leaving:
                raise ScheduleError(f"the copy out of {name} is waited for, and there is none", where=where)
            self.leaving.remove(value)
            self.on_host.add(value)
        elif step.kind is StepKind.COPY_BACK:
            self._enter_backward(where)
            if value not in self.on_host:
                raise ScheduleError(f"{name} is copied back before its copy out has ended", where=where)
            if value in self.live or value in self.arriving:
                raise ScheduleError(f"{name} is copied back and on the device already", where=where)
            self.arriving.add(value)
            self.current += self.graph.values[value].size_bytes
            self._reach(self.current, where)
        else:
            if value not in self.arriving:
                raise ScheduleError(f"the copy back of {name} is waited for, and there is none", where=where)
            self.arriving.remove(value)
            self.live.add(value)
            self.of_backward.add(value)

    def _run(self, number: int, step: Step) -> None:
        if type(step.op) is not int or not 0 <= step.op < len(self.graph.ops) or step.value is not None:
            raise ScheduleError(f"step {number} runs no op of the graph", why=repr(step))
        index, op = step.op, self.graph.ops[step.op]
        where = f"step {number}: {step.kind.value} {op.name}"
        if step.kind is StepKind.REPLAY:
            self._check_replay(number, index, where)
            reads = (*op.inputs, *op.replay_inputs)
        else:
            self._check_order(index, op, where)
            reads = op.inputs
        for value in reads:
            if value not in self.live and self.graph.values[value].kind is Kind.ACTIVATION:
                late = value in self.arriving
                what = "is read before its return was waited for" if late else "is read and not live"
                raise ScheduleError(f"{self._name(value)} {what}", where=where)
        self._make(step, op, where)

    def _check_order(self, index: int, op: Op, where: str) -> None:
        """The first run of an op comes in its place."""
        if index < self.next_op:
            raise ScheduleError(f"{op.name} is computed twice or out of order", where=where)
        if index >= self.n_forward:
            self._enter_backward(where)
        elif self.freed_new:
            value, freed_where = next(iter(self.freed_new.items()))
            raise ScheduleError(f"{self._name(value)} is freed before it is copied into its buffer", where=freed_where)
        self._skip_to(index, where)
        self.next_op = index + 1

    def _check_replay(self, number: int, index: int, where: str) -> None:
        """A replay is allowed, after the first run; once the forward is over, it is in the backward part."""
        op = self.graph.ops[index]
        if index >= self.n_forward:
            raise ScheduleError("a backward op is replayed", where=where)
        if not op.replayable:
            raise ScheduleError("an op that must not be replayed is", where=where, why=op.why_not)
        if number > self.last_first_run:
            self._enter_backward(where)
        if index >= self.next_op:
            raise ScheduleError(f"{op.name} is replayed before it was computed", where=where)

    def _enter_backward(self, where: str) -> None:
        if not self.in_backward:
            self._skip_to(self.n_forward, where)
            self._check_updates()
            self.in_backward = True
            self.current += self.tangent_bytes

    def _skip_to(self, index: int, where: str) -> None:
        """Pass over ops that need not run."""
        for op in self.graph.ops[self.next_op : index]:
            if not op.optional:
                raise ScheduleError(f"{op.name} was not computed", where=where, why="it always runs, before this")
        self.next_op = max(self.next_op, index)

    def _make(self, step: Step, op: Op, where: str) -> None:
        """Count the run, and make its outputs live."""
        sizes = self.graph.values
        overwritten = None
        if step.in_place:
            overwritten = self._overwritten(op, where)
            self.live.remove(overwritten)
            self.current -= sizes[overwritten].size_bytes
        while_running = self.current + sum(sizes[v].size_bytes for v in op.outputs)
        assert step.op is not None
        self._reach(while_running + self.problem.costs.workspace_bytes[step.op], where)
        for value in op.outputs:
            if value not in self.live and value not in self.arriving:
                self.live.add(value)
                self.current += sizes[value].size_bytes
                (self.of_backward.add if self.in_backward else self.of_backward.discard)(value)

    def _overwritten(self, op: Op, where: str) -> int:
        """The value that ends where ``op`` writes in place, if it may."""
        if op.in_place is None:
            raise ScheduleError("an op works in place that cannot", where=where)
        source, target = op.in_place
        name = self._name(source)
        if source not in self.live or source not in op.inputs or target not in op.outputs:
            raise ScheduleError(f"{name} is overwritten and not live", where=where)
        if self.graph.values[source].size_bytes != self.graph.values[target].size_bytes:
            raise ScheduleError(f"{name} is overwritten by a value of another size", where=where)
        if source in self.held:
            raise ScheduleError(f"{name} is overwritten and the caller holds it", where=where)
        if source in self.updates and not self.in_backward:
            raise ScheduleError(f"{name} is overwritten before it is copied into its buffer", where=where)
        if source in self.leaving:
            raise ScheduleError(f"{name} is overwritten before its copy out was waited for", where=where)
        if target in self.live or target in self.arriving:
            raise ScheduleError(f"{name} is overwritten by {self._name(target)}, of which a copy is live", where=where)
        if self.in_backward and source not in self.of_backward:
            raise ScheduleError(f"{name} is overwritten in the backward and the forward made it", where=where)
        return source

    def _free(self, number: int, step: Step) -> None:
        value = step.value
        if type(value) is not int or not 0 <= value < len(self.graph.values) or step.op is not None or step.in_place:
            raise ScheduleError(f"step {number} frees no value of the graph", why=repr(step))
        where = f"step {number}: free {self._name(value)}"
        if self.graph.values[value].kind is not Kind.ACTIVATION:
            raise ScheduleError("a given value is freed", where=where)
        if value in self.held:
            raise ScheduleError("a value that the caller holds is freed", where=where)
        if value in self.leaving:
            raise ScheduleError("a value is freed before its copy out was waited for", where=where)
        if value in self.arriving:
            raise ScheduleError("a value is freed before its return was waited for", where=where)
        if value not in self.live:
            raise ScheduleError("a value is freed that is not live", where=where, why="it was freed before, or never made")
        if value in self.updates and not self.in_backward:
            self.freed_new[value] = where
        self.live.remove(value)
        self.current -= self.graph.values[value].size_bytes

    def _check_updates(self) -> None:
        """Called at the end of the forward, when the new values are copied into their buffers."""
        for new, buffer in self.updates.items():
            if new not in self.live and new not in self.freed_new:
                why = f"it is to be copied into {self._name(buffer)}"
                raise ScheduleError(f"{self._name(new)} is not live at the end of the forward", why=why)

    def _reach(self, memory_bytes: int, where: str) -> None:
        if memory_bytes > self.peak:
            self.peak, self.peak_where = memory_bytes, where

    def _name(self, value: int) -> str:
        return self.graph.values[value].name
