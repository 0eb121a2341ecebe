"""What the stages of a chain take: seconds, and bytes of what they make, save, hand on and work with.

All from the graph: the backward's own values (gradients on their way, and those that the caller holds) are counted where they
are live, whatever is replayed; values that are kept throughout count from the first op to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actsolve.graph import Kind
from actsolve.planners.chain import Chain
from actsolve.problem import Problem

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChainMemory:
    """Per stage, or per pair of stages.

    Attributes:
        seconds: One forward run.
        again_seconds: The part of it that only its own backward asks for: what it hands on is there, or no longer needed.
        saved_bytes: What its backward reads of what it makes, and what it hands on.
        border_bytes: What it hands on.
        save_peak_bytes: The most during a run that saves.
        again_peak_bytes: The most during a run for its own backward only.
        backward_peak_bytes: The most during its backward, without what it hands on.
        gradient_bytes: What the backward has made, and the caller holds, when the backward of the stage begins.
        passing_bytes: [first, last]: the most while these stages run in turn, each handing on only its border.
        kept_bytes: What is kept throughout.
    """

    seconds: Bytes
    again_seconds: Bytes
    saved_bytes: Bytes
    border_bytes: Bytes
    save_peak_bytes: Bytes
    again_peak_bytes: Bytes
    backward_peak_bytes: Bytes
    gradient_bytes: Bytes
    passing_bytes: Bytes
    kept_bytes: float

    @property
    def n_stages(self) -> int:
        return len(self.seconds)

    def saving_bytes(self, first: int, last: int) -> float:
        """Return the most while stage ``first`` runs, before the backward of ``last``, and in its own backward."""
        peaks = self.again_peak_bytes if first == last else self.save_peak_bytes
        return float(max(self.gradient_bytes[last] + peaks[first], self.backward_peak_bytes[first]))

    @property
    def least_bytes(self) -> float:
        """What any plan needs."""
        return max(self.saving_bytes(k, k) for k in range(self.n_stages))

    @property
    def most_bytes(self) -> float:
        """What no plan needs: all saved at once, beside the largest of all else."""
        work = max(self.save_peak_bytes.max(), self.backward_peak_bytes.max(), self.passing_bytes.max())
        return float(self.saved_bytes.sum() + self.gradient_bytes.max() + work)


def chain_memory(problem: Problem, chain: Chain) -> ChainMemory:
    """Return what the stages of ``chain`` take."""
    graph = problem.graph
    sizes, decidable = [v.size_bytes for v in graph.values], set(graph.decidable)
    needed = _needed(chain)
    stages = [_stage(problem, chain, stage, needed[stage]) for stage in range(chain.n_stages)]
    seconds, again, saved, border, save_peak, again_peak, pass_peak = zip(*stages, strict=True)
    backward_peak, gradients = _backward_bytes(problem, chain, needed)
    kept = sum(sizes[v] for v in chain.kept if v in decidable and v not in graph.held)
    return ChainMemory(
        seconds=np.array(seconds),
        again_seconds=np.array(again),
        saved_bytes=np.array(saved, dtype=np.float64),
        border_bytes=np.array(border, dtype=np.float64),
        save_peak_bytes=np.array(save_peak, dtype=np.float64),
        again_peak_bytes=np.array(again_peak, dtype=np.float64),
        backward_peak_bytes=np.array(backward_peak, dtype=np.float64),
        gradient_bytes=np.array(gradients, dtype=np.float64),
        passing_bytes=_passing_bytes(border, pass_peak),
        kept_bytes=float(kept),
    )


def _needed(chain: Chain) -> list[frozenset[int]]:
    """Per stage: the values that it makes and that its own backward reads."""
    graph = chain.graph
    read: list[set[int]] = [set() for _ in range(chain.n_stages)]
    for op, stage in zip(graph.ops[graph.n_forward :], chain.backward_stage, strict=True):
        read[stage].update(op.inputs)
    return [frozenset(read[stage].intersection(made)) for stage, made in enumerate(chain.made)]


def _stage(problem: Problem, chain: Chain, stage: int, needed: frozenset[int]) -> tuple[float, ...]:
    """Seconds and bytes of one stage, as `ChainMemory` has them, its peak while only passing at the end."""
    graph, seconds = problem.graph, problem.costs.replay_seconds
    leaving = frozenset(v for v in chain.made[stage] if chain.leaves(v))
    ops = [op for op in chain.stages[stage] if graph.ops[op].replayable]
    again: list[int] = []
    wanted = set(needed)
    for op in reversed(ops):
        if not wanted.isdisjoint(graph.ops[op].outputs):
            again.append(op)
            wanted.update(graph.ops[op].inputs)
    again.reverse()
    return (
        sum(seconds[op] for op in ops),
        sum(seconds[op] for op in again),
        sum(graph.values[v].size_bytes for v in leaving | needed),
        sum(graph.values[v].size_bytes for v in leaving),
        _peak_bytes(problem, chain, chain.stages[stage], leaving | needed),
        _peak_bytes(problem, chain, again, needed),
        _peak_bytes(problem, chain, chain.stages[stage], leaving),
    )


def _peak_bytes(problem: Problem, chain: Chain, ops: Sequence[int], staying: frozenset[int]) -> int:
    """The most bytes of what ``ops`` of a stage make, and of their workspace, if the values that are ``staying`` stay."""
    graph = problem.graph
    last = {v: op for op in ops for v in (*graph.ops[op].outputs, *graph.ops[op].inputs)}
    live: set[int] = set()
    current = peak = 0
    for index in ops:
        op = graph.ops[index]
        outputs = {v for v in op.outputs if v not in chain.kept}
        dying = {v for v in live | outputs if v not in staying and last[v] <= index}
        made = sum(graph.values[v].size_bytes for v in outputs)
        freed = sum(graph.values[v].size_bytes for v in dying)
        at_once = graph.values[op.in_place[0]].size_bytes if op.in_place is not None and op.in_place[0] in dying else 0
        peak = max(peak, current + made - at_once + problem.costs.workspace_bytes[index])
        current += made - freed
        live = (live | outputs) - dying
    return peak


def _backward_bytes(problem: Problem, chain: Chain, needed: list[frozenset[int]]) -> tuple[list[int], list[int]]:
    """Per stage: the most during its backward, and what is there when it begins but for what stages make."""
    graph = problem.graph
    sizes = [v.size_bytes for v in graph.values]
    current = sum(sizes[v] for v in graph.outputs if graph.is_forward_value[v]) + graph.given_bytes(Kind.TANGENT)
    peak, begins = [0] * chain.n_stages, [0] * chain.n_stages
    before = chain.n_stages
    for index, stage in zip(range(graph.n_forward, len(graph.ops)), chain.backward_stage, strict=True):
        for entered in range(stage, before):
            begins[entered] = current
        before = stage
        op = graph.ops[index]
        dying = {v for v in (*op.inputs, *op.outputs) if _backward_value_ends(problem, v, index)}
        made, freed = sum(sizes[v] for v in op.outputs), sum(sizes[v] for v in dying)
        saved = sum(sizes[v] for v in needed[stage] if graph.backward_readers[v][-1] >= index)
        at_once = sizes[op.in_place[0]] if op.in_place is not None and op.in_place[0] in dying else 0
        peak[stage] = max(peak[stage], current + made - at_once + saved + problem.costs.workspace_bytes[index])
        current += made - freed
    for entered in range(before):
        begins[entered] = current
    return [max(p, b) for p, b in zip(peak, begins, strict=True)], begins


def _backward_value_ends(problem: Problem, value: int, op: int) -> bool:
    graph = problem.graph
    producer = graph.values[value].producer
    if producer is None or graph.is_forward_value[value] or value in graph.held:
        return False
    readers = graph.backward_readers[value]
    return not readers or readers[-1] == op


def _passing_bytes(border: Sequence[float], pass_peak: Sequence[float]) -> Bytes:
    """[first, last]: the input of the first does not count, those of the others do."""
    n = len(border)
    found = np.zeros((n, n))
    peaks = np.array(pass_peak, dtype=np.float64)
    inputs = np.array([0, *border[:-1]], dtype=np.float64)
    for first in range(n):
        each = peaks[first:].copy()
        each[1:] += inputs[first + 1 :]
        found[first, first:] = np.maximum.accumulate(each)
    return found
