"""Plans of general graphs, against brute force over every schedule of tiny ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dag_samples import least_time, random_dag

from actsolve.check_dag import replayed_peak_bytes
from actsolve.dag import Dag
from actsolve.planners.dag_search import DagPlan, DagSearch, plan_dag
from actsolve.planners.options import PlannerOptions
from actsolve.planners.segments import Moment
from actsolve.planners.smallest_dag import smallest_dag_budget

BRIEF = PlannerOptions(gap=0.001, time_limit_s=3.0)


def budgets(dag: Dag) -> list[int]:
    """From a byte too few for a single node to a byte too few for the plain order."""
    low, high = max(map(dag.needs, range(dag.n_nodes))), replayed_peak_bytes(dag, range(dag.n_nodes))
    return sorted(b for b in {low - 1, low, (low + high) // 2, high - 1} if b < high)


def agrees(dag: Dag, found: DagPlan) -> bool:
    """Whether the plan is as good as any; a plan or a bound that cannot be is a failure."""
    best, base = least_time(dag, dag.budget_bytes), sum(dag.time)
    if found.infeasible:
        assert best is None and found.sequence is None
        return True
    assert best is None or found.bound <= best - base + 1e-6
    if found.sequence is None:
        return False
    schedule = found.sequence.nodes.tolist()
    assert replayed_peak_bytes(dag, schedule) == found.sequence.peak_bytes <= dag.budget_bytes
    assert best is not None and sum(dag.time[i] for i in schedule) >= best - 1e-6
    return found.sequence.extra_time <= best - base + 1e-6


def test_plans_against_brute_force() -> None:
    cases = [replace(dag, budget_bytes=b) for seed in range(50) for dag in [random_dag(seed, 5 + seed % 3)] for b in budgets(dag)]
    agreed = sum(agrees(dag, plan_dag(dag, BRIEF)) for dag in cases)
    assert len(cases) > 100 and agreed == len(cases), (agreed, len(cases))


@pytest.mark.parametrize(("seed", "budget"), [(72, 52), (113, 45), (131, 58)])
def test_the_bound_counts_replays_ahead_of_time(seed: int, budget: int) -> None:
    """The best schedule runs a node again before it is needed, while what that reads is still there for another."""
    dag = replace(random_dag(seed, 9), budget_bytes=budget)
    assert agrees(dag, plan_dag(dag, BRIEF))


def test_the_smallest_budget_works_and_a_little_less_does_not() -> None:
    for seed in range(12):
        dag = random_dag(seed, 7)
        smallest = smallest_dag_budget(dag, BRIEF, plan_dag)
        assert replayed_peak_bytes(dag, smallest.nodes.tolist()) == smallest.peak_bytes
        assert least_time(dag, smallest.peak_bytes - 1) is None


def test_ctrl_c_between_solves_takes_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = random_dag(4, 7)
    peak = replayed_peak_bytes(dag, range(7))
    seed = smallest_dag_budget(dag, BRIEF, plan_dag)
    assert seed.peak_bytes < peak

    def pressed(self: DagSearch) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DagSearch, "run", pressed)
    tight = replace(dag, budget_bytes=seed.peak_bytes)
    with_seed, without = plan_dag(tight, BRIEF, seed), plan_dag(tight, BRIEF)
    assert with_seed.interrupted and with_seed.sequence is not None and with_seed.sequence.fits
    assert without.interrupted and without.sequence is None and not without.infeasible


def test_the_search_around_begins_from_any_schedule_however_its_replays_lie() -> None:
    """Also where a node runs again between two moments, before the second of which it ran first."""
    for seed in range(20):
        dag = random_dag(seed, 12)
        search = DagSearch(replace(dag, budget_bytes=sum(dag.sizes)), PlannerOptions(time_limit_s=2.0))
        runs = [again for node in range(12) for again in (*dag.reads[node], node)]  # all that a node reads, made again for it
        search.take(search.runner.run(np.array(runs)))
        assert search.best is not None and search.best.fits
        search.best = search.runner.run(np.array(runs))  # as it is, with all replays
        search.moments = {Moment(11)}
        search.around(1.0)
        assert search.best.extra_time == 0.0
