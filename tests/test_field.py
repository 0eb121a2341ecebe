"""Cases after public reports: each trains as in eager, to the bit, at three budgets, or is refused in clear words."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import field_kinds_of_checkpoints  # noqa: F401  # they register themselves
import field_kinds_of_functions  # noqa: F401
import field_kinds_of_inputs  # noqa: F401
import field_kinds_of_loops  # noqa: F401
import field_kinds_of_modules  # noqa: F401
import field_kinds_of_outputs  # noqa: F401
import field_kinds_of_randomness  # noqa: F401
import field_kinds_of_state  # noqa: F401
import field_kinds_of_wrappers  # noqa: F401
import pytest
import torch
from field import CASES, seen_of
from torch import nn

import actsolve
from actsolve.errors import ActsolveError
from actsolve.plan_file import PlanFile


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eager(model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
    return model


@dataclass
class Within:
    """Optimizes within a budget, of which the middle one is known once the smallest is.

    Attributes:
        budget: ``"min"``, or a share.
        middle: Halfway from the smallest budget to one where everything is kept, as a share.
    """

    budget: float | str
    middle: float = 1.0

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        module = actsolve.optimize(model, args, kwargs, mem_budget=self.budget, hardware="a100", optimizer="sgd")
        if self.budget == "min":
            self.middle = between(module.plan, 0.5)
        return module


def between(plan: PlanFile, share: float) -> float:
    """Return the budget as a share, so that it is one too for what is planned later: of other shapes, of other outputs."""
    static = sum(plan.static_bytes.values())
    assert plan.keep_all is not None
    low, high = plan.budget_bytes - static, plan.keep_all.peak_bytes - static
    return 1.0 if low >= high else (low + (high - low) * share) / high


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_case(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    if case.needs is not None and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    if case.open is not None:
        request.applymarker(pytest.mark.xfail(strict=True, reason=case.open))
    reference = seen_of(case, eager)
    assert not reference.differences(seen_of(case, eager)), "eager itself is not the same each time"
    least = Within("min")
    for optimize in (Within(1.0), least, lambda *call: Within(least.middle)(*call)):
        try:
            seen = seen_of(case, optimize)
        except ActsolveError as error:
            assert case.refused is not None and re.search(case.refused, str(error), re.DOTALL), str(error)
            return
        assert not reference.differences(seen)
