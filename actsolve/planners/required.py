"""Which values a set of kept values cannot do without, and which of them are of no use."""

from __future__ import annotations

from collections.abc import Iterable

from actsolve.graph import Graph, Op


def required(graph: Graph, kept: Iterable[int]) -> frozenset[int]:
    """Return ``kept`` with every value added that its replays need and that no replay can make.

    These are values that the backward, or a replay that it sets off, reads and whose op is not replayable: outputs of
    ops that read changed buffers, RNG states, and the like. The result always has a schedule.

    Args:
        graph: One training step.
        kept: Decidable values that are kept in any case.
    """
    kept = frozenset(kept)
    needed, _ = _demand(graph, kept)
    return kept | {v for v in needed if not _producer(graph, v).replayable}


def useful(graph: Graph, kept: frozenset[int]) -> frozenset[int]:
    """Return ``kept`` without the values that neither the backward nor a replay reads, given that all of ``kept`` is live."""
    _, read = _demand(graph, kept)
    return kept & read


def replayed(graph: Graph, kept: frozenset[int]) -> frozenset[int]:
    """Return the forward ops that keeping exactly ``kept`` makes replay."""
    needed, _ = _demand(graph, kept)
    producers = (graph.values[v].producer for v in needed)
    return frozenset(p for p in producers if p is not None and graph.ops[p].replayable)


def _producer(graph: Graph, value: int) -> Op:
    producer = graph.values[value].producer
    assert producer is not None
    return graph.ops[producer]


def _demand(graph: Graph, kept: frozenset[int]) -> tuple[set[int], set[int]]:
    """Return (forward values needed and not live, all forward values read) by the backward and its replays."""
    live = kept | graph.held
    needed: set[int] = set()
    read: set[int] = set()
    expanded: set[int] = set()
    stack = [v for op in graph.ops[graph.n_forward :] for v in op.inputs if graph.is_forward_value[v]]
    while stack:
        value = stack.pop()
        read.add(value)
        if value in live or value in needed:
            continue
        needed.add(value)
        producer = graph.values[value].producer
        assert producer is not None
        op = graph.ops[producer]
        if op.replayable and producer not in expanded:
            expanded.add(producer)
            stack.extend(v for v in (*op.inputs, *op.replay_inputs) if graph.is_forward_value[v])
    return needed, read
