"""What of the budget is spoken for before a step begins, and how a budget is named (DESIGN section 2)."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace

from actsolve.errors import UsageError
from actsolve.graph import Graph, Kind
from actsolve.units import MAX_BYTES, cut, parse_bytes

GPU_RESERVE = 0.05  # of the budget, for what the caching allocator cannot use


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer takes, in bytes.

    Attributes:
        state_bytes: What stays between steps.
        temporary_bytes: The most that its step allocates at once and frees again.
        name: Which optimizer, for reports.
    """

    state_bytes: int = 0
    temporary_bytes: int = 0
    name: str = "none"


@dataclass(frozen=True)
class StaticMemory:
    """Device memory that is there before the step and stays, in bytes, by kind.

    Each storage counts once, whatever shares it. `gradients` are ``.grad`` tensors that exist before the step, of which there
    are none with ``zero_grad(set_to_none=True)``, and those of a shard. `reserve` is for what an allocator wastes. With
    `given`, the user's own figure stands for all the rest.
    """

    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    reserve: int = 0
    given: int | None = None

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.given if self.given is not None else sum(self.breakdown().values())

    def breakdown(self) -> dict[str, int]:
        """Return the bytes by kind, as reports show them."""
        if self.given is not None:
            return {"given": self.given}
        kinds = asdict(self)
        del kinds["given"]
        return kinds


@dataclass(frozen=True)
class Reserve:
    """Memory left free for the allocator: bytes, or a share of the budget."""

    size_bytes: int = 0
    share: float = 0.0

    def of(self, budget_bytes: int) -> int:
        """Return the bytes left free within a budget."""
        return self.size_bytes + int(self.share * budget_bytes)

    def budget_for(self, needed_bytes: int) -> int:
        """Return the smallest budget that holds ``needed_bytes`` and the reserve."""
        budget = math.ceil((needed_bytes + self.size_bytes) / (1 - self.share))
        while budget - self.of(budget) < needed_bytes:  # rounded, it may be a few bytes off either way
            budget += 1
        while budget > 0 and budget - 1 - self.of(budget - 1) >= needed_bytes:
            budget -= 1
        return budget


def static_memory(
    graph: Graph,
    optimizer: OptimizerMemory,
    *,
    accumulated_bytes: int = 0,
    given_bytes: int | None = None,
) -> StaticMemory:
    """Return the static memory of a step, without a reserve.

    Args:
        graph: The step: its given values are the parameters, buffers and inputs.
        optimizer: What the optimizer keeps.
        accumulated_bytes: ``.grad`` tensors that exist before the step.
        given_bytes: The user's figure for all of it.
    """
    return StaticMemory(
        parameters=graph.given_bytes(Kind.PARAMETER),
        buffers=graph.given_bytes(Kind.BUFFER),
        inputs=graph.given_bytes(Kind.INPUT) + graph.given_bytes(Kind.CONSTANT),
        optimizer_state=optimizer.state_bytes,
        gradients=accumulated_bytes,
        given=given_bytes,
    )


def sharded(static: StaticMemory, n: int) -> StaticMemory:
    """Return what one of ``n`` devices holds of it if they share parameters, gradients and optimizer state."""
    kinds = ("parameters", "gradients", "optimizer_state")
    return replace(static, **{kind: -(-getattr(static, kind) // n) for kind in kinds})


@dataclass(frozen=True)
class Budget:
    """A memory budget as the user named it: bytes, a share of what keep-all needs above static, or the smallest that works.

    Attributes:
        size_bytes: The cap, if it was named in bytes.
        share: The share in (0, 1], if it was named so.
    """

    size_bytes: int | None = None
    share: float | None = None

    @property
    def is_smallest(self) -> bool:
        """Whether the smallest budget that a plan is found for is wanted (``min``)."""
        return self.size_bytes is None and self.share is None

    def resolve(self, static_bytes: int, keep_all_peak_bytes: int) -> int:
        """Return the cap in bytes; shares are of the keep-all step's need above static."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.share is not None, "the smallest budget is searched for, not computed"
        return static_bytes + int(self.share * (keep_all_peak_bytes - static_bytes))


_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
_FRACTION = re.compile(r"\s*([0-9]*\.[0-9]*)\s*")


def parse_budget(budget: str | int | float) -> Budget:
    """Return the budget that ``budget`` names: ``8GiB``, ``8GB``, ``7500MB``, plain bytes, ``60%``, 0.6 or ``min``.

    As text a share is written with ``%``: 0.6 there could also be meant as bytes.

    Raises:
        UsageError: it is none of these, not positive, or a share above 100%.
    """
    examples = "8GiB, 7500MB, plain bytes, 60%, or min"
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise UsageError(
            f"cannot read the memory budget {cut(repr(budget))}", why=f"it is a {type(budget).__name__}", try_=examples
        )
    if isinstance(budget, float):
        return _share(budget, f"{budget!r}")
    if isinstance(budget, int):
        if abs(budget) > MAX_BYTES:
            raise UsageError("cannot use the memory budget", why="it is more than 2**62 bytes", try_=examples)
        return _bytes(budget, f"{budget!r}")
    if budget.strip().lower() == "min":
        return Budget()
    shown = repr(cut(budget))
    if percent := _PERCENT.fullmatch(budget):
        return _share(float(percent.group(1)) / 100, shown)
    if budget.strip().startswith("-"):
        raise UsageError(f"cannot use the memory budget {shown}", why="it is negative", try_=examples)
    size_bytes = parse_bytes(budget, what="memory budget", also="60% or min")
    if _FRACTION.fullmatch(budget):
        share = float(budget)
        raise UsageError(
            f"cannot read the memory budget {shown}",
            why="it has a decimal point and no unit: a share is written with %",
            try_=f"{share * 100:g}%" if 0 < share <= 1 else examples,
        )
    return _bytes(size_bytes, shown)


def _share(share: float, shown: str) -> Budget:
    if not 0 < share <= 1:
        raise UsageError(
            f"cannot use the memory budget {shown}",
            why="a share is of what keeping everything needs, above 0% and at most 100%",
            try_="60% (or 0.6 in Python), or a size such as 8GiB",
        )
    return Budget(share=share)


def _bytes(size_bytes: int, shown: str) -> Budget:
    if size_bytes <= 0:
        raise UsageError(
            f"cannot use the memory budget {shown}", why="it is not positive", try_="8GiB, 7500MB, plain bytes, 60%, or min"
        )
    return Budget(size_bytes=size_bytes)
