"""Random plans that replay one op any number of times: what is live is dropped again and again."""

from __future__ import annotations

import random

from actsolve.graph import Graph


def random_replays(graph: Graph, seed: int, drop: float = 0.5) -> dict[int, tuple[int, ...]]:
    """Return replays, per backward op, such that each read finds what it reads.

    Before each backward op, any value that a replay can make again is dropped with the probability ``drop``; what that op reads
    is then replayed, each op after those whose outputs it reads.
    """
    draw = random.Random(seed)
    live = {v for v in range(len(graph.values)) if graph.is_forward_value[v]}
    can_be_dropped = {v for v in live - graph.held if (p := graph.values[v].producer) is not None and graph.ops[p].replayable}
    replays: dict[int, tuple[int, ...]] = {}
    for index in range(graph.n_forward, len(graph.ops)):
        live -= {v for v in sorted(can_be_dropped) if draw.random() < drop}
        found: list[int] = []

        def make(value: int, found: list[int] = found, live: set[int] = live) -> None:
            if not graph.is_forward_value[value] or value in live:
                return
            op = graph.values[value].producer
            assert op is not None
            for read in (*graph.ops[op].inputs, *graph.ops[op].replay_inputs):
                make(read)
            found.append(op)
            live.update(graph.ops[op].outputs)

        for value in graph.ops[index].inputs:
            make(value)
        if found:
            replays[index] = tuple(found)
    return replays
