"""What every planner gets, and all that it may look at: a graph, what each op costs, and the budgets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actsolve.graph import Graph
from actsolve.links import Links

MIN_OFFLOAD_BYTES = 256 << 10  # a copy of less is mostly latency: 10 us are as much at 25 GB/s


@dataclass(frozen=True)
class Costs:
    """What running each op takes.

    Attributes:
        seconds: Per op: one run.
        replay_seconds: Per op: one replay. Equal to `seconds` but for random ops, whose RNG state is saved in the forward
            for it, and set and restored around it.
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
        pinned_recompute: Decidable values that must be recomputed.
        links: How fast copies to and from the host are; None: nothing is offloaded.
        host_budget_bytes: Cap on host memory that holds what is offloaded; None for no cap.
        min_offload_bytes: Nothing smaller is offloaded.
    """

    graph: Graph
    costs: Costs
    budget_bytes: int
    static_bytes: int = 0
    optimizer_bytes: int = 0
    pinned_keep: frozenset[int] = frozenset()
    pinned_recompute: frozenset[int] = frozenset()
    links: Links | None = None
    host_budget_bytes: int | None = None
    min_offload_bytes: int = MIN_OFFLOAD_BYTES

    @cached_property
    def base_time_s(self) -> float:
        """Seconds of the step with no replay: every op that always runs, once."""
        return sum(s for op, s in zip(self.graph.ops, self.costs.seconds, strict=True) if not op.optional)

    @property
    def dynamic_budget_bytes(self) -> int:
        """What is left of the budget above the static bytes; may be negative."""
        return self.budget_bytes - self.static_bytes

    @property
    def host_cap_bytes(self) -> int | None:
        """The cap on host memory where there can be too little of it: None where all that may be offloaded fits at once.

        What is free here differs from run to run, and mostly matters to none.
        """
        cap = self.host_budget_bytes
        most = sum(self.graph.values[v].size_bytes for v in self.offloadable)
        return None if cap is None or cap >= most else cap

    @cached_property
    def offloadable(self) -> frozenset[int]:
        """Decidable values that may be offloaded: large enough, not pinned, and no new content of a buffer.

        None where there are no links. RNG states stay: they are made where they are kept.
        """
        if self.links is None:
            return frozenset()
        graph = self.graph
        kept_out = self.pinned_keep | self.pinned_recompute | {new for new, _ in graph.updates}
        found = set()
        for v in graph.decidable:
            producer = graph.values[v].producer
            assert producer is not None
            if graph.values[v].size_bytes >= max(1, self.min_offload_bytes) and not graph.ops[producer].optional:
                found.add(v)
        return frozenset(found - kept_out)
