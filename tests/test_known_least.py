"""What a message has named as the smallest budget is found again, however little time there is."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
from offload_plans import drawn_plan, with_links
from replayed_often import random_replays
from strategies import random_problem

from actsolve import known_least as module
from actsolve.kept_plan import Kept
from actsolve.known_least import known_least, least_budget_known
from actsolve.plan import Plan
from actsolve.planners import PlannerOptions
from actsolve.planners.keep_all import keep_all
from actsolve.problem import Problem
from actsolve.simulate import timeline_of

QUICK = PlannerOptions(time_limit_s=2.0)
HEAD = (
    '"format": "actsolve-kept-plan-1", "key": "KEY", "gap": 0.0, "time_limit_s": 0.0, "solve_s": 0.0, "bound_s": null, '
    '"global_bound_s": null, "bounds_forward": false'
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept_by(problem: Problem) -> Plan:
    return replace(keep_all(problem), planner="milp")


def test_a_search_without_time_finds_what_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(8, 7)
    least_bytes, found = least_budget_known(problem, QUICK)
    worse = timeline_of(problem, kept_by(problem)).peak_bytes, kept_by(problem)
    assert least_bytes < worse[0]
    monkeypatch.setattr(module, "least_budget", lambda problem, options: (least_bytes, options.seeds[-1]))
    again_bytes, again = least_budget_known(replace(problem, budget_bytes=1), QUICK)
    assert again_bytes == least_bytes == timeline_of(problem, again).peak_bytes
    assert timeline_of(problem, again) == timeline_of(problem, found)


def test_what_is_better_takes_its_place_and_what_is_worse_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(8, 7)
    whole, whole_bytes = kept_by(problem), timeline_of(problem, kept_by(problem)).peak_bytes

    def least_is_whole() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "least_budget", lambda problem, options: (whole_bytes, whole))
            least_budget_known(problem, QUICK)

    least_is_whole()
    known = known_least(problem)
    assert known is not None and known.kept == whole.kept
    found = least_budget_known(problem, QUICK)
    least_is_whole()
    known = known_least(problem)
    assert known is not None and timeline_of(problem, known).peak_bytes == found[0] < whole_bytes


def test_plans_of_every_kind_come_back_as_they_were() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        linked = with_links(problem)
        plans = [(linked, drawn_plan(linked, random.Random(seed)))]
        plans.append((problem, Plan("milp", replays=random_replays(problem.graph, seed))))
        for of, plan in plans:
            module._place(of).write(Kept(plan))
            known = known_least(of)
            assert known is not None
            assert timeline_of(of, known).schedule == timeline_of(of, plan).schedule


def test_other_steps_costs_and_pins_have_plans_of_their_own() -> None:
    problem = random_problem(8, 7)
    module._place(problem).write(Kept(kept_by(problem)))
    costs = replace(problem.costs, workspace_bytes=tuple(w + 1 for w in problem.costs.workspace_bytes))
    pinned = frozenset(list(problem.graph.decidable)[:1])
    others = (random_problem(9, 7), replace(problem, costs=costs), replace(problem, pinned_keep=pinned), with_links(problem))
    assert known_least(problem) is not None
    assert all(known_least(other) is None for other in others)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"format": "actsolve-kept-plan-0"}',
        '{"format": "actsolve-kept-plan-1", "key": "another"}',
        '{HEAD, "kept": [1000000], "early": [], "offloaded": [], "replays": null}',
        '{HEAD, "kept": [], "early": [], "offloaded": [], "replays": [[0, [99]]]}',
        '{HEAD, "kept": [], "early": [], "offloaded": [[0, 0, 0]], "replays": null}',
    ],
)
def test_a_file_that_cannot_be_used_is_said_so_and_found_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    problem = random_problem(8, 7)
    place = module._place(problem)
    place.path.parent.mkdir()
    place.path.write_text(text.replace("HEAD", HEAD.replace("KEY", place.key)))
    with caplog.at_level(logging.WARNING):
        least_bytes, _ = least_budget_known(problem, QUICK)
    assert f"{place.path} cannot be used" in caplog.text
    known = known_least(problem)
    assert known is not None and timeline_of(problem, known).peak_bytes == least_bytes


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("no directory")
    with caplog.at_level(logging.WARNING):
        least_bytes, found = least_budget_known(random_problem(8, 7), QUICK)
    assert "is not kept" in caplog.text
    assert timeline_of(random_problem(8, 7), found).peak_bytes == least_bytes
