"""The decision for each saved value, and what is known of its quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Decision(StrEnum):
    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class Status(StrEnum):
    """What a planner proved."""

    OPTIMAL = "optimal"  # gap <= 1% of the extra time, or <= 0.05% of the step time
    FEASIBLE = "feasible"  # fits; no such proof
    INFEASIBLE = "infeasible"  # proven: no plan of the planner's class fits
    UNKNOWN = "unknown"  # nothing was found in time, or the planner does not apply


@dataclass(frozen=True, slots=True)
class Copies:
    """When an offloaded value leaves the device and returns. Its copy out begins as soon as it is made.

    Attributes:
        free_at: The op, forward or backward, before which its copy out is waited for and its device memory is freed;
            after its last forward read.
        back_at: The backward op before which, and before whose replays, its copy back is queued and takes device memory.
    """

    free_at: int
    back_at: int


@dataclass(frozen=True)
class Plan:
    """What a planner returns.

    Attributes:
        planner: Its name in the registry.
        kept: The decidable values (`Graph.decidable`) that stay on the device from the forward to
            their last read. All others but those offloaded are dropped after their last forward read,
            and replayed where the backward, or a replay, needs them.
        early: Per forward op, a backward op before which it is replayed if it is replayed at all and was not before
            (`build_schedule`). Empty: everything on demand.
        offloaded: The decidable values that are on the host from the forward to their use in the backward.
        replays: Per op, the forward ops that are replayed just before its first run, in order, each as often as it is named: of a
            forward op in the forward, of a backward op in the backward (`replaying_schedule`). None: each on demand, once, in the
            backward. Else `early` and `offloaded` are empty, and `kept` is `saved_by`.
        synchronous: Whether the computation waits for each copy as soon as it is queued, out and back (`experiments`).
        status: What was proved. With INFEASIBLE and UNKNOWN the plan holds no decisions.
        bound_s: Proven lower bound on the extra seconds over keep-all, over the plans of the
            planner's class; None if it has no bound.
        global_bound_s: Proven lower bound on them over every schedule with the same first runs that replays in the backward and
            offloads nothing, whatever it replays and however often; None where values may be offloaded, or nothing was proven.
        bounds_forward: Whether `global_bound_s` also holds for the schedules that replay in the forward.
        solve_s: Wall seconds spent planning.
        earlier_s: Wall seconds that the search took, where it was done before and the plan is read from the disk (`known_plans`);
            None where it was done now.
        interrupted: Whether the user cut the search short (Ctrl-C).
        note: Why a planner does not apply, or what it wants to say, for reports.
    """

    planner: str
    kept: frozenset[int] = frozenset()
    early: Mapping[int, int] = field(default_factory=dict)
    offloaded: Mapping[int, Copies] = field(default_factory=dict)
    replays: Mapping[int, tuple[int, ...]] | None = None
    synchronous: bool = False
    status: Status = Status.FEASIBLE
    bound_s: float | None = None
    global_bound_s: float | None = None
    bounds_forward: bool = False
    solve_s: float = 0.0
    earlier_s: float | None = None
    interrupted: bool = False
    note: str = ""

    @property
    def found(self) -> bool:
        """Whether the plan holds decisions."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)
