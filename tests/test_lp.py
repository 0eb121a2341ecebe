"""The linear model: both back ends against brute force, limits, starts and interruption."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from actsolve.errors import SolverError
from actsolve.planners.lp import INFINITY, Limits, LinearModel, Outcome, available_solvers, solve

EXACT = Limits(relative_gap=0.0, time_limit_s=20, threads=1)


def random_model(seed: int, n: int = 7, rows: int = 4) -> LinearModel:
    """Binary columns and one continuous one, rows of every kind."""
    rng = random.Random(seed)
    model = LinearModel()
    for _ in range(n):
        model.column(cost=rng.randint(1, 9), integer=True)
    slack = model.column(cost=20.0, upper=INFINITY)
    for _ in range(rows):
        columns = rng.sample(range(n), 3)
        weights = [float(rng.randint(1, 5)) for _ in columns]
        lower = float(rng.randint(1, 6))
        model.row(lower, rng.choice((INFINITY, lower + 4)), [*columns, slack], [*weights, 1.0])
    model.row(-INFINITY, float(n - 2), list(range(n)), [1.0] * n)
    return model


def brute_force(model: LinearModel) -> float:
    """The optimum of `random_model`: the slack takes what the rows leave, if they let it."""
    best = INFINITY
    n = model.n_columns - 1
    for bits in itertools.product((0.0, 1.0), repeat=n):
        low, high = 0.0, INFINITY
        for row in range(model.n_rows):
            span = slice(model.row_start[row], model.row_start[row + 1])
            terms = dict(zip(model.index[span], model.coefficient[span], strict=True))
            fixed = sum(bits[c] * w for c, w in terms.items() if c < n)
            if n in terms:
                low, high = max(low, model.row_lower[row] - fixed), min(high, model.row_upper[row] - fixed)
            elif not model.row_lower[row] <= fixed <= model.row_upper[row]:
                high = -1.0
        if low <= high:
            best = min(best, float(np.dot(bits, model.cost[:n])) + 20.0 * low)
    return best


def hard_model() -> LinearModel:
    """A market split: no solver closes it in a minute."""
    rng = random.Random(1)
    model = LinearModel()
    columns = [model.column(integer=True) for _ in range(50)]
    for _ in range(6):
        weights = [float(rng.randint(0, 99)) for _ in columns]
        over, under = (model.column(cost=1.0, upper=INFINITY) for _ in range(2))
        half = float(int(sum(weights)) // 2)
        model.row(half, half, [*columns, over, under], [*weights, 1.0, -1.0])
    return model


@pytest.mark.parametrize("seed", range(25))
def test_highs_and_cbc_agree_with_brute_force(seed: int) -> None:
    model = random_model(seed)
    expected = brute_force(model)
    for solver in ("highs", "cbc"):
        found = solve(model, solver, EXACT)
        if expected == INFINITY:
            assert found.outcome is Outcome.INFEASIBLE and found.x is None
        else:
            assert found.outcome is Outcome.OPTIMAL
            assert found.objective == pytest.approx(expected)
            assert found.x is not None and float(np.dot(found.x, model.cost)) == pytest.approx(expected)


def test_only_highs_has_a_bound() -> None:
    model = random_model(3)
    assert solve(model, "highs", EXACT).bound == pytest.approx(brute_force(model))
    assert solve(model, "PULP_CBC_CMD", EXACT).bound is None


def test_a_start_is_never_lost() -> None:
    model = hard_model()
    start = np.zeros(model.n_columns)
    for row in range(model.n_rows):
        start[50 + 2 * row] = model.row_lower[row]
    found = solve(model, "highs", Limits(relative_gap=0.0, time_limit_s=0.2), start)
    assert found.outcome is Outcome.FEASIBLE
    assert found.objective is not None and found.objective <= float(np.dot(start, model.cost))
    assert found.bound is not None and found.bound <= found.objective


def test_ctrl_c_returns_the_incumbent() -> None:
    model = hard_model()
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    begin = time.perf_counter()
    timer.start()
    found = solve(model, "highs", Limits(relative_gap=0.0, time_limit_s=60))
    assert found.interrupted
    assert found.outcome is Outcome.FEASIBLE and found.x is not None
    assert time.perf_counter() - begin < 20


def test_progress_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[float, float | None, float | None]] = []
    solve(hard_model(), "highs", Limits(relative_gap=0.0, time_limit_s=1.0), progress=lambda *news: told.append(news))
    assert told
    assert any(incumbent is not None for _, incumbent, _ in told)
    assert capfd.readouterr().out == ""


def test_the_caller_can_end_it() -> None:
    told: list[tuple[float | None, float | None]] = []

    def ends(incumbent: float | None, bound: float | None) -> bool:
        told.append((incumbent, bound))
        return incumbent is not None

    begin = time.perf_counter()
    found = solve(hard_model(), "highs", Limits(relative_gap=0.0, time_limit_s=60, ends=ends))
    assert found.outcome is Outcome.FEASIBLE and not found.interrupted
    assert found.objective is not None and found.bound is not None and found.bound < found.objective
    assert any(incumbent is not None for incumbent, _ in told)
    assert time.perf_counter() - begin < 20


def test_infeasible() -> None:
    model = LinearModel()
    column = model.column(integer=True)
    model.row(2.0, INFINITY, [column], [1.0])
    assert solve(model, "highs", EXACT).outcome is Outcome.INFEASIBLE
    assert solve(model, "cbc", EXACT).outcome is Outcome.INFEASIBLE


@pytest.mark.parametrize("name", ["nonesuch", "GUROBI_CMD"])
def test_a_missing_solver_lists_those_that_are_there(name: str) -> None:
    if name in available_solvers():
        pytest.skip(f"{name} is installed")
    with pytest.raises(SolverError) as error:
        solve(random_model(0), name, EXACT)
    assert name.lower() in str(error.value).lower()
    assert "highs" in str(error.value) and "PULP_CBC_CMD" in str(error.value)
