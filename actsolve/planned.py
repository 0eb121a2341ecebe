"""What planning a training step gives: the plan, and all that is known of it before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from actsolve.graph import Graph
from actsolve.peak import Peak, peak_of
from actsolve.plan import Decision, Plan
from actsolve.plan_file import Baseline, KeepAll, LinkSpeeds, PlanFile, Predicted, decision_of, plan_file
from actsolve.problem import Problem
from actsolve.remedy import Remedy
from actsolve.schedule import Schedule, StepKind
from actsolve.simulate import Timeline
from actsolve.split import first_backward_step
from actsolve.static_memory import StaticMemory

_ZERO_S = 1e-9


@dataclass(frozen=True)
class BaselineResult:
    """A baseline in the same simulator; no timeline where it does not apply."""

    timeline: Timeline | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is known of a training step after planning, whether a plan was found or not.

    Attributes:
        target: What was optimized, as the user named it.
        problem: What was planned for.
        plan: What the planner returned.
        keep_all: Keeping everything, simulated.
        baselines: Every baseline, simulated, by name.
        static: The static memory by kind.
        capture_s: Wall seconds of tracing.
        cost_s: Wall seconds of measuring or modelling op costs.
        loss_inside: Whether the loss is part of the step; if not, memory outside the module is not budgeted.
        links_source: Where the speeds of the problem's links come from; empty if it has none.
        smallest_bytes: Where nothing fits: the smallest budget that a plan was found for.
        smallest_plan: Where nothing fits: the plan of that budget.
        peak: What holds the peak: of the plan, or where nothing fits of the one that needs least.
        remedies: Where nothing fits: what would help.
        notes: What else is to be said in reports.
    """

    target: str
    problem: Problem
    plan: Plan
    keep_all: Timeline
    baselines: dict[str, BaselineResult]
    static: StaticMemory
    capture_s: float = 0.0
    cost_s: float = 0.0
    loss_inside: bool = True
    links_source: str = ""
    smallest_bytes: int | None = None
    smallest_plan: Plan | None = None
    peak: Peak | None = None
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and it is within the budget."""
        return False

    def with_timeline(self, timeline: Timeline) -> Planned:
        """Return it with the plan's schedule, simulated."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return Planned(timeline=timeline, **known | {"peak": peak_of(timeline, self.static)})

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``optimize --json`` (DESIGN section 7); those of a plan are None or empty."""
        return {
            "target": self.target,
            "budget_bytes": self.problem.budget_bytes,
            "static_bytes": self.static.total_bytes,
            "static": self.static.breakdown(),
            "optimizer_bytes": self.problem.optimizer_bytes,
            "host_budget_bytes": self.problem.host_budget_bytes,
            "links": None if self.problem.links is None else LinkSpeeds.model_validate(self.problem.links).model_dump(),
            "links_source": self.links_source,
            "status": self.plan.status.value,
            "objective_s": None,
            "bound_s": None,
            "gap": None,
            "step_gap": None,
            "global_bound_s": None,
            "global_bound_over": None,
            "planner": self.plan.planner,
            "solve_s": self.plan.solve_s,
            "capture_s": self.capture_s,
            "cost_s": self.cost_s,
            "costs": self.problem.costs.source,
            "unknown_costs": list(self.problem.costs.unknown),
            "predicted": None,
            "decisions": {d.value: {"count": 0, "bytes": 0} for d in Decision},
            "keep_all": {"peak_bytes": self.keep_all.peak_bytes, "step_s": self.keep_all.step_s},
            "baselines": {name: _baseline(result).model_dump() for name, result in self.baselines.items()},
            "smallest_budget_bytes": self.smallest_bytes,
            "peak": None if self.peak is None else self.peak.as_json(),
            "remedies": [remedy.as_json() for remedy in self.remedies],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Planned(Attempt):
    """A planned training step.

    Attributes:
        timeline: The plan's schedule, simulated.
    """

    timeline: Timeline

    @property
    def fits(self) -> bool:
        return self.timeline.fits

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def objective_s(self) -> float:
        """Extra seconds of the step over keep-all, as simulated."""
        return max(0.0, self.timeline.step_s - self.keep_all.step_s)

    @cached_property
    def bound_s(self) -> float | None:
        """The planner's lower bound on `objective_s`; no more than it, whatever the solver's rounding."""
        return None if self.plan.bound_s is None else min(max(0.0, self.plan.bound_s), self.objective_s)

    @cached_property
    def global_bound_s(self) -> float | None:
        """The lower bound on `objective_s` of every schedule of `global_bound_over`; no more than it."""
        bound = self.plan.global_bound_s
        return None if bound is None else min(max(0.0, bound), self.objective_s)

    @property
    def global_bound_over(self) -> str | None:
        """``global``: it bounds all schedules with the same first runs; ``backward``: those that replay in the backward alone."""
        if self.plan.global_bound_s is None:
            return None
        return "global" if self.plan.bounds_forward else "backward"

    @property
    def forward_replays(self) -> int:
        """How many of the ops that are replayed are in the forward."""
        before = self.schedule.steps[: first_backward_step(self.graph, self.schedule)]
        return sum(step.kind is StepKind.REPLAY for step in before)

    @cached_property
    def gap(self) -> float | None:
        """Share of the extra time that is not proven to be needed."""
        if self.bound_s is None:
            return None
        return 0.0 if self.objective_s < _ZERO_S else (self.objective_s - self.bound_s) / self.objective_s

    @cached_property
    def step_gap(self) -> float | None:
        """The same difference as a share of the step time."""
        return None if self.bound_s is None else (self.objective_s - self.bound_s) / max(self.timeline.step_s, _ZERO_S)

    @property
    def schedule_replays(self) -> int:
        """How many ops are replayed; 0 where the step fits as it is."""
        return sum(step.kind is StepKind.REPLAY for step in self.schedule.steps)

    def decision_totals(self) -> dict[str, dict[str, int]]:
        """Return, per decision, how many values it was taken for and their bytes.

        A value that is dropped and that nothing reads again is not counted: it is not recomputed either.
        """
        totals = {d.value: {"count": 0, "bytes": 0} for d in Decision}
        replayed = {step.op for step in self.schedule.steps if step.kind is StepKind.REPLAY}
        for value in self.graph.decidable:
            decision = decision_of(self.plan, value)
            if decision is Decision.RECOMPUTE and self.graph.values[value].producer not in replayed:
                continue
            total = totals[decision.value]
            total["count"] += 1
            total["bytes"] += self.graph.values[value].size_bytes
        return totals

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``optimize --json`` (DESIGN section 7)."""
        return {
            **super().as_json(),
            "objective_s": self.objective_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "step_gap": self.step_gap,
            "global_bound_s": self.global_bound_s,
            "global_bound_over": self.global_bound_over,
            "predicted": self._predicted().model_dump(),
            "decisions": self.decision_totals(),
        }

    @cached_property
    def plan_file(self) -> PlanFile:
        """The plan as it is saved."""
        return plan_file(
            self.problem,
            self.plan,
            self.schedule,
            target=self.target,
            static_bytes=self.static.breakdown(),
            objective_s=self.objective_s,
            gap=self.gap,
            step_gap=self.step_gap,
            global_bound_s=self.global_bound_s,
            predicted=self._predicted(),
            keep_all=KeepAll(peak_bytes=self.keep_all.peak_bytes, step_s=self.keep_all.step_s),
            baselines={name: _baseline(result) for name, result in self.baselines.items()},
        )

    def _predicted(self) -> Predicted:
        return Predicted.model_validate(self.timeline)


def _baseline(result: BaselineResult) -> Baseline:
    t = result.timeline
    if t is None:
        return Baseline(note=result.note)
    return Baseline(peak_bytes=t.peak_bytes, step_s=t.step_s, fits=t.fits, note=result.note)
