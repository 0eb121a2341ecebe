"""What a caller may ask of a planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actsolve.plan import Plan

# Called now and then during a solve with (elapsed_s, incumbent_s, bound_s); either is None while unknown.
Progress = Callable[[float, float | None, float | None], None]


@dataclass(frozen=True)
class PlannerOptions:
    """Options of a planner; most baselines ignore them.

    Attributes:
        gap: Stop when the plan's extra time is proven to be within this share of the least.
        time_limit_s: Stop after this many seconds and return the best plan found.
        solver: ``"highs"``, or any solver that PuLP knows: ``"cbc"``, ``"PULP_CBC_CMD"``, ...
        threads: For the solver; None leaves it to the solver.
        window: How many backward ops early a forward op may be replayed; None chooses, and widens it
            when the budget is tight.
        progress: Called during the solve.
        seeds: Plans to start from, besides the baselines.
        torch_saved: What PyTorch's own partitioner saves at a memory budget between 0 and 1; None where there is no traced model.
    """

    gap: float = 0.01
    time_limit_s: float = 60.0
    solver: str = "highs"
    threads: int | None = 2
    window: int | None = None
    progress: Progress | None = None
    seeds: tuple[Plan, ...] = ()
    torch_saved: Callable[[float], frozenset[int]] | None = None
