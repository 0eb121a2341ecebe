"""What PyTorch's own partitioner would save of a captured step, as a planner takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from actsolve.capture.captured import Captured
from actsolve.capture.torch_internals import partitioner_saves
from actsolve.errors import CaptureError


def saved_by_torch(captured: Captured) -> Callable[[float], frozenset[int]]:
    """Return a function from a memory budget of PyTorch, between 0 and 1, to the decidable values that it saves.

    A view that it saves is its storage here. What it saves of a step that it would first simplify (common
    subexpressions) is told by the names of the nodes that are left. Each budget takes seconds on a large model, once.
    """
    graph = captured.graph
    by_name = {node.name: value for node, value in captured.value_of.items()}
    decidable = frozenset(graph.decidable)

    @cache
    def saved(memory_budget: float) -> frozenset[int]:
        try:
            names = partitioner_saves(captured.joint.module, captured.n_forward_outputs, memory_budget)
        except Exception as error:  # torch's, of any kind
            raise CaptureError("PyTorch's partitioner fails on this step", why=f"{type(error).__name__}: {error}") from error
        return decidable.intersection(by_name[name] for name in names if name in by_name)

    return saved
