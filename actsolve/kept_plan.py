"""A plan on disk, in the cache directory: one versioned JSON file for each thing that was searched for.

A file is never trusted, be it that somebody else wrote it: its indices are looked at, and its schedule is simulated, checked and
held against the budget before it is used. Only what was proven cannot be proven again: of that, what the plan does not refute is
believed. A plan that cannot be used is found again, and said so; a file only ever appears whole, for it is written aside and
renamed, so that of several writers the last one counts. A directory that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actsolve.cache_dir import cache_dir
from actsolve.check import check
from actsolve.errors import ActsolveError, ScheduleError, UsageError
from actsolve.json_file import MAX_NUMBER, Count, FileModel, Name, Seconds, read_model, write_json
from actsolve.plan import Copies, Plan
from actsolve.problem import Problem
from actsolve.simulate import timeline_of

logger = logging.getLogger(__name__)

_FORMAT = "actsolve-kept-plan-1"
_EPSILON_S = 1e-9


@dataclass(frozen=True)
class Kept:
    """A plan, and how it was searched for.

    Attributes:
        plan: With what was proven of it, and the seconds that it took to find; its status is not kept.
        gap: At which the search was to stop,
        time_limit_s: and when, all the same.
    """

    plan: Plan
    gap: float = 0.0
    time_limit_s: float = 0.0


class _File(FileModel):
    """A `Kept` plan by the indices of its graph, whose fingerprint is part of ``key``."""

    format: Literal["actsolve-kept-plan-1"] = "actsolve-kept-plan-1"
    key: Name
    gap: Seconds
    time_limit_s: Seconds
    solve_s: Seconds
    bound_s: Seconds | None
    global_bound_s: Seconds | None
    bounds_forward: bool
    kept: tuple[Count, ...]
    early: tuple[tuple[Count, Count], ...]
    offloaded: tuple[tuple[Count, Count, Count], ...]
    replays: tuple[tuple[Count, tuple[Count, ...]], ...] | None


@dataclass(frozen=True)
class Place:
    """Where a plan is kept.

    Attributes:
        what: What it is, for messages: "plan of least memory".
        name: What its file's name begins with.
        key: All that it depends on.
    """

    what: str
    name: str
    key: str

    @property
    def path(self) -> Path:
        """The file."""
        return cache_dir() / f"{self.name}-{hashlib.sha256(f'{_FORMAT} {self.key}'.encode()).hexdigest()[:16]}.json"

    def read(self, problem: Problem) -> Kept | None:
        """Return what is kept here, if there is something that can be carried out within the budgets of ``problem``."""
        try:
            if not self.path.exists():
                return None
            file = read_model(self.path, _File, what=self.what, format_name=_FORMAT)
            if file.key != self.key:
                raise ScheduleError("it is of another step")
            plan = _plan(file, problem)
            _refuse_what_cannot_be(plan, problem)
        except (ActsolveError, OSError, KeyError) as error:  # KeyError: of a value that is offloaded and never read
            logger.warning("%s cannot be used (%s) and will be found again", self.path, str(error).splitlines()[0])
            return None
        return Kept(plan, file.gap, file.time_limit_s)

    def write(self, kept: Kept) -> None:
        """Keep a plan here."""
        file = _file(self.key, kept)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, file.model_dump(mode="json"), what=self.what)
        except (OSError, UsageError) as error:
            logger.warning("the %s is not kept: %s", self.what, error)


def _file(key: str, kept: Kept) -> _File:
    plan = kept.plan
    return _File(
        key=key,
        gap=float(kept.gap),
        time_limit_s=min(float(kept.time_limit_s), float(MAX_NUMBER)),
        solve_s=plan.solve_s,
        bound_s=_not_negative(plan.bound_s),
        global_bound_s=_not_negative(plan.global_bound_s),
        bounds_forward=plan.bounds_forward,
        kept=tuple(sorted(plan.kept)),
        early=tuple(sorted(plan.early.items())),
        offloaded=tuple((v, c.free_at, c.back_at) for v, c in sorted(plan.offloaded.items())),
        replays=None if plan.replays is None else tuple(sorted(plan.replays.items())),
    )


def _not_negative(bound_s: float | None) -> float | None:
    """A solver's bound may be a hair below nothing, or minus infinity where nothing was proven yet."""
    return None if bound_s is None else max(0.0, float(bound_s))


def _plan(file: _File, problem: Problem) -> Plan:
    """Return the plan of a file, all of whose indices are of the graph."""
    values, ops = len(problem.graph.values), len(problem.graph.ops)
    replays = None if file.replays is None else dict(file.replays)
    of_values = {*file.kept, *(v for v, _, _ in file.offloaded)}
    of_ops = {op for pair in file.early for op in pair} | {op for _, *pair in file.offloaded for op in pair}
    for op, replayed in (replays or {}).items():
        of_ops |= {op, *replayed}
    if max(of_values, default=0) >= values or max(of_ops, default=0) >= ops:
        raise ScheduleError("it names what the step has not")
    for op, replayed in (replays or {}).items():
        if any(not problem.graph.ops[u].replayable or u >= problem.graph.n_forward for u in replayed):
            raise ScheduleError(f"it replays what cannot be replayed before op {op}")
    if not of_values <= set(problem.graph.decidable) or (replays is not None and (file.early or file.offloaded)):
        raise ScheduleError("it decides what is not to be decided")
    return Plan(
        "milp",
        frozenset(file.kept),
        dict(file.early),
        {v: Copies(free_at, back_at) for v, free_at, back_at in file.offloaded},
        replays,
        bound_s=file.bound_s,
        global_bound_s=file.global_bound_s,
        bounds_forward=file.bounds_forward,
        solve_s=file.solve_s,
    )


def _refuse_what_cannot_be(plan: Plan, problem: Problem) -> None:
    """Raise ScheduleError unless the plan fits, honours the pins, and is no better than what is said to be the best."""
    if plan.kept & problem.pinned_recompute or not problem.pinned_keep <= plan.kept:
        raise ScheduleError("it decides otherwise what is pinned")
    timeline = timeline_of(problem, plan)
    check(problem, timeline.schedule)
    if not timeline.fits:
        raise ScheduleError("it does not fit")
    if max(plan.bound_s or 0.0, plan.global_bound_s or 0.0) > timeline.extra_s + _EPSILON_S:
        raise ScheduleError("it is better than what it says is the best")
