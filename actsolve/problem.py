"""What every planner gets, and all that it may look at: a graph, what each op costs, and the budgets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actsolve.graph import Graph


@dataclass(frozen=True)
class Costs:
    """What running each op takes.

    Attributes:
        seconds: Per op: one run.
        replay_seconds: Per op: one replay. Equal to `seconds` but for random ops, whose RNG state is
            saved, set and restored around a replay.
        workspace_bytes: Per op: the most that it allocates at once beyond its outputs.
        source: Where the figures come from, for reports: "measured on ..." or a profile's name.
        unknown: Names of ops whose cost is not known and was taken as that of their bytes alone.
    """

    seconds: tuple[float, ...]
    replay_seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    source: str = ""
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A graph to be planned for.

    Attributes:
        graph: One training step.
        costs: What each of its ops takes.
        budget_bytes: Hard cap on device memory at every moment of the step.
        static_bytes: Device memory that is there before the step and stays: parameters, buffers,
            optimizer state, step inputs, reserve.
        optimizer_bytes: Temporaries of the optimizer step, which runs after the backward beside the
            values that the caller holds.
        pinned_keep: Decidable values that must be kept.
        pinned_recompute: Decidable values that must not be kept.
    """

    graph: Graph
    costs: Costs
    budget_bytes: int
    static_bytes: int = 0
    optimizer_bytes: int = 0
    pinned_keep: frozenset[int] = frozenset()
    pinned_recompute: frozenset[int] = frozenset()

    @cached_property
    def base_time_s(self) -> float:
        """Seconds of the step with no replay: every op that always runs, once."""
        return sum(s for op, s in zip(self.graph.ops, self.costs.seconds, strict=True) if not op.optional)

    @property
    def dynamic_budget_bytes(self) -> int:
        """What is left of the budget above the static bytes; may be negative."""
        return self.budget_bytes - self.static_bytes
