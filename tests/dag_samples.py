"""General graphs that tests make, their files, and the least time of all schedules of a tiny one, by brute force."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actsolve.dag import Dag, general_dag


def random_dag(seed: int, n_nodes: int, layers: int | None = None) -> Dag:
    """Nodes in layers; each reads one to three of the layers before, mostly of the last."""
    rng = random.Random(seed)
    layers = layers or max(2, n_nodes // 3)
    layer = sorted(rng.randrange(layers) for _ in range(n_nodes))
    reads = []
    for node in range(n_nodes):
        before = [u for u in range(node) if layer[u] < layer[node]]
        near = [u for u in before if layer[u] >= layer[node] - 2]
        some = rng.sample(near, min(len(near), rng.randint(1, 2))) + rng.sample(before, min(len(before), rng.randint(0, 1)))
        reads.append(tuple(sorted(set(some))))
    sizes = tuple(rng.randint(1, 30) for _ in range(n_nodes))
    return general_dag(sizes, tuple(reads), tuple(rng.randint(1, 20) for _ in range(n_nodes)), 0)


def content_of(dag: Dag, **more: Any) -> dict[str, Any]:
    """What a file of the graph holds."""
    nodes = [{"size_bytes": s, "time": t} for s, t in zip(dag.sizes, dag.time, strict=True)]
    edges = [[u, v] for v in range(dag.n_nodes) for u in dag.reads[v]]
    return {"format": "actsolve-dag-1", "name": "sample", "nodes": nodes, "edges": edges, **more}


def write_dag(path: Path, dag: Dag, **more: Any) -> Path:
    path.write_text(json.dumps(content_of(dag, **more)))
    return path


def least_time(dag: Dag, budget_bytes: int) -> float | None:
    """The least time of all schedules with this order of first runs within a budget; None if there is none.

    Dijkstra over what may run first next and what is live. A live value may be dropped at any time.
    """
    seen: set[tuple[int, frozenset[int]]] = set()
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while queue:
        time, firsts, listed = heapq.heappop(queue)
        live = frozenset(listed)
        if firsts == dag.n_nodes:
            return time
        if (firsts, live) in seen:
            continue
        seen.add((firsts, live))
        for longer, more, after in _moves(dag, budget_bytes, firsts, live):
            if (more, after) not in seen:
                heapq.heappush(queue, (time + longer, more, tuple(sorted(after))))
    return None


def _moves(dag: Dag, budget_bytes: int, firsts: int, live: frozenset[int]) -> Iterator[tuple[float, int, frozenset[int]]]:
    for value in live:
        yield 0.0, firsts, live - {value}
    for node in range(firsts + 1):
        if node not in live and live.issuperset(dag.reads[node]):
            after = live | {node}
            if sum(dag.sizes[v] for v in after) <= budget_bytes:
                yield dag.time[node], max(firsts, node + 1), after
