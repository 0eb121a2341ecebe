"""A solver that no longer looks at its clock is not waited for, and what it has told is taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actsolve.planners import lp
from actsolve.planners.highs_run import SilentHighs, run_highs
from actsolve.planners.lp import Limits, LinearModel, Outcome, solve


class Event:
    """Stands for one of HiGHS's callbacks."""

    def __init__(self) -> None:
        self.told: list[Callable[[Any], None]] = []

    def __iadd__(self, told: Callable[[Any], None]) -> Event:
        self.told.append(told)
        return self

    def tell(self, **data: Any) -> None:
        for told in self.told:
            told(SimpleNamespace(data_out=SimpleNamespace(**data)))


class Deaf:
    """A solver that finds a solution, and then neither ends nor listens."""

    def __init__(self) -> None:
        self.cbMipInterrupt, self.cbMipImprovingSolution, self.cancelled = Event(), Event(), 0
        self.passModel = self.setOptionValue = self.setSolution = lambda *_: None

    def startSolve(self) -> None:
        self.cbMipImprovingSolution.tell(mip_solution=[1.0, 0.0], objective_function_value=3.0)
        self.cbMipInterrupt.tell(running_time=0.1, mip_primal_bound=3.0, mip_dual_bound=2.0)

    def wait(self, seconds: float) -> tuple[bool, None]:
        time.sleep(seconds)
        return False, None

    def cancelSolve(self) -> None:
        self.cancelled += 1


def test_it_is_asked_to_stop_and_then_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    deaf, begin = Deaf(), time.perf_counter()
    with caplog.at_level(logging.WARNING):
        run = run_highs(deaf, give_up_s=0.2)
    assert 0.3 <= time.perf_counter() - begin < 5 and deaf.cancelled
    assert run.left_behind and not run.interrupted and "left behind" in caplog.text
    assert run.x is not None and run.x.tolist() == [1.0, 0.0] and (run.objective, run.bound) == (3.0, 2.0)


def test_what_it_has_told_is_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lp, "SilentHighs", Deaf)
    monkeypatch.setattr(lp, "_OVERRUN_S", 0.1)
    model = LinearModel()
    for _ in range(2):
        model.column(1.0, integer=True)
    found = solve(model, "highs", Limits(time_limit_s=0.1))
    assert found.outcome is Outcome.FEASIBLE and found.x is not None and found.x.tolist() == [1.0, 0.0]
    assert (found.objective, found.bound) == (3.0, 2.0)


def test_the_solutions_of_a_real_solver_are_kept() -> None:
    highs: Any = SilentHighs()  # type: ignore[no-untyped-call]
    draw, model = np.random.default_rng(0), LinearModel()
    for cost in draw.integers(10, 99, 40):
        model.column(-float(cost), integer=True)
    for _ in range(8):
        model.row(-lp.INFINITY, 300.0, list(range(40)), draw.integers(1, 50, 40).astype(float).tolist())
    highs.passModel(lp.highs_model(model))
    run = run_highs(highs, give_up_s=60.0)
    assert not run.left_behind and run.x is not None and run.objective == pytest.approx(float(np.dot(run.x, model.cost)))
    assert run.objective == pytest.approx(highs.getInfo().objective_function_value)
