"""The largest batch that fits a budget, where a target's batch can be set: what to try when nothing fits.

Each batch that is tried is traced and costed. It may fit if the plan of the least peak that was found at the full batch fits it
too, with its sizes; where that does not, the least peak is searched for anew. The batch that is named in the end is one that such
a search alone finds a plan for: so will the command that follows the advice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actsolve.errors import ActsolveError, InfeasibleBudget
from actsolve.graph import Graph
from actsolve.known_least import least_budget_known
from actsolve.not_fitting import nothing_fits
from actsolve.plan import Plan
from actsolve.planned import Attempt
from actsolve.planning import Listener, prepare
from actsolve.problem import Problem
from actsolve.remedies import SMALLER_BATCH
from actsolve.remedy import Remedy
from actsolve.settings import Settings
from actsolve.simulate import timeline_of
from actsolve.static_memory import Reserve
from actsolve.target import Target
from actsolve.units import format_bytes

_NAME = "batch"
_SEARCH_S = 20.0  # no further batch is tried after that; the answer then is the largest of those tried
_UNLIMITED = 1 << 60
_ASSUMED = "it is assumed that a larger batch never needs less"


@dataclass(frozen=True)
class Largest:
    """How a search for the largest batch ended.

    Attributes:
        batch: The largest that was found to fit; None if not even 1 does.
        needs_bytes: What it needs, or what a batch of 1 does.
        next: The smallest batch that was found not to fit.
    """

    batch: int | None
    needs_bytes: int
    next: int


def with_batch(
    error: InfeasibleBudget, target: Target, overrides: Sequence[str], settings: Settings, listener: Listener
) -> InfeasibleBudget:
    """Return the error with the largest batch that fits, if the target has an integer setting called ``batch``.

    Each batch that it names was traced and costed, and a plan was found for it within the budget.
    """
    attempt: Attempt | None = error.attempt
    batch = target.setting(_NAME, overrides)
    if attempt is None or not isinstance(batch, int) or isinstance(batch, bool) or SMALLER_BATCH not in attempt.remedies:
        return error
    if batch < 2:
        return _with(attempt, None, settings)
    assert error.smallest_bytes is not None
    listener.stage("searching for the largest batch that fits")
    deadline = time.monotonic() + _SEARCH_S
    needed_bytes = _Needed(attempt, target, overrides, settings, listener, deadline)
    try:
        found = largest_fitting(needed_bytes, attempt.problem.budget_bytes, (batch, error.smallest_bytes), deadline)
        found = _confirmed(found, needed_bytes, attempt.problem.budget_bytes)
    except ActsolveError as refused:  # a batch that the model does not take, or that fake tensors do not build
        note = f"which one is not known, for a batch of {needed_bytes.latest} cannot be planned: {refused.what}"
        return _with(attempt, replace(SMALLER_BATCH, note=note), settings)
    return _with(attempt, _remedy(found), settings)


def _with(attempt: Attempt, remedy: Remedy | None, settings: Settings) -> InfeasibleBudget:
    """The error with another remedy in the place of the smaller batch; one that fits is the first."""
    others = [r for r in attempt.remedies if r != SMALLER_BATCH]
    if remedy is not None:
        others.insert(0 if remedy.fits else len(others), remedy)
    return nothing_fits(attempt, others, time_limit_s=settings.time_limit_s)


def _remedy(found: Largest) -> Remedy:
    if found.batch is None:
        return Remedy("a smaller model", note=f"not even --set {_NAME}=1 fits, which needs {format_bytes(found.needs_bytes)}")
    if found.next == found.batch + 1:
        note = f"the largest that fits ({found.next} does not; {_ASSUMED})"
    else:
        note = f"the largest found to fit in {_SEARCH_S:g} s of search ({found.next} does not; {_ASSUMED})"
    return Remedy(f"--set {_NAME}={found.batch}", found.needs_bytes, True, note)


def _confirmed(found: Largest, needed: _Needed, budget_bytes: int) -> Largest:
    """The largest batch from there on down that is found to fit without a plan to start from."""
    while found.batch is not None:
        needs_bytes = needed.alone(found.batch)
        if needs_bytes <= budget_bytes:
            return replace(found, needs_bytes=needs_bytes)
        found = Largest(found.batch - 1 or None, needs_bytes, found.batch)
    return found


class _Needed:
    """What a batch needs: the smallest budget found, or any that is within the one asked for."""

    def __init__(
        self,
        attempt: Attempt,
        target: Target,
        overrides: Sequence[str],
        settings: Settings,
        listener: Listener,
        deadline: float,
    ) -> None:
        self.attempt, self.target, self.settings, self.listener, self.deadline = attempt, target, settings, listener, deadline
        self.others = [o for o in overrides if o.partition("=")[0].strip() != _NAME]
        self.latest = 0
        self.known: dict[int, tuple[Problem, Reserve]] = {}

    def __call__(self, batch: int) -> int:
        problem, reserve = self._prepared(batch)
        plan = self.attempt.smallest_plan
        seeds: tuple[Plan, ...] = ()
        if plan is not None and _same_ops(problem.graph, self.attempt.graph):
            timeline = timeline_of(replace(problem, budget_bytes=0), plan)
            host = problem.host_budget_bytes
            needs_bytes = reserve.budget_for(timeline.peak_bytes)
            if needs_bytes <= self.attempt.problem.budget_bytes and (host is None or timeline.host_peak_bytes <= host):
                return needs_bytes
            seeds = (plan,)
        options = self.settings.planner_options()
        time_limit_s = min(options.time_limit_s, max(1.0, self.deadline - time.monotonic()))
        return reserve.budget_for(least_budget_known(problem, replace(options, time_limit_s=time_limit_s, seeds=seeds))[0])

    def alone(self, batch: int) -> int:
        """Return the smallest budget that is found for a batch when nothing else is known of it."""
        problem, reserve = self._prepared(batch)
        return reserve.budget_for(least_budget_known(problem, self.settings.planner_options())[0])

    def _prepared(self, batch: int) -> tuple[Problem, Reserve]:
        if batch not in self.known:
            self.latest = batch
            self.listener.stage(f"searching for the largest batch that fits: trying {batch}")
            step = self.target.step([*self.others, f"{_NAME}={batch}"], fake=True)
            quiet = Listener(measuring=self.listener.measuring)
            prepared = prepare(step, _UNLIMITED, self.settings, target=self.target.name, listener=quiet)
            static_bytes = prepared.static.total_bytes - prepared.static.reserve
            self.known[batch] = replace(prepared.problem, static_bytes=static_bytes), prepared.reserve
        return self.known[batch]


def _same_ops(one: Graph, other: Graph) -> bool:
    """Whether two graphs differ in sizes and constants alone, so that a plan of one is one of the other."""
    return (
        [(o.target, o.phase, o.inputs, o.outputs, o.replayable, o.in_place) for o in one.ops]
        == [(o.target, o.phase, o.inputs, o.outputs, o.replayable, o.in_place) for o in other.ops]
        and one.outputs == other.outputs
        and one.gradients == other.gradients
        and one.decidable == other.decidable
    )


def largest_fitting(
    needed_bytes: Callable[[int], int], budget_bytes: int, too_large: tuple[int, int], deadline: float
) -> Largest:
    """Return the largest batch that needs no more than the budget, taking it that a larger one never needs less.

    What is needed grows nearly linearly, so each guess is interpolated between the largest batch that fits and the smallest
    that does not.

    Args:
        needed_bytes: What a batch needs at least.
        budget_bytes: The budget.
        too_large: A batch that does not fit, and what it needs.
        deadline: When to be content with what was found, in seconds of `time.monotonic`.
    """
    fits = (1, needed_bytes(1))
    if fits[1] > budget_bytes:
        return Largest(None, fits[1], 1)
    while too_large[0] - fits[0] > 1 and time.monotonic() < deadline:
        share = (budget_bytes - fits[1]) / max(1, too_large[1] - fits[1])
        guess = fits[0] + int(share * (too_large[0] - fits[0]))
        guess = min(max(guess, fits[0] + 1), too_large[0] - 1)
        found = (guess, needed_bytes(guess))
        if found[1] <= budget_bytes:
            fits = found
        else:
            too_large = found
    return Largest(*fits, too_large[0])
