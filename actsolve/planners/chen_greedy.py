"""Greedy segments of about b bytes, each wrapped in `torch.utils.checkpoint`, for many b.

Source:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, 2016, algorithm 3. They cut at operations that
    the user allows and search b by a grid around sqrt(x y); we cut at the borders of layers and, in a second series, of the
    chain's stages, over a grid of the whole range, and the exact simulator chooses. With and without a replay of
    the last segment, which frees memory for its own backward only.
"""

from __future__ import annotations

from collections.abc import Iterator

from actsolve.graph import Graph
from actsolve.plan import Plan, Status
from actsolve.planners.best import best_of
from actsolve.planners.chain import chain_of
from actsolve.planners.keep_all import pins_note
from actsolve.planners.layers import crossing, layers
from actsolve.planners.options import PlannerOptions
from actsolve.planners.required import required
from actsolve.problem import Problem

_BUDGETS = 24  # segment sizes that are tried, from the smallest unit to the whole forward


def chen_greedy(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the fastest plan that fits, else the one of lowest peak."""
    graph = problem.graph
    kept_sets: dict[frozenset[int], None] = {}
    for units in (layers(graph), [list(stage) for stage in chain_of(problem).stages]):
        for segments in _segmentations(graph, units):
            kept_sets[required(graph, crossing(graph, segments))] = None
            kept_sets[required(graph, crossing(graph, segments[:-1]))] = None
    best = best_of(problem, (Plan("chen_greedy", kept, note=pins_note(problem)) for kept in kept_sets))
    return best or Plan("chen_greedy", status=Status.UNKNOWN, note="the forward has no layers")


def _segmentations(graph: Graph, units: list[list[int]]) -> Iterator[list[list[int]]]:
    sizes = [sum(_saved_bytes(graph, op) for op in unit) for unit in units]
    if not units:
        return
    least, most = max(1, min(sizes)), max(1, sum(sizes))
    for k in range(_BUDGETS + 1):
        limit = least * (most / least) ** (k / _BUDGETS)
        segments: list[list[int]] = [[]]
        filled = 0
        for unit, size in zip(units, sizes, strict=True):
            if segments[-1] and filled + size > limit:
                segments.append([])
                filled = 0
            segments[-1] += unit
            filled += size
        yield segments


def _saved_bytes(graph: Graph, op: int) -> int:
    return sum(graph.values[v].size_bytes for v in graph.ops[op].outputs if graph.backward_readers[v])
