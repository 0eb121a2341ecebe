"""How to plan: what `optimize` takes besides the step and its budget, checked as soon as it is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch

from actsolve.cost.optimizers import optimizer_memory
from actsolve.errors import UsageError
from actsolve.planners import BASELINES, PLANNERS, PlannerOptions, Progress
from actsolve.units import MAX_BYTES

_SIZES = ("static_bytes", "reserve_bytes", "host_budget_bytes")
_SPEEDS = ("h2d", "d2h")


@dataclass(frozen=True)
class Settings:
    """How to plan. What `optimize` takes, with its defaults.

    Attributes:
        optimizer: A name (``adamw``, ``sgd``, ``none``, ...) or an instance, for its state and its step's temporaries.
        hardware: ``auto`` measures each op here; a profile's name models them.
        planner: A name in `actsolve.planners.PLANNERS`.
        solver: ``highs``, or a solver that PuLP knows.
        gap: Proven relative distance from the optimum at which to stop.
        time_limit_s: When to stop all the same.
        grads: ``none`` if ``.grad`` is None when a step begins (``set_to_none``), ``accumulate`` if it is there already.
        shards: How many devices share parameters, gradients and optimizer state (FSDP, ZeRO-3): each gradient is reduced and
            scattered as soon as it is made. The plan is for one of them, and cannot be run.
        static_bytes: Stands for parameters, buffers, inputs, optimizer state and reserve if given.
        reserve_bytes: Left free for the allocator; None is 0 on a CPU and 5% of the budget for a GPU.
        host_budget_bytes: Cap on host memory for what is offloaded; 0 offloads nothing. None is 80% of what is available here
            where the plan is to run here, and no cap for a profile.
        h2d: Bytes per second from host to device; None is that of the hardware.
        d2h: Bytes per second from device to host; likewise.
        keep: Module paths whose values must be kept.
        recompute: Module paths whose values must not be kept.
    """

    optimizer: str | torch.optim.Optimizer = "adamw"
    hardware: str = "auto"
    planner: str = "milp"
    solver: str = "highs"
    gap: float = 0.01
    time_limit_s: float = 60.0
    grads: str = "none"
    shards: int = 1
    static_bytes: int | None = None
    reserve_bytes: int | None = None
    host_budget_bytes: int | None = None
    h2d: float | None = None
    d2h: float | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._refuse_wrong_types()
        if self.grads not in ("none", "accumulate"):
            raise UsageError(f"grads={self.grads!r} is not known", try_="'none' or 'accumulate'")
        if self.shards < 1:
            raise UsageError(f"cannot use shards={self.shards}", why="it is not positive", try_="the number of GPUs")
        if self.planner not in PLANNERS:
            raise UsageError(f"no planner is called {self.planner!r}", try_="one of " + ", ".join(PLANNERS))
        if isinstance(self.optimizer, str):
            optimizer_memory(self.optimizer, ())  # an unknown name is told now
        if self.pinned and self.planner in BASELINES:
            raise UsageError(
                f"cannot honour {self.pinned} with the planner {self.planner}",
                why="a baseline decides by its own rule, whatever is pinned",
                try_="the planner milp, or no pins",
            )
        if not 0 <= self.gap < float("inf"):
            raise UsageError(f"cannot use gap={self.gap!r}", why="it is a share of the extra time", try_="0.01")
        if not 0 < self.time_limit_s < float("inf"):
            raise UsageError(f"cannot use a time limit of {self.time_limit_s!r} s", why="it is not positive", try_="60")
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 0:
                raise UsageError(f"cannot use {name}={size}", why="it is negative")
        for name in _SPEEDS:
            speed = getattr(self, name)
            if speed is not None and not 1 <= speed <= MAX_BYTES:
                raise UsageError(f"cannot use {name}={speed!r}", why="it is no speed of a link", try_=f"{name}=25e9, for 25 GB/s")

    def _refuse_wrong_types(self) -> None:
        kinds: dict[str, tuple[tuple[type, ...], str]] = {
            "optimizer": (
                (str, torch.optim.Optimizer),
                'an instance of torch.optim.Optimizer, or a name such as "adamw" or "none"',
            ),
            **dict.fromkeys(("hardware", "planner", "solver", "grads"), ((str,), "its name, a string")),
            **dict.fromkeys(("gap", "time_limit_s"), ((Real,), "a number")),
            "shards": ((Integral,), "a number of devices, as an int"),
            **dict.fromkeys(_SIZES, ((Integral, type(None)), "bytes, as an int, or None")),
            **dict.fromkeys(_SPEEDS, ((Real, type(None)), "bytes per second, as a number, or None")),
        }
        for name, (types, try_) in kinds.items():
            given = getattr(self, name)
            if not isinstance(given, types) or isinstance(given, bool):
                raise UsageError(f"cannot use {name}={given!r}", why=f"its type is {type(given).__name__}", try_=try_)
        for name, paths in (("keep", self.keep), ("recompute", self.recompute)):
            if not isinstance(paths, tuple) or not all(isinstance(path, str) for path in paths):
                try_ = f"{name}=[{paths!r}]" if isinstance(paths, str) else f'{name}=["blocks.0"]'
                raise UsageError(f"cannot use {name}={paths!r}", why="it is no list of module paths", try_=try_)

    @property
    def pinned(self) -> str:
        """What the user has decided, as ``keep``, ``recompute`` or both; empty if nothing."""
        return " and ".join(name for name in ("keep", "recompute") if getattr(self, name))

    @property
    def pins(self) -> tuple[str, ...]:
        """The modules that the user has decided about."""
        return (*self.keep, *self.recompute)

    def refuse_pins_of_a_saved_plan(self) -> None:
        """Raise if values are pinned, where a saved plan says what becomes of each."""
        if self.pinned:
            raise UsageError(
                f"cannot honour {self.pinned} with a saved plan",
                why="the plan has its decisions, and nothing is solved",
                try_="leave out the pins, or the plan, to solve with them",
            )

    def planner_options(self, progress: Progress | None = None) -> PlannerOptions:
        return PlannerOptions(gap=self.gap, time_limit_s=self.time_limit_s, solver=self.solver, progress=progress)
