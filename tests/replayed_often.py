"""Random plans that replay one op any number of times: what is live is dropped again and again."""

from __future__ import annotations

import random

from actsolve.graph import Graph


def random_replays(graph: Graph, seed: int, drop: float = 0.5, *, anywhere: bool = False) -> dict[int, tuple[int, ...]]:
    """Return replays, per backward op, such that each read finds what it reads; ``anywhere``: and per forward op.

    Before each such op, any value that a replay can make again is dropped with the probability ``drop``; what that op reads
    is then replayed, each op after those whose outputs it reads.
    """
    draw = random.Random(seed)
    forward = {v for v in range(len(graph.values)) if graph.is_forward_value[v]}
    can_be_dropped = {v for v in forward - graph.held if (p := graph.values[v].producer) is not None and graph.ops[p].replayable}
    live = {v for v in forward if not anywhere}
    replays: dict[int, tuple[int, ...]] = {}
    for index in range(0 if anywhere else graph.n_forward, len(graph.ops)):
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
        live.update(v for v in graph.ops[index].outputs if v in forward)
    return replays
