"""What can be made within a budget, and schedules found backwards, against brute force over every schedule of tiny graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from dag_samples import least_time, random_dag

from actsolve.check_dag import replayed_peak_bytes
from actsolve.dag import Dag, general_dag
from actsolve.planners.backwards import FORCED, Backwards
from actsolve.planners.dag_search import plan_dag
from actsolve.planners.from_nothing import FromNothing, cannot_be_made, is_general
from actsolve.planners.options import PlannerOptions
from actsolve.planners.sequence import Runner
from actsolve.planners.shaken import Shaken


def within(dag: Dag) -> list[Dag]:
    """The graph with every budget from what a single node needs to what the plain order does, in six steps."""
    low, high = max(map(dag.needs, range(dag.n_nodes))), replayed_peak_bytes(dag, range(dag.n_nodes))
    return [replace(dag, budget_bytes=low + (high - low) * i // 6) for i in range(7)]


def test_what_cannot_be_made_is_what_no_schedule_makes() -> None:
    impossible = 0
    for seed in range(25):
        for dag in within(random_dag(seed, 11)):
            found = cannot_be_made(FromNothing(dag), math.inf)
            assert (found is not None) == (least_time(dag, dag.budget_bytes) is None), (seed, dag.budget_bytes)
            impossible += found is not None
    assert impossible >= 2


def test_what_is_made_from_nothing_fits() -> None:
    for seed in range(60):
        for dag in within(random_dag(seed, 12)):
            last = dag.n_nodes - 1
            made = FromNothing(dag).made(1 << last, 1000, math.inf)
            assert (bool(made.left)) == made.proven
            if not made.left:
                assert made.runs[-1] == last and peak_bytes(dag, list(made.runs)) <= dag.budget_bytes


def peak_bytes(dag: Dag, runs: list[int]) -> int:
    """The most that is live while ``runs`` go, from nothing: a value from its making until nothing reads that copy any more."""
    peak = 0
    live: set[int] = set()
    for place, node in enumerate(runs):
        assert live.issuperset(dag.reads[node])
        live.add(node)
        peak = max(peak, sum(dag.sizes[u] for u in live))
        live = {u for u in live if u == runs[-1] or read_again(dag, u, runs[place + 1 :])}
    return peak


def read_again(dag: Dag, value: int, runs: list[int]) -> bool:
    for node in runs:
        if value in dag.reads[node]:
            return True
        if node == value:
            return False
    return False


def test_sweeps_are_as_good_as_any_schedule() -> None:
    found = best = 0.0
    for seed in range(15):
        for dag in within(random_dag(seed, 9)):
            least = least_time(dag, dag.budget_bytes)
            if least is None:
                continue
            back = Backwards(FromNothing(dag))
            while not back.exhausted:
                back.improve(math.inf)
            assert replayed_peak_bytes(dag, back.best) <= dag.budget_bytes
            assert sum(dag.time[u] for u in back.best) >= least
            found, best = found + sum(dag.time[u] for u in back.best), best + least
    assert found <= 1.01 * best, (found, best)


def test_a_schedule_is_forced_wherever_there_is_one() -> None:
    for seed in range(15):
        for dag in within(random_dag(seed, 9)):
            back = Backwards(FromNothing(dag))
            any(back.sweep(sweep, math.inf) for sweep in FORCED)
            assert bool(back.best) == (least_time(dag, dag.budget_bytes) is not None), (seed, dag.budget_bytes)
            assert not back.best or replayed_peak_bytes(dag, back.best) <= dag.budget_bytes


def test_a_schedule_is_forced_where_a_run_reads_nearly_all_that_fits() -> None:
    dag = random_dag(5, 40)
    dag = general_dag((*dag.sizes, 1), (*dag.reads, tuple(range(20, 40, 2))), (*dag.time, 1.0), 0)
    dag = replace(dag, budget_bytes=max(map(dag.needs, range(41))) + 4)
    back = Backwards(FromNothing(dag))
    while not back.exhausted:
        back.improve(math.inf)
    assert not back.best
    assert any(back.sweep(sweep, math.inf) for sweep in FORCED)
    assert replayed_peak_bytes(dag, back.best) <= dag.budget_bytes


def test_a_budget_that_is_impossible_is_proven_to_be_within_a_moment() -> None:
    """The second of two nodes that join is made beside the first; both pass through something large."""
    sizes, reads = (1, 10, 1, 10, 1, 1), ((), (0,), (1,), (0,), (3,), (2, 4))
    dag = general_dag(sizes, reads, (1.0,) * 6, 11)
    for budget, fits in ((11, False), (12, True)):
        plan = plan_dag(replace(dag, budget_bytes=budget), PlannerOptions(time_limit_s=5.0))
        assert (plan.sequence is not None, bool(plan.infeasible)) == (fits, not fits)


def test_only_general_graphs_are_searched_so() -> None:
    dag = random_dag(0, 5)
    assert is_general(dag) and not is_general(replace(dag, replay_from=3)) and not is_general(replace(dag, held=frozenset({1})))


def test_shaking_makes_what_replays_too_much_as_good_as_any() -> None:
    found = best = 0.0
    for seed in range(3):
        for dag in within(random_dag(seed, 9)):
            made = FromNothing(dag)
            again = [made.made(1 << node, 1000, math.inf) for node in range(dag.n_nodes)]  # each from nothing
            if any(one.left for one in again):
                continue
            runs = np.array([u for one in again for u in one.runs], dtype=np.int64)
            wasteful = Runner(dag).run(runs)
            better = Shaken().improve(wasteful, lambda _: False, math.inf)
            least = least_time(dag, dag.budget_bytes)
            assert wasteful.fits and better.fits and least is not None
            assert replayed_peak_bytes(dag, better.nodes.tolist()) <= dag.budget_bytes
            found, best = found + sum(dag.time) + better.extra_time, best + least
    assert best <= found <= 1.05 * best, (found, best)


def test_a_deep_graph_needs_no_recursion() -> None:
    """Two chains that are joined: the first end has to wait while the second is made, and that does not fit."""
    sizes: list[int] = []
    reads: list[tuple[int, ...]] = []
    ends = []
    for _ in range(2):
        for size in (5, 5, *(3,) * 2000, 6):
            reads.append((len(sizes) - 1,) if sizes and len(sizes) - 1 not in ends else ())
            sizes.append(size)
        ends.append(len(sizes) - 1)
    dag = general_dag((*sizes, 1), (*reads, tuple(ends)), (1.0,) * (len(sizes) + 1), 13)
    assert max(map(dag.needs, range(dag.n_nodes))) <= 13
    assert cannot_be_made(FromNothing(dag), math.inf) == dag.n_nodes - 1
