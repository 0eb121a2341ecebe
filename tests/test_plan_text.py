"""The reports as a person reads them, reviewed in tests/golden/reports.txt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden_text import assert_golden
from hand_made import HAND_MADE, OPS, S

from actsolve.plan import Plan, Status
from actsolve.planned import Attempt, BaselineResult, Planned
from actsolve.planners import BASELINES, plan
from actsolve.problem import Costs, Problem
from actsolve.report.compare_text import compare_json, compare_text
from actsolve.report.plan_text import plan_text
from actsolve.report.run_text import run_text
from actsolve.schedule import build_schedule
from actsolve.simulate import Timeline, simulate
from actsolve.static_memory import StaticMemory

SECONDS = tuple(0.001 * (1 + i % 3) for i in range(len(OPS)))
COSTS = Costs(SECONDS, SECONDS, tuple(16 * i for i in range(len(OPS))), source="measured on a pocket calculator")
STATIC = StaticMemory(parameters=1024, buffers=128, inputs=4096, optimizer_state=2048, reserve=512)
PROBLEM = Problem(HAND_MADE, COSTS, budget_bytes=25_000, static_bytes=STATIC.total_bytes, optimizer_bytes=256)
EVERYTHING = frozenset(HAND_MADE.decidable) - {S}
MEASURED: dict[str, Any] = {
    "peak_bytes": 22_500,
    "step_s": 0.0301,
    "eager_peak_bytes": 27_000,
    "eager_step_s": 0.0245,
    "step_ratio": [1.2, 1.1, 1.3],
    "pairs": 40,
    "gradients": "bitwise",
}


def timeline(problem: Problem, kept: frozenset[int]) -> Timeline:
    return simulate(problem, build_schedule(problem.graph, kept))


def planned(plan_: Plan, problem: Problem = PROBLEM, **fields: Any) -> Planned:
    baselines = {name: BaselineResult(timeline(problem, plan(problem, name).kept)) for name in BASELINES}
    keep_all = timeline(problem, EVERYTHING)
    attempt = Attempt(target="hand-made", problem=problem, plan=plan_, keep_all=keep_all, baselines=baselines, static=STATIC)
    return replace(attempt.with_timeline(timeline(problem, plan_.kept)), **fields)


def dropped(*names: str, **fields: Any) -> Plan:
    """The plan that recomputes these values."""
    gone = {i for i, v in enumerate(HAND_MADE.values) if v.name in names}
    return Plan("milp", frozenset(HAND_MADE.decidable) - gone, **fields)


def reports() -> dict[str, str]:
    proven = dropped("a", "d", status=Status.OPTIMAL, bound_s=0.00499, solve_s=1.25)
    rough = replace(COSTS, workspace_bytes=(0,) * len(OPS), source="roofline of abacus", unknown=tuple("abcdefg"))
    roomy = replace(PROBLEM, budget_bytes=10**6)
    others = {name: planned(plan(PROBLEM, name)) for name in BASELINES}
    nothing: dict[str, Attempt] = {
        "milp": Attempt(
            target="hand-made",
            problem=replace(PROBLEM, budget_bytes=9000),
            plan=Plan("milp", status=Status.INFEASIBLE),
            keep_all=timeline(PROBLEM, EVERYTHING),
            baselines={},
            static=STATIC,
            smallest_bytes=20_000,
        )
    }
    return {
        "a plan that was run": plan_text(planned(proven), MEASURED),
        "a plan that fits as it is": plan_text(planned(Plan("milp", EVERYTHING, status=Status.OPTIMAL, bound_s=0.0), roomy)),
        "all that there is to note": plan_text(
            planned(
                replace(proven, bound_s=None, status=Status.FEASIBLE, note="stopped early"),
                replace(PROBLEM, costs=rough),
                loss_inside=False,
                notes=("The plan was loaded.",),
            ),
            {**MEASURED, "peak_bytes": 25_001, "gradients": 1.5e-4},
        ),
        "every planner": compare_text({"milp": planned(proven), **others}),
        "every planner, run": compare_text(
            {"milp": planned(proven), **others}, {"milp": MEASURED, "sqrt_l": {**MEASURED, "gradients": 0.25}}
        ),
        "no planner": compare_text(nothing),
        "training": run_text(
            {
                **{"losses": [1.5, None, 0.25], "peak_bytes": 999, "budget_bytes": 1000, "predicted_peak_bytes": 998},
                **{"step_s": 0.5, "predicted_step_s": 0.4},
            }
        ),
        "training over the budget": run_text(
            {
                **{"losses": [1.5], "peak_bytes": 1001, "budget_bytes": 1000, "predicted_peak_bytes": 998},
                **{"step_s": None, "predicted_step_s": 0.4},
            }
        ),
    }


def test_the_text_of_every_report() -> None:
    assert_golden("reports.txt", "\n".join(f"# {name}\n{text}" for name, text in reports().items()))


def test_lines_are_plain_and_not_padded() -> None:
    for name, text in reports().items():
        assert text.endswith("\n") and not text.endswith("\n\n"), name
        for line in text.splitlines():
            assert line == line.rstrip() and (line == "" or line.isprintable()), name
            assert line.isascii() and len(line) < 140, name


def test_names_from_others_are_escaped() -> None:
    evil = replace(planned(dropped("a")), target="mo\x1b[31mdel\n  status  optimal", notes=("no\x07te",))
    text = plan_text(evil)
    assert "\x1b" not in text and "\x07" not in text
    assert text.startswith(r"mo\x1b[31mdel\n  status  optimal within")


def test_a_share_that_cannot_be_taken_is_a_dash() -> None:
    free = replace(PROBLEM, costs=replace(COSTS, seconds=(0.0,) * len(OPS), replay_seconds=(0.0,) * len(OPS)))
    text = plan_text(planned(dropped("a"), free))
    assert "nan" not in text and "inf" not in text


def test_compare_as_data() -> None:
    ours = planned(dropped("a", "d", bound_s=0.00499))
    found = compare_json({"milp": ours, "sqrt_l": planned(plan(PROBLEM, "sqrt_l"))}, {"milp": MEASURED})
    assert found["planners"]["milp"]["measured"] == MEASURED
    assert found["planners"]["milp"]["below"].keys() == {"sqrt_l", "per_layer"}
    assert found["planners"]["milp"]["below"]["per_layer"] is None
    assert found["planners"]["milp"]["overhead"] == pytest.approx(ours.objective_s / ours.keep_all.step_s)
