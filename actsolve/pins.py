"""Decisions that the user has taken: values of whole modules that must be kept, or recomputed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from actsolve.errors import UsageError
from actsolve.graph import RNG_STATE_TARGET, Graph


def pinned_values(graph: Graph, keep: Sequence[str], recompute: Sequence[str]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the values that must be kept and those that must be recomputed, for the modules named.

    A module's pin covers what its ops and those of its submodules produce. With ``recompute``, values whose op
    cannot be replayed stay free.

    Args:
        graph: The training step.
        keep: Qualified module names, such as ``blocks.0`` or ``blocks.3.attention``.
        recompute: Likewise.

    Raises:
        UsageError: no op comes from such a module.
    """
    kept = frozenset(v for path in keep for v in _values_of(graph, path))
    dropped = frozenset(v for path in recompute for v in _values_of(graph, path) if _replayable(graph, v))
    return kept, dropped


def refuse_unknown_modules(known: Iterable[str], pins: Iterable[str]) -> None:
    """Raise a UsageError if one of ``pins`` is not among the module paths ``known``."""
    names = list(known)
    for path in pins:
        if path not in names:
            _no_such_module(path, names)


def _no_such_module(path: str, known: list[str]) -> NoReturn:
    near = difflib.get_close_matches(path, known, n=3)
    raise UsageError(
        f"no op comes from a module called {path!r}", try_=", ".join(near) if near else "one of model.named_modules()"
    )


def _values_of(graph: Graph, path: str) -> list[int]:
    modules = {op.module for op in graph.ops[: graph.n_forward]}
    inside = {m for m in modules if m == path or m.startswith(path + ".")}
    if not inside:
        known = sorted({".".join(m.split(".")[: i + 1]) for m in modules if m for i in range(m.count(".") + 1)})
        _no_such_module(path, known)
    producers = (graph.values[v].producer for v in graph.decidable)
    ops = (graph.ops[p] for p in producers if p is not None)
    return [v for v, op in zip(graph.decidable, ops, strict=True) if op.module in inside and op.target != RNG_STATE_TARGET]


def _replayable(graph: Graph, value: int) -> bool:
    producer = graph.values[value].producer
    return producer is not None and graph.ops[producer].replayable
