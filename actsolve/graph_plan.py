"""A schedule for the graph of a file, and what is proven of it: what ``actsolve plan`` says. All figures are of total time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from actsolve.plan import Status

STEP_GAP = 0.0005  # of running every node once: a schedule that near to its bound is optimal


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """What was found for a graph and a budget. Times are in the unit of the file, and exact where they are integers.

    Attributes:
        graph: The graph's name.
        format: The format of its file.
        status: What was proved.
        base_time: What running every node once takes.
        objective: What the schedule takes; None if there is none.
        lower_bound: What every schedule takes at least; None if nothing is known.
        lower_bound_kind: Over which schedules: ``global``, all with that order of first runs; ``backward``, of these all that
            replay in the backward alone; or ``plan class``, the planner's.
        budget_bytes: The cap on memory.
        peak_bytes: The most memory during a run of the schedule.
        peak_bytes_in_order: The same of running every node once.
        schedule: Node or op indices in execution order.
        solve_s: Wall seconds of planning.
        planner: Its name.
        smallest_budget_bytes: Where nothing was found: the smallest budget that something was found for.
        copies: What is offloaded, and when it is copied.
        notes: What else is to be said.
    """

    graph: str
    format: str
    status: Status
    base_time: float
    objective: float | None = None
    lower_bound: float | None = None
    lower_bound_kind: str = "global"
    budget_bytes: int
    peak_bytes: int | None = None
    peak_bytes_in_order: int
    schedule: tuple[int, ...] | None = None
    solve_s: float = 0.0
    planner: str = "milp"
    smallest_budget_bytes: int | None = None
    copies: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def overhead(self) -> float | None:
        """What the schedule takes beyond running every node once, as a share of that."""
        if self.objective is None:
            return None
        return (self.objective - self.base_time) / self.base_time if self.base_time else 0.0

    @property
    def gap(self) -> float | None:
        """The share of the time that is not proven to be needed."""
        return _share(self.objective, self.lower_bound, 0)

    @property
    def extra_gap(self) -> float | None:
        """The same share of the time beyond running every node once."""
        return _share(self.objective, self.lower_bound, self.base_time)

    def runs_again(self) -> Counter[int]:
        """Return how often each node runs again."""
        runs = Counter(self.schedule or ())
        return Counter({node: n - 1 for node, n in runs.items() if n > 1})

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``plan --json`` (DESIGN section 7); those of a schedule are None where there is none."""
        content: dict[str, Any] = {
            "graph": self.graph,
            "format": self.format,
            "status": self.status.value,
            "objective": self.objective,
            "base_time": self.base_time,
            "overhead": self.overhead,
            "lower_bound": self.lower_bound,
            "lower_bound_kind": self.lower_bound_kind,
            "gap": self.gap,
            "extra_gap": self.extra_gap,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "peak_bytes_in_order": self.peak_bytes_in_order,
            "planner": self.planner,
            "solve_s": self.solve_s,
            "schedule": None if self.schedule is None else list(self.schedule),
            "notes": list(self.notes),
        }
        if self.copies:
            content["copies"] = list(self.copies)
        if self.schedule is None:
            content["smallest_budget_bytes"] = self.smallest_budget_bytes
        return content


def proved(plan_gap: float, extra: float, bound: float, base_time: float) -> Status:
    """Return what a bound on the extra time proves: optimal within ``plan_gap`` of it, or `STEP_GAP` of the base time."""
    near = extra - bound <= max(plan_gap * extra, STEP_GAP * base_time)
    return Status.OPTIMAL if near else Status.FEASIBLE


def _share(objective: float | None, bound: float | None, base: float) -> float | None:
    if objective is None or bound is None:
        return None
    return (objective - bound) / (objective - base) if objective > base else 0.0
