"""Recompute the core of attention only: scores, softmax and its dropout, which are large and cheap.

Source:
    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, 2022 (Megatron-LM,
    selective activation recomputation). They name the module; we find each softmax between two batched matrix products.
    A fused kernel for attention saves none of these values, so that there is nothing left to recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actsolve.graph import Graph
from actsolve.plan import Plan, Status
from actsolve.planners.keep_all import keep_all, pins_note
from actsolve.planners.options import PlannerOptions
from actsolve.planners.required import required
from actsolve.problem import Problem

_PRODUCTS = frozenset({"aten.bmm.default", "aten.baddbmm.default", "aten.matmul.default", "aten.bmm.dtype"})
_FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
_FURTHEST = 8  # ops between softmax and product: scale, mask, cast, dropout


def selective(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that keeps all but what the cores of attention make. The budget is not looked at."""
    graph = problem.graph
    core = attention_core(graph)
    if not core:
        fused = any(name in op.target for op in graph.ops[: graph.n_forward] for name in _FUSED)
        note = "attention is fused" if fused else "there is no attention"
        return Plan("selective", status=Status.UNKNOWN, note=note)
    dropped = {v for op in core for v in graph.ops[op].outputs if not graph.ops[op].optional}
    kept = required(graph, keep_all(problem).kept - dropped)
    return Plan("selective", kept, note=pins_note(problem))


def attention_core(graph: Graph) -> frozenset[int]:
    """Return the forward ops from the product of queries and keys to the last before the product with the values."""
    found: set[int] = set()
    for index, op in enumerate(graph.ops[: graph.n_forward]):
        if "softmax" not in op.target:
            continue
        above = _between(index, lambda o: _producers(graph, o), lambda o: _is_product(graph, o))
        below = _between(index, lambda o: _readers(graph, o), lambda o: _is_product(graph, o))
        if above and below:
            found |= above | {o for o in below if not _is_product(graph, o)}
    return frozenset(found)


def _between(start: int, step: Callable[[int], Iterable[int]], ends: Callable[[int], bool]) -> set[int]:
    """Ops on the ways from ``start`` to the nearest ops where they end, both included; none if no way ends within reach."""
    reached = {start: 0}
    parents: dict[int, set[int]] = {}
    queue = [start]
    last = []
    for op in queue:  # grows
        if op != start and ends(op):
            last.append(op)
            continue
        for following in step(op):
            parents.setdefault(following, set()).add(op)
            if following not in reached and reached[op] < _FURTHEST:
                reached[following] = reached[op] + 1
                queue.append(following)
    found: set[int] = set()
    while last:
        op = last.pop()
        if op not in found:
            found.add(op)
            last += parents.get(op, ())
    return found


def _is_product(graph: Graph, op: int) -> bool:
    return graph.ops[op].target in _PRODUCTS


def _producers(graph: Graph, op: int) -> list[int]:
    found = (graph.values[v].producer for v in graph.ops[op].inputs)
    return [p for p in found if p is not None]


def _readers(graph: Graph, op: int) -> list[int]:
    return [reader for v in graph.ops[op].outputs for reader in graph.forward_readers[v]]
