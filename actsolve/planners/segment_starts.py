"""Sequences as solutions of the program over segments, and what is to be counted where one does not fit."""

from __future__ import annotations

import numpy as np

from actsolve.planners.lp import Array
from actsolve.planners.segments import Moment, SegmentModel
from actsolve.planners.sequence import Ints, Sequence


def bytes_at(sequence: Sequence) -> dict[Moment, int]:
    """Return the memory of ``sequence`` at every moment; of several replays of one node for another, the most."""
    found: dict[Moment, int] = {}
    waiting: list[tuple[int, int]] = []
    for node, again, memory in zip(sequence.nodes.tolist(), sequence.again.tolist(), sequence.memory.tolist(), strict=True):
        if again:
            waiting.append((node, memory))
            continue
        for replay, bytes_ in waiting:
            moment = Moment(node, replay)
            found[moment] = max(bytes_, found.get(moment, 0))
        waiting = []
        found[Moment(node)] = memory
    return found


def moments_over(sequence: Sequence) -> set[Moment]:
    """Return the moments at which ``sequence`` is over the budget."""
    return {moment for moment, bytes_ in bytes_at(sequence).items() if bytes_ > sequence.runner.dag.budget_bytes}


def replays_for(sequence: Sequence) -> dict[int, set[int]]:
    """Return, per node, what runs again between the first run before its own and its own."""
    found: dict[int, set[int]] = {}
    waiting: set[int] = set()
    for node, again in zip(sequence.nodes.tolist(), sequence.again.tolist(), strict=True):
        if again:
            waiting.add(node)
        else:
            found[node] = waiting
            waiting = set()
    return found


def in_order(sequence: Sequence) -> Sequence:
    """Return ``sequence`` with the replays for each first run in the order of the nodes, each once."""
    runs = [n for node, before in replays_for(sequence).items() for n in (*sorted(before), node)]
    return sequence.runner.run(np.array(runs, dtype=np.int64))


def start_of(model: SegmentModel, sequence: Sequence) -> Array | None:
    """Return ``sequence`` as a solution of ``model``, or None if it runs again what the model has no column for.

    Replays for one first run must be `in_order`.
    """
    x = np.zeros(model.model.n_columns)
    ends = _segment_ends(model, sequence)
    segment_of = np.searchsorted(ends, np.arange(len(sequence.nodes)))
    for place in np.flatnonzero(sequence.again).tolist():
        column = model.again.get((int(sequence.nodes[place]), int(segment_of[place])))
        if column is None:
            return None
        x[column] = 1.0
    begins = np.searchsorted(ends, sequence.made_at)  # the first segment after which each copy is live
    stops = np.searchsorted(ends, sequence.end)  # and the first after which it is not
    for value, begin, stop in zip(sequence.made.tolist(), begins.tolist(), stops.tolist(), strict=True):
        for column, first, last in model.columns_of(value):
            if first < stop and last > begin:
                x[column] = 1.0
    for segment, column in model.over.items():
        memory = sequence.memory[ends[segment]]
        x[column] = max(0.0, float(memory) / sequence.runner.dag.budget_bytes - 1.0)
    return x


def cuts_for(model: SegmentModel, sequence: Sequence) -> set[Moment]:
    """Return moments that end a segment between the first run of a node and a replay of it, where ``model`` has both in one."""
    segment_of = np.searchsorted(_segment_ends(model, sequence), np.arange(len(sequence.nodes)))
    first_in = {int(sequence.nodes[place]): int(segment_of[place]) for place in np.flatnonzero(~sequence.again)}
    replays = ((int(sequence.nodes[place]), int(segment_of[place])) for place in np.flatnonzero(sequence.again))
    return {Moment(node) for node, segment in replays if first_in[node] == segment}


def _segment_ends(model: SegmentModel, sequence: Sequence) -> Ints:
    """Per segment, the last run of ``sequence`` that belongs to it."""
    first_at = np.zeros(model.dag.n_nodes, dtype=np.int64)
    firsts = np.flatnonzero(~sequence.again)
    first_at[sequence.nodes[firsts]] = firsts
    ends = np.zeros(len(model.segments), dtype=np.int64)
    end = -1
    for index, segment in enumerate(model.segments):
        moment = segment.moment
        if moment is None or moment.replay is None:
            end = int(first_at[segment.firsts[-1]])
        else:
            start = max(end + 1, int(first_at[moment.node - 1]) + 1 if moment.node else 0)
            before = np.flatnonzero(sequence.nodes[start : first_at[moment.node]] <= moment.replay)
            end = start + int(before[-1]) if len(before) else start - 1
        ends[index] = end
    return ends
