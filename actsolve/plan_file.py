"""Plan files, format ``actsolve-plan-1``: the decisions, the full schedule, and what is known of their quality.

Ops and values are named, not numbered, so that a plan reads without its graph. A step is a pair such as
``["compute", "mm_3"]``, ``["free", "relu_2"]`` or ``["copy_out", "relu_2"]``. A plan belongs to one graph: it carries the
graph's fingerprint, and a short digest of each op, with which a mismatch can be explained.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, Literal

from pydantic import FailFast, Field, ValidationError

from actsolve.check import check
from actsolve.errors import FileFormatError, ScheduleError
from actsolve.graph import Graph
from actsolve.json_file import MAX_NUMBER, Count, FileModel, Name, Seconds, Text, first_problem, read_model, shown, write_json
from actsolve.links import Links
from actsolve.plan import Copies, Decision, Plan, Status
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, Step, StepKind
from actsolve.split import first_backward_step

FORMAT = "actsolve-plan-1"
_WHAT = "plan file"
_MAX_LENGTH = 10_000_000

_Run = Literal["compute", "compute_in_place", "replay", "replay_in_place"]
_Move = Literal["free", "copy_out", "wait_out", "copy_back", "wait_back"]
StepPair = tuple[_Run | _Move, Name]
Share = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Speed = Annotated[float, Field(ge=1, le=MAX_NUMBER)]

_RUNS: Final[dict[str, tuple[StepKind, bool]]] = {
    "compute": (StepKind.COMPUTE, False),
    "compute_in_place": (StepKind.COMPUTE, True),
    "replay": (StepKind.REPLAY, False),
    "replay_in_place": (StepKind.REPLAY, True),
}
_CODES: Final = {kind_and_place: code for code, kind_and_place in _RUNS.items()}


class GraphStamp(FileModel):
    """Which graph a plan is for.

    Attributes:
        name: What was captured, for display.
        fingerprint: `Graph.fingerprint`.
        n_forward: Number of forward ops.
    """

    name: Text = ""
    fingerprint: Name
    n_forward: Count


class LinkSpeeds(FileModel):
    """The link that was planned for, in bytes per second; the fields of `Links`."""

    d2h: Speed
    h2d: Speed
    d2h_both: Speed | None = None
    h2d_both: Speed | None = None


class Predicted(FileModel):
    """What the simulator says of the plan."""

    peak_bytes: Count
    step_s: Seconds
    recompute_s: Seconds = 0.0
    stall_s: Seconds = 0.0
    d2h_bytes: Count = 0
    h2d_bytes: Count = 0
    host_peak_bytes: Count = 0


class KeepAll(FileModel):
    """What the simulator says of keeping everything."""

    peak_bytes: Count
    step_s: Seconds


class Baseline(FileModel):
    """What the simulator says of a baseline; no figures where it does not apply, or found nothing."""

    peak_bytes: Count | None = None
    step_s: Seconds | None = None
    fits: bool = False
    note: Text = ""


class PlanFile(FileModel):
    """A plan as it is saved. Seconds, bytes and shares are as in the output of ``actsolve optimize --json``.

    Attributes:
        actsolve: Version that wrote it.
        target: What was optimized, as the user named it.
        static_bytes: The static memory, by kind.
        links: The link that was planned for; None: nothing is offloaded.
        host_budget_bytes: The cap on host memory that was planned for; None for no cap.
        decisions: Per decidable value. Empty where no plan was found, like `steps`.
        steps: The schedule: what is done, and to which op or value.
        objective_s: Extra seconds over keep-all, as simulated.
        bound_s: Proven lower bound on them, over the plans of the planner's class; None if there is none.
        gap: Share of `objective_s` that is not proven; None without a bound.
        step_gap: The same difference as a share of the step time.
        global_bound_s: Proven lower bound over every schedule with these first runs, or every one that replays in the backward.
        op_digests: Eight hexadecimal digits per op of the graph, to find the first op that differs.
    """

    format: Literal["actsolve-plan-1"]
    actsolve: Text
    target: Text
    graph: GraphStamp
    planner: Name
    status: Status
    note: Text = ""
    budget_bytes: Count
    static_bytes: dict[Name, Count] = Field(default_factory=dict)
    optimizer_bytes: Count = 0
    links: LinkSpeeds | None = None
    host_budget_bytes: Count | None = None
    objective_s: Seconds | None = None
    bound_s: Seconds | None = None
    gap: Share | None = None
    step_gap: Share | None = None
    global_bound_s: Seconds | None = None
    solve_s: Seconds = 0.0
    predicted: Predicted | None = None
    keep_all: KeepAll | None = None
    baselines: dict[Name, Baseline] = Field(default_factory=dict)
    decisions: dict[Name, Decision] = Field(default_factory=dict)
    steps: Annotated[tuple[StepPair, ...], FailFast(), Field(max_length=_MAX_LENGTH)] = ()
    op_digests: Annotated[tuple[Name, ...], FailFast(), Field(max_length=_MAX_LENGTH)]

    def link_speeds(self) -> Links | None:
        """Return the link that was planned for."""
        return None if self.links is None else Links(**self.links.model_dump())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan. The file appears whole or not at all.

        Raises:
            UsageError: the path cannot be written.
        """
        write_json(path, self.model_dump(mode="json"), what=_WHAT)

    def check_matches(self, graph: Graph) -> None:
        """Return if the plan was made for exactly this graph.

        Raises:
            FileFormatError: it was made for another; the message says what differs.
        """
        if self.graph.fingerprint != graph.fingerprint:
            raise FileFormatError(
                "the plan was made for another training step",
                where=shown(f"plan of {self.target or self.graph.name}"),
                why=shown(self._difference(graph)),
                try_="plan again for this model, these inputs and this mode, or load the model that the plan is for",
            )

    def _difference(self, graph: Graph) -> str:
        """What tells the plan's graph from ``graph``, as far as the digests show."""
        theirs, ours = (self.graph.n_forward, len(self.op_digests)), (graph.n_forward, len(graph.ops))
        counts = "" if theirs == ours else f"it has {theirs[0]} forward ops of {theirs[1]} ops, this one {ours[0]} of {ours[1]}; "
        for index, digest in enumerate(self.op_digests[: len(graph.ops)]):
            if digest != _op_digest(graph, index):
                op = graph.ops[index]
                at = f" at {op.source}" if op.source else ""
                return f"{counts}the first op that differs is op {index}, here {op.name} ({op.target}){at}"
        return counts + (
            "the shared ops are equal" if counts else "all ops are equal; outputs, gradients or buffer updates differ"
        )

    def decode(self, graph: Graph) -> tuple[Schedule, frozenset[int]]:
        """Return the schedule and the kept values, as indices into ``graph``. The schedule has passed the checker.

        Which values are offloaded, the schedule says (`offloaded_by`). Whether it fits a budget with the workspace of its ops is
        not looked at here: that is `check` on a problem with real costs.

        Raises:
            FileFormatError: the plan is of another graph, holds no schedule, names what the graph has not,
                its steps do not make a valid training step or copy over no link, or its decisions are not those of its steps.
        """
        self.check_matches(graph)
        if not self.steps:
            raise self._malformed("it holds no schedule", f"its status is {self.status.value!r}")
        if not Plan(self.planner, status=self.status).found:
            raise self._malformed(f"it holds a schedule, and its status is {self.status.value!r}")
        values = {v.name: index for index, v in enumerate(graph.values)}
        ops = {o.name: index for index, o in enumerate(graph.ops)}
        schedule = Schedule(tuple(self._step(code, name, ops, values) for code, name in self.steps))
        decidable = {graph.values[v].name for v in graph.decidable}
        if wrong := sorted(decidable.symmetric_difference(self.decisions)):
            raise self._malformed(f"decisions: {wrong[0]} is missing, or is no value to decide on")
        n = len(graph.ops)
        unlimited = Problem(graph, Costs((0.0,) * n, (0.0,) * n, (0,) * n), budget_bytes=n * MAX_NUMBER)
        try:
            check(replace(unlimited, host_budget_bytes=self.host_budget_bytes), schedule)
            offloaded = offloaded_by(graph, schedule)
        except ScheduleError as error:
            raise self._malformed(f"its steps are no valid schedule: {error.what}", error.where) from None
        self._check_decisions({values[name]: decision for name, decision in self.decisions.items()}, graph, schedule, offloaded)
        return schedule, frozenset(values[name] for name, d in self.decisions.items() if d is Decision.KEEP)

    def _check_decisions(
        self, decisions: dict[int, Decision], graph: Graph, schedule: Schedule, offloaded: dict[int, Copies]
    ) -> None:
        """The decisions are those of the steps."""
        if offloaded and self.links is None:
            raise self._malformed("its steps copy to the host, and it names no speed of a link")
        if wrong := sorted(offloaded.keys() - decisions.keys()):
            raise self._malformed(f"a step copies {graph.values[wrong[0]].name}, which is no value to decide on")
        saved, read = _saved_and_read(graph, schedule)
        used = saved | read
        for value, decision in decisions.items():
            if value in offloaded:
                possible = {Decision.OFFLOAD}
            else:
                possible = {Decision.KEEP} if value in saved else {Decision.RECOMPUTE}
                if value not in used:  # it may well be called kept: it ends with its last read, in the forward
                    possible.add(Decision.KEEP)
            if decision not in possible:
                name = graph.values[value].name
                raise self._malformed(f"decisions: {name} is {str(decision)!r}, and the steps say otherwise")

    def _step(self, code: str, name: str, ops: dict[str, int], values: dict[str, int]) -> Step:
        run = _RUNS.get(code)
        index = (values if run is None else ops).get(name)
        if index is None:
            raise self._malformed(f"a step names {name}, which the graph has not")
        if run is None:
            return Step(StepKind(code), value=index)
        kind, in_place = run
        return Step(kind, op=index, in_place=in_place)

    def _malformed(self, why: str, detail: str | None = None) -> FileFormatError:
        why = shown(why) + (f" ({shown(detail)})" if detail else "")
        return FileFormatError("the plan cannot be used", where=shown(f"plan of {self.target}"), why=why, try_="plan again")


def plan_file(problem: Problem, plan: Plan, schedule: Schedule | None, *, target: str = "", **figures: Any) -> PlanFile:
    """Return the file content for a plan.

    Args:
        problem: What was planned for.
        plan: What the planner returned.
        schedule: Its schedule; None where no plan was found.
        target: What was optimized, as the user named it.
        figures: The other fields of `PlanFile`: ``predicted``, ``keep_all``, ``baselines``, ``gap``, ...

    Raises:
        FileFormatError: a figure is negative or not finite, or a name holds a control character.
    """
    graph = problem.graph
    content = {
        "format": FORMAT,
        "actsolve": _version(),
        "target": target,
        "graph": GraphStamp(name=graph.name, fingerprint=graph.fingerprint, n_forward=graph.n_forward),
        "op_digests": tuple(_op_digest(graph, index) for index in range(len(graph.ops))),
        "planner": plan.planner,
        "status": plan.status,
        "note": plan.note,
        "budget_bytes": problem.budget_bytes,
        "optimizer_bytes": problem.optimizer_bytes,
        "links": problem.links,
        "host_budget_bytes": problem.host_budget_bytes,
        "bound_s": plan.bound_s,
        "solve_s": plan.solve_s,
        "decisions": _decisions(graph, plan) if plan.found else {},
        "steps": tuple(_pair(graph, step) for step in schedule.steps) if schedule is not None else (),
    }
    try:
        return PlanFile.model_validate(content | figures)
    except ValidationError as error:
        raise FileFormatError(f"cannot make a {_WHAT}", where=shown(target), why=first_problem(error)) from None


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Return the content of a plan file.

    Raises:
        FileFormatError: the file cannot be read or is malformed.
    """
    return read_model(path, PlanFile, what=_WHAT, format_name=FORMAT)


def offloaded_by(graph: Graph, schedule: Schedule) -> dict[int, Copies]:
    """Return the values that ``schedule`` copies to the host and back, and when, as a plan has it.

    Raises:
        ScheduleError: one of them is never copied back, or more than once; a plan says of each when it comes back.
    """
    free_at: dict[int, int] = {}
    back_at: dict[int, int] = {}
    anchor = len(graph.ops)  # the op that runs next; replays belong to the backward op that they are done for
    for step in reversed(schedule.steps):
        if step.kind is StepKind.COMPUTE and step.op is not None:
            anchor = step.op
        elif step.value is not None and step.kind is StepKind.WAIT_OUT:
            free_at[step.value] = anchor
        elif step.value is not None and step.kind is StepKind.COPY_BACK:
            if step.value in back_at:
                raise ScheduleError(f"{graph.values[step.value].name} is copied back twice")
            back_at[step.value] = anchor
    if left := sorted(free_at.keys() - back_at.keys()):
        raise ScheduleError(f"{graph.values[left[0]].name} is copied out and never back")
    return {value: Copies(free_at[value], back_at[value]) for value in sorted(free_at)}


def _saved_and_read(graph: Graph, schedule: Schedule) -> tuple[frozenset[int], frozenset[int]]:
    """Return the values that are live when the forward ends, and those that are read after it."""
    live: set[int] = set()
    read: set[int] = set()
    saved: frozenset[int] | None = None
    backward = first_backward_step(graph, schedule)
    for number, step in enumerate(schedule.steps):
        if step.op is None:
            if step.kind is StepKind.FREE and step.value is not None:
                live.discard(step.value)
            continue
        op = graph.ops[step.op]
        if saved is None and number >= backward:
            saved = frozenset(live)
        if saved is not None:
            read.update(op.inputs, op.replay_inputs if step.kind is StepKind.REPLAY else ())
        live.update(op.outputs)
        if step.in_place and op.in_place is not None:
            live.discard(op.in_place[0])
    return saved or frozenset(), frozenset(read)


def decision_of(plan: Plan, value: int) -> Decision:
    """Return what ``plan`` does with a decidable value."""
    if value in plan.kept:
        return Decision.KEEP
    return Decision.OFFLOAD if value in plan.offloaded else Decision.RECOMPUTE


def _decisions(graph: Graph, plan: Plan) -> dict[str, Decision]:
    return {graph.values[v].name: decision_of(plan, v) for v in graph.decidable}


def _pair(graph: Graph, step: Step) -> tuple[str, str]:
    if step.value is not None:
        return step.kind.value, graph.values[step.value].name
    assert step.op is not None
    return _CODES[step.kind, step.in_place], graph.ops[step.op].name


def _op_digest(graph: Graph, index: int) -> str:
    op = graph.ops[index]
    named = [
        (v.name, v.size_bytes, v.kind.value) for v in (graph.values[i] for i in (*op.inputs, *op.replay_inputs, *op.outputs))
    ]
    what = (op.name, op.target, op.phase.value, op.signature, len(op.inputs), len(op.outputs))
    flags = (op.replayable, op.random, op.optional, op.in_place and tuple(graph.values[i].name for i in op.in_place))
    return hashlib.sha256(repr((what, flags, named)).encode()).hexdigest()[:8]


def _version() -> str:
    try:
        return version("actsolve")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed
