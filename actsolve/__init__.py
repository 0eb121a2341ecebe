"""Train a PyTorch model within a memory budget, as fast as can be.

    model = actsolve.optimize(model, args=(x, y), mem_budget="8GiB")
    print(model.report())

Importing the package does not import torch: `optimize` and `TrainingStep` do, when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actsolve.errors import ActsolveError, CaptureError, FileFormatError, InfeasibleBudget, ScheduleError, SolverError, UsageError

if TYPE_CHECKING:
    from actsolve.api import optimize
    from actsolve.inductor.backend import backend
    from actsolve.plan_file import load_plan
    from actsolve.training_step import TrainingStep

__all__ = [
    "ActsolveError",
    "CaptureError",
    "FileFormatError",
    "InfeasibleBudget",
    "ScheduleError",
    "SolverError",
    "TrainingStep",
    "UsageError",
    "backend",
    "load_plan",
    "optimize",
]

_LAZY = {
    "TrainingStep": "actsolve.training_step",
    "backend": "actsolve.inductor.backend",
    "load_plan": "actsolve.plan_file",
    "optimize": "actsolve.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'actsolve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
