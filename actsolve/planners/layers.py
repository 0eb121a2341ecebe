"""The layers of a model, as the people who wrap them in `torch.utils.checkpoint` see them.

A layer is a child of the outermost ModuleList or Sequential (`Op.layer`). What runs before, between and after these
children belongs to no layer: nobody wraps it, so the baselines keep it. A model without such a list is cut at the
articulation points of its forward graph that every path through it crosses.
"""

from __future__ import annotations

import networkx as nx

from actsolve.graph import Graph


def layers(graph: Graph) -> list[list[int]]:
    """Return the forward ops of each layer, in execution order; ops of no layer are left out."""
    if any(op.layer is not None for op in graph.ops[: graph.n_forward]):
        return _layers_of_modules(graph)
    return _stretches(graph)


def _layers_of_modules(graph: Graph) -> list[list[int]]:
    """Runs of ops of one layer index; a list that is run twice gives its layers twice."""
    found: list[list[int]] = []
    current: int | None = None
    for index, op in enumerate(graph.ops[: graph.n_forward]):
        if op.layer is None:
            continue
        if op.layer != current:
            found.append([])
            current = op.layer
        found[-1].append(index)
    return found


def _stretches(graph: Graph) -> list[list[int]]:
    """Forward ops cut after each op that alone connects what ran before it to what runs after it."""
    n = graph.n_forward
    articulations = set(nx.articulation_points(_undirected(graph)))  # iterative in networkx: safe for deep graphs
    last_read = [-1] * n  # per op: the last forward op that reads one of its outputs
    for value in range(len(graph.values)):
        producer = graph.values[value].producer
        if producer is not None and producer < n and graph.forward_readers[value]:
            last_read[producer] = max(last_read[producer], graph.forward_readers[value][-1])
    found: list[list[int]] = [[]]
    furthest = -1  # of the reads of ops before this one
    for index in range(n):
        found[-1].append(index)
        if furthest <= index and index in articulations:
            found.append([])
        furthest = max(furthest, last_read[index])
    return [stretch for stretch in found if stretch]


def _undirected(graph: Graph) -> nx.Graph:
    connections: nx.Graph = nx.Graph()
    connections.add_nodes_from(range(graph.n_forward))
    connections.add_edges_from((("start", 0), (graph.n_forward - 1, "end")))  # so that the outermost ops count too
    for index, op in enumerate(graph.ops[: graph.n_forward]):
        for value in op.inputs:
            producer = graph.values[value].producer
            if producer is not None:
                connections.add_edge(producer, index)
    return connections


def crossing(graph: Graph, segments: list[list[int]]) -> frozenset[int]:
    """Return the decidable values made outside of all segments, or read in the forward outside of the one that makes them."""
    segment_of: dict[int, int] = {op: k for k, ops in enumerate(segments) for op in ops}
    kept = set()
    for value in graph.decidable:
        producer = graph.values[value].producer
        assert producer is not None
        home = segment_of.get(producer)
        if graph.ops[producer].optional:
            continue  # RNG states: kept where a replay needs them
        if home is None:
            if graph.backward_readers[value] or any(segment_of.get(r) is not None for r in graph.forward_readers[value]):
                kept.add(value)
        elif any(segment_of.get(reader) != home for reader in graph.forward_readers[value]):
            kept.add(value)
    return frozenset(kept)


def boundaries(graph: Graph, segments: list[list[int]]) -> frozenset[int]:
    """Return the inputs of the segments: the decidable values that an op of one reads in the forward and that it did not make."""
    segment_of: dict[int, int] = {op: k for k, ops in enumerate(segments) for op in ops}
    found = set()
    for value in crossing(graph, segments):
        producer = graph.values[value].producer
        assert producer is not None
        homes = {segment_of.get(reader) for reader in graph.forward_readers[value]} - {None, segment_of.get(producer)}
        if homes:
            found.add(value)
    return frozenset(found)
