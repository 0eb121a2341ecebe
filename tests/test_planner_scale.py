"""Large steps: the made-up layers are a training step, and the rows that are needed say what all rows say."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actsolve.plan import Status
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PlannerOptions, plan
from actsolve.planners import one_pass as passes
from actsolve.planners.as_needed import Moments, solve_as_needed
from actsolve.planners.keep_all import keep_all
from actsolve.planners.lp import Limits, solve
from actsolve.planners.milp import milp
from actsolve.planners.model import COARSE, build
from actsolve.planners.windows import windows
from actsolve.problem import Problem
from actsolve.simulate import simulate

SCRIPTS = Path(__file__).parents[1] / "examples" / "benchmarks"
FOREVER_S = 1e18
GAP = 0.01


@pytest.fixture
def layered(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("layered").layered_problem


def within(problem: Problem, share: float) -> Problem:
    peak = simulate(problem, schedule_of(problem.graph, keep_all(problem))).peak_bytes
    return replace(problem, budget_bytes=problem.static_bytes + int(share * (peak - problem.static_bytes)))


@pytest.mark.parametrize("alike", [True, False])
def test_layers_are_a_training_step(layered: Any, alike: bool) -> None:
    problem = layered(30, alike=alike)
    graph = problem.graph
    assert 10 * 30 < graph.n_forward < 15 * 30 and len(graph.ops) > 2.4 * graph.n_forward
    assert layered(30, alike=alike).graph.fingerprint == graph.fingerprint
    signatures = {(op.target, graph.values[op.outputs[0]].size_bytes) for op in graph.ops}
    assert (len(signatures) < 30) is alike
    assert len(graph.gradients) == sum(op.target == "layered.linear" for op in graph.ops)


@pytest.mark.parametrize(("alike", "share"), [(True, 0.5), (False, 0.5), (False, 0.25)])
def test_needed_rows_prove_what_all_rows_prove(layered: Any, alike: bool, share: float) -> None:
    problem = within(layered(25, alike=alike), share)
    found = windows(problem, 12)
    columns, _, time_scale = build(problem, found, problem.dynamic_budget_bytes)
    relaxed = replace(columns.lp, integer=[False] * columns.lp.n_columns)
    least_s = solve(relaxed, "highs", Limits(relative_gap=0.0)).objective
    assert least_s is not None
    needed = solve_as_needed(problem, PlannerOptions(gap=GAP), found, COARSE, FOREVER_S)
    assert needed.bound_s is not None and needed.best is not None and needed.best.fits
    assert 0.999 * least_s / time_scale <= needed.bound_s <= least_s / time_scale + 1e-9
    assert needed.best.extra_s <= needed.bound_s * 1.1


def test_moments_without_rows_are_those_of_the_rows(layered: Any) -> None:
    """Where every row is added, a solution of the model with all rows breaks none."""
    problem = within(layered(6, alike=False), 0.5)
    found = windows(problem, 12)
    columns, rows, _ = build(problem, found, problem.dynamic_budget_bytes)
    solution = solve(columns.lp, "highs", Limits())
    assert solution.x is not None
    bare, moments, _ = build(problem, found, problem.dynamic_budget_bytes, COARSE, Moments)
    assert isinstance(moments, Moments) and bare.lp.n_rows < columns.lp.n_rows
    assert moments.fixed_peak_bytes == rows.fixed_peak_bytes
    where = {**dict(zip(bare.k.values(), columns.k.values(), strict=True))}
    for f, steps in bare.q.items():
        where |= dict(zip(steps, columns.q[f], strict=True))
    where |= {new: old for (new, _), (old, _) in zip(moments.envelopes, rows.envelopes, strict=True)}
    memory = np.cumsum([sum(v * solution.x[where[c]] for c, v in terms.items()) for terms, _ in moments.changes])
    assert (memory <= np.array([upper for _, upper in moments.changes]) + 1e-3).all()


def test_what_is_held_is_refused_at_once(layered: Any) -> None:
    """However wide the windows: the gradients alone are over the budget."""
    problem = layered(60)
    gradients = sum(problem.graph.values[v].size_bytes for v in problem.graph.gradients)
    found = milp(replace(problem, budget_bytes=gradients), PlannerOptions(time_limit_s=FOREVER_S))
    assert found.status is Status.INFEASIBLE


@pytest.mark.slow
def test_large_models_are_planned_as_small_ones_are(layered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = within(layered(10, alike=False), 0.5)
    plans = []
    for large in (0, 1 << 30):
        monkeypatch.setattr(passes, "_LARGE", large)
        plans.append(milp(problem, PlannerOptions(gap=GAP)))
    extra_s = [simulate(problem, schedule_of(problem.graph, p)).extra_s for p in plans]
    assert all(p.status is Status.OPTIMAL for p in plans)
    assert abs(extra_s[0] - extra_s[1]) <= GAP * max(extra_s)


@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False])
def test_twenty_thousand_ops(layered: Any, alike: bool) -> None:
    problem = within(layered(513 if alike else 635, alike=alike), 0.5)
    found = plan(problem, "milp", PlannerOptions(gap=0.02, time_limit_s=180.0))
    extra_s = simulate(problem, schedule_of(problem.graph, found)).extra_s
    assert found.bound_s is not None and extra_s - found.bound_s <= 0.02 * extra_s
    assert found.solve_s < 180.0
