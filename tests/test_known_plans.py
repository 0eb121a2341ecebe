"""A plan that was found before serves again where a search could not do better, and is never believed blindly."""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_plans import drawn_plan, with_links
from replayed_often import random_replays
from strategies import random_problem

import actsolve
from actsolve import known_plans as module
from actsolve.cache_dir import cache_dir
from actsolve.frontier_planning import frontier
from actsolve.kept_plan import Kept
from actsolve.known_plans import notes_of, plan_known
from actsolve.links import Links
from actsolve.plan import Plan, Status
from actsolve.planners import PLANNERS, PlannerOptions
from actsolve.planners.keep_all import keep_all
from actsolve.planning import prepare
from actsolve.problem import Problem
from actsolve.settings import Settings
from actsolve.simulate import timeline_of
from actsolve.training_step import TrainingStep

QUICK = PlannerOptions(time_limit_s=2.0)
OPEN = 0.5  # of the extra time: what is proven of a plan that is made up here


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ACTSOLVE_PLAN_CACHE")
    return tmp_path / "cache"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[PlannerOptions]:
    """What was asked of the solver, each time that it was called."""
    calls: list[PlannerOptions] = []
    solver = PLANNERS["milp"]

    def counted(problem: Problem, options: PlannerOptions) -> Plan:
        calls.append(options)
        return solver(problem, options)

    monkeypatch.setitem(PLANNERS, "milp", counted)
    return calls


def tight_problem() -> Problem:
    """A step that fits only with replays."""
    for seed in range(100):
        problem = random_problem(seed, 7)
        found = PLANNERS["milp"](problem, QUICK)
        if found.found and timeline_of(problem, found).extra_s > 0:
            return problem
    raise AssertionError("no seed gives one")


PROBLEM = tight_problem()


def left_open(problem: Problem) -> Plan:
    """The best plan, as if half of its extra time were not proven to be needed."""
    best = PLANNERS["milp"](problem, QUICK)
    return replace(
        best, status=Status.FEASIBLE, bound_s=OPEN * timeline_of(problem, best).extra_s, global_bound_s=None, solve_s=7.0
    )


def kept(problem: Problem, plan: Plan, *, gap: float = QUICK.gap, time_limit_s: float = QUICK.time_limit_s) -> Path:
    place = module._place(problem, QUICK)
    place.write(Kept(plan, gap, time_limit_s))
    return place.path


def test_what_was_found_is_not_searched_for_again(searches: list[PlannerOptions]) -> None:
    first = plan_known(PROBLEM, QUICK)
    assert first.earlier_s is None and len(searches) == 1 and not list(notes_of(first))
    again = plan_known(PROBLEM, QUICK)
    assert len(searches) == 1
    assert again.earlier_s == first.solve_s and again.solve_s < first.solve_s
    assert next(notes_of(again)).startswith("The plan was found before, in ")
    told = {"earlier_s": None, "solve_s": first.solve_s}
    assert replace(again, **told) == first  # status, bounds and decisions
    assert timeline_of(PROBLEM, again) == timeline_of(PROBLEM, first)


def test_another_problem_is_searched_for_anew(searches: list[PlannerOptions]) -> None:
    plan_known(PROBLEM, QUICK)
    costs = PROBLEM.costs
    slower = replace(costs, seconds=tuple(s * 1.001 for s in costs.seconds))
    dearer = replace(costs, replay_seconds=tuple(s * 1.001 for s in costs.replay_seconds))
    wider = replace(costs, workspace_bytes=tuple(w + 1 for w in costs.workspace_bytes))
    pinned = frozenset(list(PROBLEM.graph.decidable)[:1])
    linked = replace(PROBLEM, links=Links(1e9, 1e9), min_offload_bytes=0, host_budget_bytes=1)
    others = [
        *(replace(PROBLEM, costs=other) for other in (slower, dearer, wider)),
        replace(PROBLEM, budget_bytes=PROBLEM.budget_bytes + 1),
        replace(PROBLEM, budget_bytes=PROBLEM.budget_bytes + 1, static_bytes=PROBLEM.static_bytes + 1),
        replace(PROBLEM, optimizer_bytes=PROBLEM.optimizer_bytes + 1),
        replace(PROBLEM, pinned_keep=pinned),
        linked,
        replace(linked, host_budget_bytes=2),
        replace(linked, links=Links(1e9, 2e9)),
        replace(linked, min_offload_bytes=1),
        random_problem(9, 7),
    ]
    for number, other in enumerate(others, start=2):
        assert plan_known(other, QUICK).earlier_s is None
        assert len(searches) == number, other
    for options in (replace(QUICK, window=3), replace(QUICK, torch_saved=lambda _: frozenset())):
        assert plan_known(PROBLEM, options).earlier_s is None


def test_host_memory_counts_only_where_there_can_be_too_little() -> None:
    linked = replace(PROBLEM, links=Links(1e9, 1e9), min_offload_bytes=0, host_budget_bytes=10**12)
    plan_known(linked, QUICK)
    assert plan_known(replace(linked, host_budget_bytes=10**12 - 4096), QUICK).earlier_s is not None
    assert plan_known(replace(linked, host_budget_bytes=None), QUICK).earlier_s is not None


def test_a_version_of_the_planners_has_plans_of_its_own(searches: list[PlannerOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    plan_known(PROBLEM, QUICK)
    monkeypatch.setattr(module, "_version", lambda: "the next")
    assert plan_known(PROBLEM, QUICK).earlier_s is None and len(searches) == 2


@pytest.mark.parametrize(
    ("asked", "serves"),
    [
        ({}, True),
        ({"time_limit_s": 1.0}, True),
        ({"time_limit_s": 3.0}, False),
        ({"gap": 0.02}, True),
        ({"gap": 0.001}, False),
        ({"gap": OPEN + 0.01, "time_limit_s": 60.0}, True),  # so much is proven
    ],
)
def test_a_search_that_the_clock_cut_off_serves_those_who_ask_for_no_more(
    asked: dict[str, float], serves: bool, searches: list[PlannerOptions]
) -> None:
    plan = left_open(PROBLEM)
    kept(PROBLEM, plan)
    searches.clear()
    found = plan_known(PROBLEM, replace(QUICK, **asked))
    assert (found.earlier_s == 7.0) is serves is not bool(searches)
    if searches:  # it goes on from there, and what it finds takes the place
        assert timeline_of(PROBLEM, searches[0].seeds[0]) == timeline_of(PROBLEM, plan)
        assert plan_known(PROBLEM, replace(QUICK, **asked)).earlier_s is not None and len(searches) == 1


def test_what_is_proven_serves_whatever_the_time(searches: list[PlannerOptions]) -> None:
    plan_known(PROBLEM, replace(QUICK, gap=0.0))
    assert plan_known(PROBLEM, replace(QUICK, time_limit_s=1000.0)).status is Status.OPTIMAL and len(searches) == 1


def test_a_better_plan_that_the_caller_knows_is_begun_from(searches: list[PlannerOptions]) -> None:
    best = PLANNERS["milp"](PROBLEM, QUICK)
    rules = (PLANNERS[name](PROBLEM, QUICK) for name in ("sqrt_l", "per_layer", "greedy", "rotor", "chen_greedy"))
    worse = [p for p in rules if p.found and timeline_of(PROBLEM, p).fits]
    slower = next(p for p in worse if timeline_of(PROBLEM, p).extra_s > timeline_of(PROBLEM, best).extra_s)
    searches.clear()
    kept(PROBLEM, replace(slower, bound_s=None, global_bound_s=None))
    assert plan_known(PROBLEM, QUICK).earlier_s is not None and not searches
    found = plan_known(PROBLEM, replace(QUICK, seeds=(best,)))
    assert found.earlier_s is None and timeline_of(PROBLEM, found).extra_s <= timeline_of(PROBLEM, best).extra_s


def test_what_was_cut_short_or_not_found_is_not_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    best = PLANNERS["milp"](PROBLEM, QUICK)
    for found in (replace(best, interrupted=True), Plan("milp", status=Status.INFEASIBLE), Plan("milp", status=Status.UNKNOWN)):
        monkeypatch.setitem(PLANNERS, "milp", lambda problem, options, found=found: found)
        assert plan_known(PROBLEM, QUICK).status is found.status
    assert not list(cache.glob("plan-*"))


def test_a_solver_that_the_user_stops_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    certified = importlib.import_module("actsolve.planners.certified")  # the package has a function of that name

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(certified, "_prove", stopped)
    monkeypatch.setattr(certified, "_only_recompute", stopped)
    problem = next(p for p in map(random_problem, range(100)) if p.links is None and has_seed(p))
    assert PLANNERS["milp"](problem, QUICK).interrupted


@pytest.mark.parametrize("linked", [False, True])
def test_a_solve_that_the_user_stops_says_so(linked: bool, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The solver takes Ctrl-C as its end, and does not pass it on."""
    for name in ("dag_search", "one_pass"):
        where = importlib.import_module(f"actsolve.planners.{name}")
        solve = where.solve
        monkeypatch.setattr(where, "solve", lambda *args, solve=solve, **more: replace(solve(*args, **more), interrupted=True))
    problem = PROBLEM if not linked else replace(PROBLEM, links=Links(1e3, 1e3), min_offload_bytes=0)
    found = plan_known(problem, QUICK)
    assert found.found and found.interrupted and not list(cache.glob("plan-*"))


def has_seed(problem: Problem) -> bool:
    plans = (PLANNERS[name](problem, QUICK) for name in ("rotor", "greedy"))
    whole = timeline_of(problem, keep_all(problem))
    return not whole.fits and any(p.found and timeline_of(problem, p).fits for p in plans)


def test_plans_of_every_kind_come_back_as_they_were() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        linked = with_links(problem)
        plans = [(linked, drawn_plan(linked, random.Random(seed)))]
        plans.append((problem, Plan("milp", replays=random_replays(problem.graph, seed))))
        for of, plan in plans:
            timeline = timeline_of(of, plan)
            roomy = replace(of, budget_bytes=timeline.peak_bytes)
            kept(roomy, replace(plan, solve_s=3.0))
            again = plan_known(roomy, QUICK)
            assert again.earlier_s == 3.0 and timeline_of(roomy, again).schedule == timeline.schedule


def changed(**fields: Any) -> Callable[[dict[str, Any]], str]:
    return lambda content: json.dumps({**content, **fields})


@pytest.mark.parametrize(
    "text_of",
    [
        lambda content: "",
        lambda content: "{}",
        lambda content: json.dumps(content)[:-20],
        lambda content: "[" * 100_000,
        changed(format="actsolve-kept-plan-9"),
        changed(key="another"),
        changed(more=1),
        changed(kept=[10**6]),
        changed(kept=[-1]),
        changed(kept=["0"]),
        changed(replays=[[0, [99]]]),
        changed(offloaded=[[0, 0, 0]]),
        changed(kept=[], early=[], offloaded=[], replays=[]),  # it replays nothing, and keeps nothing
        changed(kept=sorted(PROBLEM.graph.decidable), replays=None),  # it is over the budget
        changed(bound_s=1e9),
        changed(global_bound_s=1e9),
        changed(bound_s=-1.0),
        changed(gap="all"),
        lambda content: json.dumps(content).replace('"gap": 0.01', '"gap": NaN'),
    ],
)
def test_a_file_that_cannot_be_used_is_said_so_and_found_again(
    text_of: Callable[[dict[str, Any]], str], searches: list[PlannerOptions], caplog: pytest.LogCaptureFixture
) -> None:
    first = plan_known(PROBLEM, QUICK)
    path = module._place(PROBLEM, QUICK).path
    content = json.loads(path.read_text())
    assert text_of(content) != json.dumps(content)
    path.write_text(text_of(content))
    with caplog.at_level(logging.WARNING):
        again = plan_known(PROBLEM, QUICK)
    assert f"{path} cannot be used" in caplog.text
    assert again.earlier_s is None and len(searches) == 2
    assert timeline_of(PROBLEM, again).extra_s == timeline_of(PROBLEM, first).extra_s
    assert plan_known(PROBLEM, QUICK).earlier_s is not None


def test_pins_are_honoured_whatever_a_file_says(caplog: pytest.LogCaptureFixture) -> None:
    pinned = replace(PROBLEM, budget_bytes=10**9, pinned_keep=frozenset(PROBLEM.graph.decidable[:1]))
    kept(pinned, Plan("milp", frozenset(PROBLEM.graph.decidable[1:])))
    assert plan_known(pinned, QUICK).earlier_s is None and "what is pinned" in caplog.text


def test_a_directory_or_a_pipe_in_its_place_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    path = module._place(PROBLEM, QUICK).path
    for make in (lambda: path.mkdir(parents=True), lambda: os.mkfifo(path)):
        make()
        caplog.clear()
        assert plan_known(PROBLEM, QUICK).found
        assert "cannot be used" in caplog.text and "the plan is not kept" in caplog.text
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("no directory")
    assert plan_known(PROBLEM, QUICK).found and "the plan is not kept" in caplog.text
    cache.unlink()
    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    caplog.clear()
    try:
        assert plan_known(PROBLEM, QUICK).found
        assert "the plan is not kept" in caplog.text or os.geteuid() == 0  # root writes there all the same
    finally:
        cache.chmod(stat.S_IRWXU)


def test_of_several_writers_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    plans = [replace(left_open(PROBLEM), solve_s=float(n)) for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda plan: kept(PROBLEM, plan), plans))
        read = list(threads.map(lambda plan: (kept(PROBLEM, plan), plan_known(PROBLEM, QUICK).earlier_s)[1], plans))
    assert set(read) <= {plan.solve_s for plan in plans} and not caplog.records
    assert len(list(cache_dir().iterdir())) == 1  # no temporary file is left


def test_nothing_is_read_or_kept_where_the_user_says_so(
    searches: list[PlannerOptions], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_known(PROBLEM, QUICK)
    (path,) = cache.glob("plan-*")
    path.write_text("as it was")
    monkeypatch.setenv("ACTSOLVE_PLAN_CACHE", "off")
    assert plan_known(PROBLEM, QUICK).earlier_s is None and len(searches) == 2
    assert path.read_text() == "as it was"


def a_step(depth: int = 4, batch: int = 64) -> TrainingStep:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(16, 16), torch.nn.GELU())]
    return TrainingStep(torch.nn.Sequential(*layers), (torch.ones(batch, 16),), loss_fn=lambda y: y.square().mean())


def optimized(batch: int = 64) -> torch.nn.Module:
    step = a_step(batch=batch)
    given = {"loss_fn": step.loss_fn, "hardware": "a100", "optimizer": "sgd", "reserve_bytes": 0}
    return actsolve.optimize(step.model, step.args, mem_budget=0.7, **given)


def test_a_second_optimize_does_not_solve_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    first = optimized()
    assert "found before" not in first.report()
    monkeypatch.setitem(PLANNERS, "milp", None)  # it cannot be called any more
    again = optimized()
    assert again.plan.steps == first.plan.steps and again.plan.gap == first.plan.gap
    assert "The plan was found before, in " in again.report()


def test_new_inputs_that_were_planned_for_before_are_not_solved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized(32)
    module = optimized(64)
    monkeypatch.setitem(PLANNERS, "milp", None)
    loss, _ = module(torch.ones(32, 16))  # to call it would raise
    loss.backward()


def test_a_curve_drawn_again_says_how_much_was_known() -> None:
    settings = Settings(hardware="a100", optimizer="sgd", reserve_bytes=0, host_budget_bytes=0, time_limit_s=20.0)
    prepared = prepare(a_step(), "100%", settings)
    first, again = (frontier(prepared, settings, 3) for _ in range(2))
    assert not any("found before" in note for note in first.notes)
    assert "The plans of 3 budgets were found before; ACTSOLVE_PLAN_CACHE=off searches anew." in again.notes
    assert [p.step_s for p in again.points] == [p.step_s for p in first.points]
