"""The integer program over stages, against all that there is on tiny graphs."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from strategies import PLAIN, random_problem
from test_baselines import EXACT, simulated
from test_planners import chain, problem_of

from actsolve.graph import Kind
from actsolve.plan import Status
from actsolve.planners import plan
from actsolve.problem import Problem


def test_checkmate_equals_brute_force() -> None:
    """Over all that may be replayed before each backward op, in the order of the forward, and all that may stay."""
    n_found = n_none = 0
    for seed in range(60):
        problem = random_problem(seed, n_forward=3 + seed % 2, odd=PLAIN)
        found, least_s = plan(problem, "checkmate", EXACT), least_recompute_s(problem)
        assert found.found == (least_s is not None), seed
        if least_s is None:
            n_none += 1
            continue
        n_found += 1
        assert simulated(problem, found).recompute_s == pytest.approx(least_s, abs=1e-9), seed
    assert n_found > 30 and n_none > 5


def least_recompute_s(problem: Problem) -> float | None:
    """Walk over stages with every set of values that may be there; of plain graphs only."""
    graph, sizes = problem.graph, [v.size_bytes for v in problem.graph.values]
    forward = range(graph.n_forward)
    free = [v for v in graph.decidable if v not in graph.held]
    room = problem.dynamic_budget_bytes
    made_by = {v: graph.values[v].producer for v in range(len(graph.values))}
    if sum(sizes[v] for v in graph.held) + problem.optimizer_bytes > room:
        return None

    def forward_fits(kept: frozenset[int]) -> bool:
        for k in forward:
            live = {
                v
                for op in graph.ops[: k + 1]
                for v in op.outputs
                if v in kept or v in graph.held or made_by[v] == k or graph.forward_readers[v][-1:] >= (k,)
            }
            if sum(sizes[v] for v in live) > room:
                return False
        return True

    def backward_live(j: int, running: bool) -> int:
        live = {v for v in graph.outputs if graph.is_forward_value[v]}
        for b in range(graph.n_forward, j + running):
            for v in graph.ops[b].outputs:
                if v in graph.held or b == j or graph.backward_readers[v][-1:] >= (j,):
                    live.add(v)
        return sum(sizes[v] for v in live) + graph.given_bytes(Kind.TANGENT)

    def stage_fits(j: int, there: frozenset[int], runs: tuple[int, ...], after: frozenset[int]) -> bool:
        steps = [*runs, j]
        for k, op in enumerate(steps):
            live = 0
            for v in free:
                made = v in there or any(v in graph.ops[f].outputs for f in steps[: k + 1] if f != j)
                wanted = v in after or any(v in graph.ops[f].inputs for f in steps[k:]) or v in graph.ops[op].outputs
                live += sizes[v] * (made and wanted)
            if live + backward_live(j, op == j) > room:
                return False
        return True

    reached = {s: 0.0 for s in subsets(free) if forward_fits(s)}
    for j in range(graph.n_forward, len(graph.ops)):
        following: dict[frozenset[int], float] = {}
        for there, cost in reached.items():
            for runs in map(tuple, map(sorted, subsets([f for f in forward if made_again(graph.ops[f].outputs, there)]))):
                have = there.union(*(graph.ops[f].outputs for f in runs)) | graph.held
                so_far = [there.union(*(graph.ops[f].outputs for f in runs[:k])) | graph.held for k in range(len(runs))]
                reads = [*zip(runs, so_far, strict=True), (j, have)]
                if any(v not in s for op, s in reads for v in graph.ops[op].inputs if graph.is_forward_value[v]):
                    continue
                total = cost + sum(problem.costs.replay_seconds[f] for f in runs)
                for after in subsets([v for v in have if v in free]):
                    if total < following.get(after, math.inf) and stage_fits(j, there, runs, after):
                        following[after] = total
        reached = following
    return min(reached.values(), default=None)


def made_again(outputs: tuple[int, ...], there: frozenset[int]) -> bool:
    return there.isdisjoint(outputs)


def subsets(items: list[int]) -> list[frozenset[int]]:
    return [frozenset(c) for n in range(len(items) + 1) for c in combinations(items, n)]


def test_checkmate_is_for_small_graphs() -> None:
    found = plan(problem_of(chain(200)), "checkmate")
    assert found.status is Status.UNKNOWN and "400 ops" in found.note
