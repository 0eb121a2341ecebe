"""The plans of least memory that were found here before, on disk: one file for each training step.

The search for the smallest budget is cut off by the clock. What it found, and a message has named, must be found again whatever
the machine is busy with: so it is kept, and every later search begins with it. A file is never trusted: a plan is simulated
before it is used. One that cannot be read is found again, and said so; a cache that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

from actsolve.cache_dir import cache_dir
from actsolve.check import check
from actsolve.errors import ActsolveError, ScheduleError, UsageError
from actsolve.json_file import Count, FileModel, Name, read_model, write_json
from actsolve.plan import Copies, Plan
from actsolve.planners import PlannerOptions, least_budget
from actsolve.problem import Problem
from actsolve.simulate import timeline_of
from actsolve.units import MAX_BYTES

logger = logging.getLogger(__name__)

_FORMAT = "actsolve-least-1"
_WHAT = "plan of least memory"


class _File(FileModel):
    """A `Plan` by the indices of its graph, whose fingerprint is part of ``key``."""

    format: Literal["actsolve-least-1"] = "actsolve-least-1"
    key: Name
    kept: tuple[Count, ...] = ()
    early: tuple[tuple[Count, Count], ...] = ()
    offloaded: tuple[tuple[Count, Count, Count], ...] = ()
    replays: tuple[tuple[Count, tuple[Count, ...]], ...] | None = None


def least_budget_known(problem: Problem, options: PlannerOptions) -> tuple[int, Plan]:
    """Return the smallest budget found, now or before, in bytes, and a plan that meets it; otherwise as `least_budget`."""
    begun = from_known(problem, options)
    found_bytes, found = least_budget(problem, begun)
    if begun is options or found_bytes < timeline_of(problem, begun.seeds[-1]).peak_bytes:
        _keep(problem, found)
    return found_bytes, found


def from_known(problem: Problem, options: PlannerOptions) -> PlannerOptions:
    """Return ``options`` with the plan of least memory that was found before as its last seed; as they are if there is none."""
    known = known_least(problem)
    return options if known is None else replace(options, seeds=(*options.seeds, known))


def known_least(problem: Problem) -> Plan | None:
    """Return the plan of least memory that was found before for such a step, if there is one that can be carried out."""
    path, key = _place(problem)
    if not path.exists():
        return None
    try:
        file = read_model(path, _File, what=_WHAT, format_name=_FORMAT)
        if file.key != key:
            raise ScheduleError("it is of another step")
        plan = _plan(file, problem)
        check(replace(problem, budget_bytes=MAX_BYTES), timeline_of(problem, plan).schedule)
    except (ActsolveError, KeyError) as error:  # KeyError: of a value that is offloaded and never read
        logger.warning("%s cannot be used (%s) and will be found again", path, str(error).splitlines()[0])
        return None
    return plan


def _keep(problem: Problem, plan: Plan) -> None:
    path, key = _place(problem)
    file = _File(
        key=key,
        kept=tuple(sorted(plan.kept)),
        early=tuple(sorted(plan.early.items())),
        offloaded=tuple((v, c.free_at, c.back_at) for v, c in sorted(plan.offloaded.items())),
        replays=None if plan.replays is None else tuple(sorted(plan.replays.items())),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, file.model_dump(mode="json"), what=_WHAT)
    except (OSError, UsageError) as error:
        logger.warning("the plan of least memory is not kept: %s", error)


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
    offloaded = {v: Copies(free_at, back_at) for v, free_at, back_at in file.offloaded}
    return Plan("milp", frozenset(file.kept), dict(file.early), offloaded, replays)


def _place(problem: Problem) -> tuple[Path, str]:
    """Return the file of a step, and all that its plans of least memory depend on."""
    pins = sorted(problem.pinned_keep), sorted(problem.pinned_recompute)
    host = problem.host_budget_bytes if problem.links is not None else 0
    of_values = problem.min_offload_bytes, problem.optimizer_bytes, pins, host
    rest = hashlib.sha256(repr((problem.costs.workspace_bytes, of_values)).encode()).hexdigest()
    key = f"{problem.graph.fingerprint}-{rest[:16]}"
    return cache_dir() / f"least-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json", key
