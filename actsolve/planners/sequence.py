"""The memory of a sequence of runs, in bulk: local searches look at thousands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from actsolve.dag import Dag

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Lists of values, one per node, end to end."""

    start: Ints
    values: Ints

    @staticmethod
    def of(lists: list[tuple[int, ...]]) -> Rows:
        start = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(x) for x in lists], out=start[1:])
        return Rows(start, np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(start[-1])))

    def gather(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return, for each of ``nodes`` in turn, its values; and beside each the place in ``nodes`` that it came from."""
        count = self.start[nodes + 1] - self.start[nodes]
        offset = np.cumsum(count) - count
        place = np.repeat(np.arange(len(nodes), dtype=np.int64), count)
        index = np.arange(len(place), dtype=np.int64) - np.repeat(offset - self.start[nodes], count)
        return self.values[index], place


class Runner:
    """Tells the memory of sequences over one graph.

    A sequence is an array of nodes. The first time that a node comes is its first run; those come in order.
    """

    def __init__(self, dag: Dag) -> None:
        n = dag.n_nodes
        self.dag = dag
        self.sizes = np.array(dag.sizes, dtype=np.int64)
        self.time = np.array(dag.time, dtype=np.float64)
        # Entry n + i is node i run again.
        self.reads = Rows.of([*dag.reads, *dag.replay_reads])
        self.makes = Rows.of([*dag.makes, *dag.makes])
        self.resident = np.array([*dag.resident, 0], dtype=np.int64)
        self.workspace = np.array([*dag.workspace, *dag.workspace], dtype=np.int64)
        pairs = [p or (-1, -1) for p in dag.in_place]
        self.in_place = np.array([*pairs, *pairs], dtype=np.int64).reshape(2 * n, 2)
        self.any_in_place = any(p is not None for p in dag.in_place)
        self.held = np.zeros(len(dag.sizes), dtype=bool)
        self.held[list(dag.held)] = True
        self.stays = np.zeros(len(dag.sizes), dtype=bool)
        self.stays[list(dag.stays)] = True

    def run(self, nodes: Ints) -> Sequence:
        """Return what ``nodes``, run in that order, do.

        Raises:
            ValueError: a run reads what no run before it has made.
        """
        n, length = self.dag.n_nodes, len(nodes)
        _, first = np.unique(nodes, return_index=True)
        again = np.ones(length, dtype=bool)
        again[first] = False
        code = nodes + n * again
        made, made_at = self.makes.gather(code)
        in_forward = np.cumsum(~again) < self.dag.n_forward
        stays = self.held[made] | (self.stays[made] & in_forward[made_at])
        counted = ~(stays & again[made_at])  # a later copy of what stays ends at once
        end = made_at.copy()
        copies = np.flatnonzero(counted)
        order = copies[np.lexsort((made_at[copies], made[copies]))]
        keys = made[order] * np.int64(length) + made_at[order]
        read, reader = self.reads.gather(code)
        found = np.searchsorted(keys, read * np.int64(length) + reader) - 1
        if len(read) and (found.min(initial=0) < 0 or (made[order[found]] != read).any()):
            raise ValueError("a run reads what no run before it has made")
        copy = order[found]
        np.maximum.at(end, copy, reader)
        end[self.held[made] & counted] = length - 1
        return Sequence(self, nodes, again, made, made_at, end, copy, reader)


@dataclass(frozen=True, eq=False)
class Sequence:
    """What a sequence does.

    Attributes:
        runner: What it is a sequence of.
        nodes: Per run, its node.
        again: Per run, whether it is not the first of its node.
        made: Per copy, its value.
        made_at: Per copy, the run that makes it.
        end: Per copy, the last run that reads it.
        copy: Per read, the copy.
        reader: Per read, the run.
    """

    runner: Runner
    nodes: Ints
    again: npt.NDArray[np.bool_]
    made: Ints
    made_at: Ints
    end: Ints
    copy: Ints
    reader: Ints

    @cached_property
    def memory(self) -> Ints:
        """Bytes during each run."""
        runner, length = self.runner, len(self.nodes)
        code = self.nodes + runner.dag.n_nodes * self.again
        change = np.zeros(length + 1, dtype=np.int64)
        sizes = runner.sizes[self.made]
        np.add.at(change, self.made_at, sizes)
        np.subtract.at(change, self.end + 1, sizes)
        next_first = np.where(self.again, np.cumsum(~self.again), self.nodes)
        memory = np.cumsum(change[:-1]) + runner.resident[next_first] + runner.workspace[code]
        if runner.any_in_place:
            memory -= self._shared(code)
        return memory

    def _shared(self, code: Ints) -> Ints:
        """Bytes that each run does not take since it works in place: later not in what the forward has left (`replays`)."""
        runner, length = self.runner, len(self.nodes)
        source = runner.in_place[code, 0]
        value = self.made[self.copy]
        start = int(np.searchsorted(np.cumsum(~self.again), runner.dag.n_forward)) + 1 if runner.dag.n_forward else 0
        ends = (value == source[self.reader]) & (self.end[self.copy] == self.reader)
        saved = (self.made_at[self.copy] < start) & (self.reader >= start)
        shared = np.zeros(length, dtype=np.int64)
        stays = runner.held[value] | (runner.stays[value] & (self.reader < start))
        hits = ends & ~saved & ~stays
        shared[self.reader[hits]] = runner.sizes[value[hits]]
        return shared

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.memory.max(initial=0))

    @cached_property
    def excess(self) -> float:
        """Bytes over the budget, summed over the runs."""
        return float(np.maximum(0, self.memory - self.runner.dag.budget_bytes).sum())

    @cached_property
    def extra_time(self) -> float:
        """What the later runs take."""
        return float(self.runner.time[self.nodes[self.again]].sum())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.runner.dag.budget_bytes
