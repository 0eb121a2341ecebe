"""The reports as a person reads them, reviewed in tests/golden/reports.txt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden_text import assert_golden
from hand_made import HAND_MADE, OPS, A, S
from offload_plans import HAND_MADE_COPIES, hand_made_plan, with_links

from actsolve.links import Links
from actsolve.plan import Plan, Status
from actsolve.plan_schedule import schedule_of
from actsolve.planned import Attempt, BaselineResult, Planned
from actsolve.planners import BASELINES, QUICK, plan
from actsolve.problem import Costs, Problem
from actsolve.report.compare_text import compare_json, compare_text
from actsolve.report.plan_text import plan_text
from actsolve.report.run_text import run_text
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


def timeline(problem: Problem, plan_: Plan) -> Timeline:
    return simulate(problem, schedule_of(problem.graph, plan_))


def planned(plan_: Plan, problem: Problem = PROBLEM, **fields: Any) -> Planned:
    return replace(attempted(plan_, problem).with_timeline(timeline(problem, plan_)), **fields)


def attempted(plan_: Plan, problem: Problem = PROBLEM) -> Attempt:
    found = {name: plan(problem, name) for name in QUICK}
    baselines = {n: BaselineResult(timeline(problem, p) if p.found else None, p.note) for n, p in found.items()}
    keep_all = timeline(problem, Plan("keep_all", EVERYTHING))
    return Attempt(target="hand-made", problem=problem, plan=plan_, keep_all=keep_all, baselines=baselines, static=STATIC)


def dropped(*names: str, **fields: Any) -> Plan:
    """The plan that recomputes these values."""
    gone = {i for i, v in enumerate(HAND_MADE.values) if v.name in names}
    return Plan("milp", frozenset(HAND_MADE.decidable) - gone, **fields)


def reports() -> dict[str, str]:
    proven = dropped("a", "d", status=Status.OPTIMAL, bound_s=0.00499, solve_s=1.25)
    rough = replace(COSTS, workspace_bytes=(0,) * len(OPS), source="roofline of abacus", unknown=tuple("abcdefg"))
    roomy = replace(PROBLEM, budget_bytes=10**6)
    others = {name: planned(p) if (p := plan(PROBLEM, name)).found else attempted(p) for name in BASELINES}
    nothing: dict[str, Attempt] = {
        "milp": Attempt(
            target="hand-made",
            problem=replace(PROBLEM, budget_bytes=9000),
            plan=Plan("milp", status=Status.INFEASIBLE),
            keep_all=timeline(PROBLEM, Plan("keep_all", EVERYTHING)),
            baselines={},
            static=STATIC,
            smallest_bytes=20_000,
        )
    }
    linked = replace(with_links(PROBLEM), host_budget_bytes=8192)
    offloads = planned(hand_made_plan(), linked, links_source="given", notes=("Copies are emulated.",))
    uncapped = replace(linked, host_budget_bytes=None, links=Links(25e9, 24.8e9))
    all_three = replace(dropped("a", "d"), offloaded={A: HAND_MADE_COPIES[A]})
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
        "a plan that offloads": plan_text(offloads),
        "a plan that does all three, over one link, without a cap": plan_text(planned(all_three, uncapped)),
        "every planner, one of which offloads": compare_text(
            {"milp": offloads, "keep_all": planned(plan(linked, "keep_all"), linked)}
        ),
        "every planner": compare_text({"milp": planned(proven), **others}),
        "every planner, run": compare_text(
            {"milp": planned(proven), **others}, {"milp": MEASURED, "sqrt_l": {**MEASURED, "gradients": 0.25}}
        ),
        "no planner": compare_text(nothing),
        "training": run_text(
            {
                **{"losses": [1.5, None, 0.25], "peak_bytes": 999, "budget_bytes": 1000, "predicted_peak_bytes": 998},
                **{"step_s": 0.5, "predicted_step_s": 0.4, "d2h_bytes": 2**30, "h2d_bytes": 2**29, "host_peak_bytes": 2**30},
                "predicted_stall_s": 0.025,
                "notes": ["Copies are emulated."],
            }
        ),
        "training over the budget": run_text(
            {
                **{"losses": [1.5], "peak_bytes": 1001, "budget_bytes": 1000, "predicted_peak_bytes": 998},
                **{"step_s": None, "predicted_step_s": 0.4, "d2h_bytes": 0, "notes": []},
            }
        ),
    }


def test_the_text_of_every_report() -> None:
    assert_golden("reports.txt", "\n".join(f"# {name}\n{text}" for name, text in reports().items()))


def test_costs_that_are_off_are_said_so() -> None:
    """Where keeping everything takes half as long, or twice as long, as predicted; a profile is of another machine."""
    one = planned(dropped("a"))
    step_s = one.keep_all.step_s
    for ratio, said in ((0.4, True), (0.6, False), (1.0, False), (1.9, False), (2.1, True)):
        assert ("costs are off" in plan_text(one, {**MEASURED, "eager_step_s": ratio * step_s})) is said
    roofline = planned(dropped("a"), replace(PROBLEM, costs=replace(COSTS, source="roofline of a100")))
    assert "costs are off" not in plan_text(roofline, {**MEASURED, "eager_step_s": 9.0})


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


def test_an_offload_plan_as_data() -> None:
    linked = replace(with_links(PROBLEM), host_budget_bytes=8192)
    found = planned(hand_made_plan(), linked, links_source="given")
    data, t = found.as_json(), found.timeline
    assert data["predicted"] == {
        **{"peak_bytes": t.peak_bytes, "step_s": t.step_s, "recompute_s": 0.0, "stall_s": t.stall_s},
        **{"d2h_bytes": 6144, "h2d_bytes": 6144, "host_peak_bytes": 6144},
    }
    assert data["decisions"]["offload"] == {"count": 2, "bytes": 6144} and data["decisions"]["recompute"]["count"] == 0
    assert data["links"] == {"d2h": 1e6, "h2d": 2e6, "d2h_both": 0.75e6, "h2d_both": 0.5e6}
    assert (data["host_budget_bytes"], data["links_source"]) == (8192, "given")
    assert found.objective_s == pytest.approx(t.stall_s)
    compared = compare_json({"milp": found, "keep_all": planned(plan(linked, "keep_all"), linked)})
    assert compared["links"] == data["links"] and compared["host_budget_bytes"] == 8192
    assert compared["planners"]["milp"]["stall_s"] == t.stall_s and compared["planners"]["keep_all"]["d2h_bytes"] == 0


def test_compare_as_data() -> None:
    ours = planned(dropped("a", "d", bound_s=0.00499))
    found = compare_json({"milp": ours, "sqrt_l": planned(plan(PROBLEM, "sqrt_l"))}, {"milp": MEASURED})
    assert found["planners"]["milp"]["measured"] == MEASURED
    assert found["planners"]["milp"]["below"].keys() == {"sqrt_l", "per_layer"}
    assert found["planners"]["milp"]["below"]["per_layer"] is None
    assert found["planners"]["milp"]["overhead"] == pytest.approx(ours.objective_s / ours.keep_all.step_s)
