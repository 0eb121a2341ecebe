"""Sequences that are nearly right, made right: what does not fit is relieved, what is not needed is removed."""

from __future__ import annotations

import random
import time

import numpy as np

from actsolve.planners.sequence import Ints, Sequence

_TRIED = 8  # insertions tried per relief: those that promise most


def repaired(sequence: Sequence, deadline: float, noise: float = 0.0, draw: random.Random | None = None) -> Sequence | None:
    """Return a sequence that fits, or None if none was found by relieving the worst run again and again.

    Relief: a value that is live there and not read is made again just before its next read. Tried first is what takes the least
    time per byte and run over the budget.

    Args:
        sequence: Where to start.
        deadline: When to give up, in seconds of `time.perf_counter`.
        noise: How much that order is shuffled by ``draw``.
        draw: Where ``noise`` comes from.
    """
    draw = draw or random.Random(0)
    while not sequence.fits:
        if time.perf_counter() > deadline:
            return None
        ranked = sorted(_reliefs(sequence, noise, draw))
        best: tuple[float, Sequence] | None = None
        for number, (_, copy, before) in enumerate(ranked):
            if number >= _TRIED and best is not None:
                break
            new = sequence.runner.run(_inserted(sequence, copy, before))
            gain = sequence.excess - new.excess
            if gain > 0:
                price = max(new.extra_time - sequence.extra_time, 1e-12) / gain
                if best is None or price < best[0]:
                    best = price, new
        if best is None:
            return None
        sequence = best[1]
    return sequence


def _reliefs(sequence: Sequence, noise: float, draw: random.Random) -> list[tuple[float, int, int]]:
    """Return (price, copy, run before which it can be made again) for each copy that is idle at the worst run."""
    runner = sequence.runner
    worst = int(np.argmax(sequence.memory))
    over = np.maximum(0, sequence.memory - runner.dag.budget_bytes)
    crossing = np.flatnonzero((sequence.made_at < worst) & (sequence.end > worst) & ~runner.held[sequence.made])
    read_there = set(sequence.copy[sequence.reader == worst].tolist())
    first_again = int(np.argmax(sequence.nodes == runner.dag.replay_from))
    found = []
    for copy in crossing.tolist():
        value = int(sequence.made[copy])
        node = runner.dag.maker[value]
        if copy in read_there or not runner.dag.replayable[node]:
            continue
        readers = sequence.reader[sequence.copy == copy]
        after = int(readers[readers > worst].min())
        if after < first_again:
            continue
        earlier = readers[readers < worst]
        since = int(earlier.max()) if len(earlier) else int(sequence.made_at[copy])
        relieved = float(np.minimum(over[since + 1 : after], runner.sizes[value]).sum())
        price = runner.time[node] / max(relieved, 1e-9)
        found.append((price * (1 + noise * draw.random()), copy, after))
    return found


def _inserted(sequence: Sequence, copy: int, before: int) -> Ints:
    """Return the runs with the maker of ``copy`` run again before run ``before``, and whatever that needs.

    What its maker reads and is no longer live stays live until then if it fits; else it is made again too.
    """
    runner, memory = sequence.runner, sequence.memory
    dag, budget = runner.dag, runner.dag.budget_bytes
    earlier = np.flatnonzero(sequence.made_at < before)
    latest = dict(zip(sequence.made[earlier].tolist(), earlier.tolist(), strict=True))  # in order: the last one stays

    def there(value: int) -> bool:
        end = int(sequence.end[latest[value]])
        fits = end >= before or memory[end + 1 : before].max(initial=0) + dag.sizes[value] <= budget
        return fits or not dag.replayable[dag.maker[value]]

    nodes: set[int] = set()
    stack = [dag.maker[int(sequence.made[copy])]]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack += [dag.maker[v] for v in dag.replay_reads[node] if not there(v)]
    return np.concatenate([sequence.nodes[:before], np.array(sorted(nodes), dtype=np.int64), sequence.nodes[before:]])


def cleaned(sequence: Sequence, deadline: float) -> Sequence:
    """Return ``sequence``, which fits, without replays that it can do without, the longest first."""
    refused: set[tuple[int, int]] = set()  # (node, which of its runs)
    while True:
        again = np.flatnonzero(sequence.again)
        again = again[np.argsort(-sequence.runner.time[sequence.nodes[again]], kind="stable")]
        for place in again.tolist():
            node = int(sequence.nodes[place])
            key = node, int((sequence.nodes[:place] == node).sum())
            if key in refused:
                continue
            if time.perf_counter() > deadline:
                return sequence
            new = sequence.runner.run(np.delete(sequence.nodes, place))
            if new.fits:
                sequence = new
                break
            refused.add(key)
        else:
            return sequence
