"""The memory/time curve: budgets, plans carried on, bounds carried back, and how it is shown."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from golden_text import assert_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_plans import with_links
from strategies import problems
from typer.testing import CliRunner

from actsolve.capture.captured import Captured
from actsolve.cli.main import app
from actsolve.cli.session import Session
from actsolve.errors import InfeasibleBudget, UsageError
from actsolve.frontier import Frontier, Point, baseline_point, consistent, no_slower, spaced
from actsolve.frontier_planning import frontier
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.plan import Plan, Status
from actsolve.planned import BaselineResult, Planned
from actsolve.planners import BASELINES
from actsolve.planning import Listener, Prepared
from actsolve.problem import Costs, Problem
from actsolve.report.frontier_png import frontier_png, write_frontier_png
from actsolve.report.frontier_text import frontier_text
from actsolve.settings import Settings
from actsolve.static_memory import Reserve, StaticMemory

F, B = Phase.FORWARD, Phase.BACKWARD
QUICK = Settings(hardware="a100", time_limit_s=60.0)  # of which seconds are taken: a busy machine proves as much
SMALL = ("gpt-mini", "--set", "layers=2", "--set", "batch=8", "--set", "seq=64", "--set", "width=32", "--set", "vocab=64")
PROFILE = ("--hardware", "a100", "--host-budget", "0")


def chain(n: int) -> Problem:
    """A chain of ``n`` layers, each of which reads its input again in the backward; a millisecond each."""
    values = [Value("x", 1000, Kind.INPUT), *(Value(f"a{i}", 1000 + 10 * i, producer=i) for i in range(n))]
    values += [Value("tangent", 4, Kind.TANGENT), *(Value(f"g{i}", 1000, producer=n + i) for i in range(n))]
    ops = [Op(f"f{i}", "aten.tanh.default", F, (i,), (i + 1,)) for i in range(n)]
    ops += [Op(f"b{i}", "aten.mul.Tensor", B, (n + 1 + i, n - i), (n + 2 + i,), replayable=False) for i in range(n)]
    graph = Graph(tuple(ops), tuple(values), outputs=(), gradients=(2 * n + 1,), name="chain").verify()
    return Problem(graph, Costs((1e-3,) * 2 * n, (1e-3,) * 2 * n, (0,) * 2 * n, source="a millisecond each"), 0, 1000)


CHAIN = chain(12)
NO_RESERVE = Reserve()


def prepared(problem: Problem, reserve: Reserve = NO_RESERVE) -> Prepared:
    """The problem as a step that is captured and costed."""
    static = StaticMemory(parameters=problem.static_bytes)
    captured = cast(Captured, SimpleNamespace(graph=problem.graph, value_of={}))  # what only PyTorch's own partitioner looks at
    return Prepared("a step", captured, problem, static, reserve, 0.0, 0.0, True)


def curve(problem: Problem = CHAIN, n_points: int = 5, reserve: Reserve = NO_RESERVE, **more: Any) -> Frontier:
    return frontier(prepared(problem, reserve), QUICK, n_points, **more)


def strict(content: dict[str, Any]) -> Any:
    return json.loads(json.dumps(content, allow_nan=False))


def test_budgets_are_ascending_and_both_ends_are_there() -> None:
    assert spaced(100, 200, 5) == (100, 125, 150, 175, 200)
    assert spaced(100, 102, 12) == (100, 101, 102)
    assert spaced(100, 100, 12) == spaced(100, 90, 12) == (100,)
    assert spaced(0, 2**62, 2) == (0, 2**62)


@settings(max_examples=15, deadline=None)
@given(problem=problems(), reserve=st.sampled_from([Reserve(), Reserve(size_bytes=3), Reserve(share=0.05)]), links=st.booleans())
def test_more_budget_never_costs_time(problem: Problem, reserve: Reserve, links: bool) -> None:
    found = curve(with_links(problem) if links else problem, 4, reserve).verify()
    budgets = [p.budget_bytes for p in found.points]
    assert budgets == sorted(set(budgets)) and len(budgets) <= 4
    assert found.complete and found.points[0].planned.timeline.peak_bytes <= budgets[0]
    last = found.last
    assert last.objective_s == 0 and last.plan.status is Status.OPTIMAL
    assert budgets[-1] == reserve.budget_for(last.keep_all.peak_bytes - last.static.reserve)
    for point in found.points:
        for baseline in found.baselines.values():
            assert baseline.peak_bytes > point.budget_bytes or point.step_s <= baseline.step_s + 1e-9
    strict(found.as_json())


def test_a_chain() -> None:
    found = curve()
    content = strict(found.as_json())
    assert content["smallest_budget_bytes"] == content["points"][0]["budget_bytes"] == content["points"][0]["peak_bytes"]
    assert content["points"][-1]["budget_bytes"] == content["keep_all"]["peak_bytes"]
    assert content["points"][-1]["share"] == 1 and content["points"][-1]["overhead"] == 0
    assert content["points"][0]["overhead"] > 0
    assert {p["status"] for p in content["points"]} == {"optimal"}
    assert {"keep_all", "sqrt_l", "per_layer"} <= set(content["baselines"]) <= set(BASELINES)
    assert content["baselines"]["keep_all"]["peak_bytes"] == content["keep_all"]["peak_bytes"]
    assert all(set(p["decisions"]) == {"keep", "recompute", "offload"} for p in content["points"])


def test_the_report() -> None:
    found = replace(curve(), solve_s=1.0)
    assert_golden("frontier.txt", frontier_text(found))


# -- what is carried -----------------------------------------------------------------------------------------------------


def with_global_bound(point: Point, bound_s: float | None, *, forward: bool = False) -> Point:
    plan = replace(point.planned.plan, global_bound_s=bound_s, bounds_forward=forward)
    return replace(point, planned=replace(point.planned, plan=plan))


def without_bounds(found: Frontier) -> list[Point]:
    return [with_global_bound(replace(p, own_bound_s=None), None) for p in found.points]


def test_a_bound_holds_for_smaller_budgets_too() -> None:
    points = without_bounds(curve())
    assert points[2].planned.objective_s > 0
    points[2] = replace(points[2], own_bound_s=points[2].planned.objective_s / 2)
    found = consistent(points, 0.01)
    assert [p.planned.bound_s for p in found] == [points[2].own_bound_s] * 3 + [None] * 2
    assert [p.proven_at_bytes for p in found] == [points[2].budget_bytes] * 3 + [None] * 2
    assert {p.planned.plan.status for p in found} == {Status.FEASIBLE}
    points[0] = replace(points[0], own_bound_s=points[0].planned.objective_s)
    first = consistent(points, 0.01)[0]
    assert first.proven_at_bytes == first.budget_bytes and first.planned.plan.status is Status.OPTIMAL


def test_a_bound_on_all_schedules_does_too_and_is_named() -> None:
    points = without_bounds(curve())
    whole_s = points[2].planned.objective_s / 2
    points[2] = with_global_bound(points[2], whole_s, forward=True)
    points[1] = with_global_bound(points[1], whole_s / 2)  # the less of the two
    points[0] = replace(points[0], own_bound_s=points[0].planned.objective_s)
    found = consistent(points, 0.01)
    assert [p.planned.global_bound_s for p in found] == [whole_s] * 3 + [None] * 2
    assert [p.bound_over for p in found] == ["plan-class", "global", "global", None, None]
    assert [p.planned.bound_s for p in found] == [points[0].own_bound_s, whole_s, whole_s, None, None]
    points[0] = replace(points[0], own_bound_s=2 * points[0].planned.objective_s)  # refuted: what is left is the other
    first = consistent(points, 0.01)[0]
    assert (first.planned.bound_s, first.bound_over, first.proven_at_bytes) == (whole_s, "global", points[2].budget_bytes)


def test_what_is_proven_of_replays_in_the_backward_says_nothing_of_one_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    points = without_bounds(curve())
    points[1] = with_global_bound(replace(points[1], own_bound_s=1e-3), 1e-3)
    smallest = points[0].budget_bytes
    monkeypatch.setattr(Planned, "forward_replays", property(lambda p: int(p.problem.budget_bytes == smallest)))
    found = consistent(points, 0.01)
    assert [p.planned.bound_s for p in found[:2]] == [None, 1e-3]
    points[1] = with_global_bound(points[1], 1e-3, forward=True)
    assert [p.planned.bound_s for p in consistent(points, 0.01)[:2]] == [1e-3, 1e-3]


def test_a_bound_that_a_plan_refutes_is_none() -> None:
    points = without_bounds(curve())
    points[1] = replace(points[1], own_bound_s=2 * points[1].planned.objective_s)
    assert [p.planned.bound_s for p in consistent(points, 0.01)] == [None] * 5
    points[1] = replace(points[1], own_bound_s=points[1].planned.objective_s * 1.001)  # rounding
    assert consistent(points, 0.01)[1].planned.bound_s == points[1].planned.objective_s


def test_a_plan_is_carried_on_to_where_none_is_faster() -> None:
    found = curve()
    small, large = found.points[1].planned, found.points[3].planned
    slow = replace(large, plan=found.points[0].planned.plan, timeline=found.points[0].planned.timeline)
    carried = no_slower(slow, small)
    assert carried.timeline.step_s == small.timeline.step_s and carried.fits
    assert carried.problem is slow.problem and carried.plan.kept == small.plan.kept
    assert no_slower(large, small) is large
    points = [found.points[1], replace(found.points[3], planned=slow)]
    assert consistent(points, 0.01)[1].step_s == small.timeline.step_s


def test_the_smallest_budget_always_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner may not find again what the search for the smallest budget did."""
    import actsolve.frontier_planning as module

    good = module.planned_by

    def in_vain(prepared: Prepared, settings: Settings, **more: Any) -> Any:
        planned = good(prepared, settings, **more)
        error = InfeasibleBudget("nothing was found")
        error.attempt = replace(planned, plan=Plan("milp", status=Status.UNKNOWN)).without_timeline()
        raise error

    from actsolve.planned import Attempt

    def without_timeline(self: Planned) -> Attempt:
        fields = {name: getattr(self, name) for name in Attempt.__dataclass_fields__}
        return Attempt(**fields)

    monkeypatch.setattr(Planned, "without_timeline", without_timeline, raising=False)
    monkeypatch.setattr(module, "planned_by", in_vain)
    found = curve(n_points=3).verify()
    assert len(found.points) == 3 and all(p.planned.bound_s is None for p in found.points)
    assert len({p.step_s for p in found.points}) == 1  # the same plan at each


def test_a_baseline_is_shown_at_the_smallest_budget_that_holds_it() -> None:
    found = curve(reserve=Reserve(share=0.05))
    timeline = found.last.keep_all
    late = [(BaselineResult(None, "no link"), 0), (BaselineResult(timeline, "late"), found.last.static.reserve)]
    point = baseline_point(late, Reserve(share=0.05))
    assert point is not None and point.fits and point.peak_bytes == found.points[-1].budget_bytes
    assert baseline_point(late[:1], Reserve()) is None


# -- limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_points", [1, 0, -3, 1001])
def test_a_curve_needs_two_ends(n_points: int) -> None:
    with pytest.raises(UsageError, match="cannot draw a curve of"):
        curve(n_points=n_points)


def test_a_fixed_rule_has_no_curve() -> None:
    with pytest.raises(UsageError, match="cannot draw the curve of sqrt_l"):
        frontier(prepared(CHAIN), Settings(planner="sqrt_l"))


def test_one_time_limit_is_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import actsolve.frontier_planning as module

    given_s: list[float] = []
    good = module.planned_by
    monkeypatch.setattr(module, "planned_by", lambda p, s, **m: given_s.append(s.time_limit_s) or good(p, s, **m))
    curve(n_points=5)
    quarter_s = QUICK.time_limit_s / 4
    assert 0.8 * quarter_s < given_s[0] < 1.02 * quarter_s and given_s[:4] == sorted(given_s[:4])  # then what quick ones leave
    assert max(given_s) < QUICK.time_limit_s


def test_a_stop_leaves_the_rest_out() -> None:
    asked = iter([False, False, False, True])
    found = curve(stop=lambda: next(asked, True))
    assert not found.complete and 1 <= len(found.points) < 5
    assert any("Interrupted" in note for note in strict(found.as_json())["notes"])
    assert "Interrupted" in frontier_text(found)


def test_ctrl_c_between_solves_leaves_the_rest_out() -> None:
    def stage(what: str) -> None:
        if "point 3" in what:
            raise KeyboardInterrupt

    found = curve(listener=Listener(stage=stage))
    assert len(found.points) == 2 and not found.complete

    def at_once(what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        curve(listener=Listener(stage=at_once))


# -- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_writes_and_draws(folder: Path) -> None:
    arguments = ["frontier", *SMALL, *PROFILE, "--points", "3", "--time-limit", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--out", "curve.json", "--png", "curve.png"])
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    assert json.loads((folder / "curve.json").read_text()) == content
    picture = (folder / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in picture[-12:]
    assert sorted(p.name for p in folder.iterdir()) == ["curve.json", "curve.png"]
    assert len(content["points"]) == 3 and content["complete"]
    steps = [p["step_s"] for p in content["points"]]
    assert steps == sorted(steps, reverse=True)
    assert all(p["peak_bytes"] <= p["budget_bytes"] for p in content["points"])
    assert content["solve_s"] < 6


def test_ctrl_c_during_a_solve_takes_the_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    pressed: list[str] = []

    def press(self: Session, elapsed_s: float, incumbent_s: float | None, __: float | None) -> None:
        if not pressed and "point 2" in self._stage:
            pressed.append(self._stage)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Session, "solving", press)
    before = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(app, ["frontier", *SMALL, "--hardware", "a100", "--gap", "0", "--time-limit", "4", "--json"])
    assert signal.getsignal(signal.SIGINT) is before
    assert result.exit_code == 0 and pressed, result.stderr
    content = json.loads(result.stdout)
    assert len(content["points"]) == 2 and not content["complete"]
    assert any("Interrupted: of 12 budgets only the smallest 2" in note for note in content["notes"])


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["frontier", *SMALL, *PROFILE, *arguments])
    assert result.exit_code == 2 and result.stdout == ""
    assert "tracing" not in result.stderr  # before any work
    return result.stderr


def test_wrong_usage_is_told_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot draw a curve of 1 points\n  where  --points" in refused("--points", "1")
    assert "no/where is no directory\n  try    --png" in refused("--png", "no/where/curve.png")
    assert "no/where is no directory\n  try    --out" in refused("--out", "no/where/curve.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "matplotlib is not installed\n  try    pip install 'actsolve[plot]'" in refused("--png", "curve.png")
    assert list(folder.iterdir()) == []


def test_a_name_is_no_formula_and_no_half_picture_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = curve(n_points=2)
    named = replace(found, points=tuple(replace(p, planned=replace(p.planned, target="$\\bad{$\n")) for p in found.points))
    assert frontier_png(named).startswith(b"\x89PNG")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="cannot write the picture"):
        write_frontier_png("curve.png", named)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_points_of_the_same_seed_are_the_same() -> None:
    rng = random.Random(5)
    sizes = [rng.randint(2, 6) for _ in range(2)]
    for n_points in sizes:
        first, second = (strict(curve(n_points=n_points).as_json()) for _ in range(2))
        for a, b in zip(first["points"], second["points"], strict=True):
            assert {**a, "solve_s": 0} == {**b, "solve_s": 0}
