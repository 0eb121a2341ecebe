"""The largest batch that fits a budget, where a target's batch can be set: what to try when nothing fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from actsolve.errors import ActsolveError, InfeasibleBudget
from actsolve.planners import smallest_budget
from actsolve.planning import Listener, prepare
from actsolve.settings import Settings
from actsolve.target import Target

_NAME = "batch"
_SEARCH_S = 20.0  # no further batch is tried after that; the answer then is the largest of those tried
_UNLIMITED = 1 << 60


def with_batch(
    error: InfeasibleBudget, target: Target, overrides: Sequence[str], settings: Settings, listener: Listener
) -> InfeasibleBudget:
    """Return the error with the largest batch that fits, if the target has an integer setting called ``batch``.

    Each batch that it names was traced and costed, and a plan was found for it within the budget.
    """
    batch = target.setting(_NAME, overrides)
    if (
        error.attempt is None
        or error.smallest_bytes is None
        or not isinstance(batch, int)
        or isinstance(batch, bool)
        or batch < 2
    ):
        return error
    problem = error.attempt.problem
    if "batch" not in (error.try_ or "") or problem.budget_bytes <= problem.static_bytes:
        return error
    listener.stage("searching for the largest batch that fits")
    others = [o for o in overrides if o.partition("=")[0].strip() != _NAME]

    def needed_bytes(batch: int) -> int:
        step = target.step([*others, f"{_NAME}={batch}"], fake=True)
        quiet = Listener(measuring=listener.measuring)
        prepared = prepare(step, _UNLIMITED, settings, target=target.name, listener=quiet)
        unreserved = replace(prepared.problem, static_bytes=prepared.static.total_bytes - prepared.static.reserve)
        return prepared.reserve.budget_for(smallest_budget(unreserved, settings.planner_options())[0])

    try:
        found = largest_fitting(needed_bytes, problem.budget_bytes, (batch, error.smallest_bytes), time.monotonic() + _SEARCH_S)
    except ActsolveError:  # a batch that the model does not take, or that fake tensors do not build
        return error
    hint = f"--set {_NAME}={found} fits" if found is not None else f"but not even --set {_NAME}=1 fits"
    extended = InfeasibleBudget(
        error.what, where=error.where, why=error.why, try_=f"{error.try_}: {hint}", smallest_bytes=error.smallest_bytes
    )
    extended.attempt = error.attempt
    return extended


def largest_fitting(
    needed_bytes: Callable[[int], int], budget_bytes: int, too_large: tuple[int, int], deadline: float
) -> int | None:
    """Return the largest batch that needs no more than the budget, or None if one of 1 needs more.

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
        return None
    while too_large[0] - fits[0] > 1 and time.monotonic() < deadline:
        share = (budget_bytes - fits[1]) / max(1, too_large[1] - fits[1])
        guess = fits[0] + int(share * (too_large[0] - fits[0]))
        guess = min(max(guess, fits[0] + 1), too_large[0] - 1)
        found = (guess, needed_bytes(guess))
        if found[1] <= budget_bytes:
            fits = found
        else:
            too_large = found
    return fits[0]
