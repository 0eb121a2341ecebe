"""A plan file with every field in use, and what every refusal of a file has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hand_made import HAND_MADE
from hypothesis import HealthCheck, settings
from offload_plans import hand_made_plan, with_links
from strategies import random_problem

from actsolve import json_file
from actsolve.errors import ActsolveError, FileFormatError
from actsolve.plan import Plan
from actsolve.plan_file import PlanFile, Predicted, plan_file
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, build_schedule
from actsolve.simulate import simulate

# The folder is shared by all examples: each writes its files anew.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def keep_all(problem: Problem) -> tuple[Plan, Schedule]:
    kept = frozenset(problem.graph.decidable)
    return Plan("keep_all", kept, bound_s=0.0, solve_s=0.25), build_schedule(problem.graph, kept)


def a_plan(seed: int = 5) -> tuple[Problem, PlanFile]:
    """A plan file with every field in use."""
    problem = replace(with_links(random_problem(seed)), host_budget_bytes=2**30)
    plan, schedule = keep_all(problem)
    figures: dict[str, Any] = {
        "static_bytes": {"parameters": 12, "reserve": 0},
        "objective_s": 0.125,
        "gap": 0.0,
        "step_gap": 1e-9,
        "global_bound_s": None,
        "predicted": {"peak_bytes": 80, "step_s": 1.5, "recompute_s": 0.0, "stall_s": 0.0},
        "keep_all": {"peak_bytes": 99, "step_s": 1.375},
        "baselines": {"sqrt_l": {"peak_bytes": 70, "step_s": 2.0, "fits": True}, "per_layer": {"note": "no layers"}},
    }
    return problem, plan_file(problem, plan, schedule, target="gpt_mini", **figures)


def an_offload_plan() -> PlanFile:
    """A plan file that offloads, for `HAND_MADE`."""
    n = len(HAND_MADE.ops)
    problem = replace(with_links(Problem(HAND_MADE, Costs((1e-3,) * n, (1e-3,) * n, (0,) * n), 40_000)), host_budget_bytes=8192)
    plan = hand_made_plan()
    schedule = build_schedule(HAND_MADE, plan.kept, plan.early, plan.offloaded)
    predicted = Predicted.model_validate(simulate(problem, schedule))
    return plan_file(problem, plan, schedule, target="hand-made", predicted=predicted)


def message_of(action: Callable[[], object], path: Path | str, error: type[ActsolveError] = FileFormatError) -> str:
    """The message of an action that must fail as a bad file does."""
    with pytest.raises(error) as raised:
        action()
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert raised.value.where is not None and raised.value.where in json_file.shown(path)
    assert raised.value.why
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 1500
    return message
