"""Settings, plans loaded from files, and what is known where nothing fits: `actsolve.planning` and `actsolve.api`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_plans import drawn_plan
from torch import nn

import actsolve
from actsolve.api import module_of
from actsolve.cost.link_speed import EMULATED
from actsolve.errors import FileFormatError, InfeasibleBudget, SolverError, UsageError
from actsolve.links import Links
from actsolve.plan import Plan
from actsolve.planned import Attempt, Planned
from actsolve.planners import PLANNERS, PlannerOptions
from actsolve.planning import Listener, attempts, plan_training_step, planned_from_file, prepare
from actsolve.problem import Problem
from actsolve.schedule import StepKind
from actsolve.settings import Settings
from actsolve.static_memory import Reserve
from actsolve.training_step import TrainingStep


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


X = torch.linspace(-1, 1, 64 * 16).view(64, 16)
FAST = Settings(hardware="a100", optimizer="sgd", reserve_bytes=0)


def a_step(depth: int = 4) -> TrainingStep:
    return TrainingStep(Net(depth), (X,))


def losses(module: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(X)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_saved_plan_is_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = actsolve.optimize(Net(), (X,), mem_budget=0.8, hardware="a100", optimizer="sgd", reserve_bytes=0)
    first.plan.save(tmp_path / "plan.json")
    monkeypatch.setitem(PLANNERS, "milp", None)  # it cannot be called any more
    for plan in (tmp_path / "plan.json", str(tmp_path / "plan.json"), first.plan):
        again = actsolve.optimize(Net(), (X,), plan=plan, hardware="a100", optimizer="sgd", reserve_bytes=0)
        assert again.plan.steps == first.plan.steps and again.plan.budget_bytes == first.plan.budget_bytes
        assert "The plan was loaded" in again.report()
        assert again.plan.gap is None
    assert losses(again) == losses(Net())


def test_a_plan_of_another_model_or_too_large_is_refused() -> None:
    captured, planned = plan_training_step(a_step(), 1.0, FAST)
    with pytest.raises(FileFormatError, match="made for another training step"):
        planned_from_file(a_step(5), planned.plan_file, FAST)
    with pytest.raises(InfeasibleBudget, match="the loaded plan does not fit") as raised:
        planned_from_file(a_step(), planned.plan_file, Settings(hardware="a100", optimizer="adamw", reserve_bytes=0))
    assert isinstance(raised.value.attempt, Attempt)
    assert captured.graph.fingerprint == planned.graph.fingerprint


def never_traced(*_: Any, **__: Any) -> None:
    raise AssertionError("traced")


def test_pins_are_honoured_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan_training_step(a_step(), 1.0, FAST)[1].plan_file
    pinned = replace(FAST, recompute=("blocks.0",))
    found = attempts(prepare(a_step(), 1.0, pinned), pinned)
    assert isinstance(found["milp"], Planned) and found["milp"].timeline.recompute_s > 0
    assert found["keep_all"].plan.note == "ignores pinned values"
    monkeypatch.setattr("actsolve.planning.capture_as_laid_out", never_traced)
    with pytest.raises(UsageError, match="cannot honour recompute with a saved plan"):
        planned_from_file(a_step(), file, pinned)
    for on_error in ("raise", "original"):
        for given in ({"plan": file}, {"planner": "per_layer"}):
            with pytest.raises(UsageError, match="cannot honour keep with"):
                actsolve.optimize(Net(), (X,), mem_budget=1.0, keep=["blocks.0"], on_error=on_error, **given)
        with pytest.raises(UsageError, match="cannot use keep='10'"):
            actsolve.optimize(Net(), (X,), mem_budget=1.0, keep="10", on_error=on_error)


LINKED = replace(FAST, h2d=1e9, d2h=2e9)


@pytest.fixture
def offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner offloads whatever may be, however small."""

    def planner(problem: Problem, options: PlannerOptions) -> Plan:
        return drawn_plan(replace(problem, min_offload_bytes=1), random.Random(0))

    monkeypatch.setitem(PLANNERS, "milp", planner)


def test_a_problem_has_the_link_and_the_host_budget_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actsolve.cost.link_speed.available_host_bytes", lambda: 10**9)
    of_profile = prepare(a_step(), 1.0, FAST)
    assert of_profile.problem.links is not None and of_profile.problem.host_budget_bytes is None
    assert of_profile.links_source == "profile a100-sxm-80gb" and of_profile.notes == ()
    given = prepare(a_step(), 1.0, replace(LINKED, host_budget_bytes=5000))
    assert given.problem.links == Links(d2h=2e9, h2d=1e9) and given.problem.host_budget_bytes == 5000
    nothing = prepare(a_step(), 1.0, replace(LINKED, host_budget_bytes=0))
    assert nothing.problem.links is None and nothing.notes == ("Nothing is offloaded: the host budget is 0.",)
    here = prepare(a_step(), 1.0, replace(LINKED, hardware="auto"))
    assert here.problem.links == given.problem.links and here.problem.host_budget_bytes == 8 * 10**8
    assert here.notes == (EMULATED,)
    plain = prepare(a_step(), 1.0, replace(FAST, hardware="auto"))
    assert plain.problem.links is None and plain.problem.host_budget_bytes is None and plain.notes == ()
    asked = prepare(a_step(), 1.0, replace(FAST, hardware="auto", host_budget_bytes=5000))
    assert asked.problem.links is None and "a CPU has no link to a device" in asked.notes[0]


@pytest.mark.usefixtures("offloads")
def test_a_module_that_offloads_trains_as_the_original(tmp_path: Path) -> None:
    given: dict[str, Any] = {"hardware": "a100", "optimizer": "sgd", "reserve_bytes": 0, "h2d": "1GB/s", "d2h": 2e9}
    first = actsolve.optimize(Net(), (X,), mem_budget=1.0, host_budget="1MiB", **given)
    file = first.plan
    assert file.predicted.d2h_bytes > 0 and file.host_budget_bytes == 2**20 and "offload" in file.decisions.values()
    assert losses(first) == losses(Net())
    assert "of its budget, 1.00 MiB" in first.report() and "2 GB/s out, 1 GB/s back; shared" in first.report()
    file.save(tmp_path / "plan.json")
    again = actsolve.optimize(Net(), (X,), plan=tmp_path / "plan.json", hardware="a100", optimizer="sgd", reserve_bytes=0)
    assert again.plan.steps == file.steps and again.plan.decisions == file.decisions and again.plan.links == file.links
    assert again.plan.predicted == file.predicted
    assert losses(again) == losses(Net())


@pytest.mark.usefixtures("offloads")
def test_a_saved_plan_that_offloads_goes_over_the_link_of_here(monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan_training_step(a_step(), 1.0, LINKED)[1].plan_file
    loaded = planned_from_file(a_step(), file, FAST)[1]
    assert loaded.problem.links == Links(d2h=2e9, h2d=1e9) and loaded.links_source == "the plan file"
    slower = planned_from_file(a_step(), file, replace(FAST, h2d=1e3, d2h=1e3))[1]
    assert slower.problem.links == Links(1e3, 1e3) and slower.timeline.stall_s > 100 * loaded.timeline.stall_s
    host = file.predicted.host_peak_bytes  # type: ignore[union-attr]
    assert planned_from_file(a_step(), file, replace(FAST, host_budget_bytes=host))[1].fits
    for settings in (replace(FAST, host_budget_bytes=host - 1), replace(LINKED, host_budget_bytes=0)):
        with pytest.raises(InfeasibleBudget, match=r"(?s)of host memory here.*it offloads.*--host-budget"):
            planned_from_file(a_step(), file, settings)
    monkeypatch.setattr("actsolve.cost.link_speed.available_host_bytes", lambda: host)
    with pytest.raises(InfeasibleBudget, match="of host memory here"):
        planned_from_file(a_step(), file, replace(FAST, hardware="auto"))
    monkeypatch.setattr("actsolve.cost.link_speed.available_host_bytes", lambda: 2 * host)
    assert EMULATED in planned_from_file(a_step(), file, replace(FAST, hardware="auto"))[1].notes


def test_a_plan_of_a_planner_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan_training_step(a_step(), 1.0, FAST)[1].plan_file.model_copy(update={"planner": "magic"})
    file.save(tmp_path / "magic.json")
    monkeypatch.setattr("actsolve.planning.capture_as_laid_out", never_traced)
    for plan, where in ((file, "plan of Net"), (tmp_path / "magic.json", "magic.json")):
        with pytest.raises(FileFormatError, match=f"(?s){where}.*its planner, 'magic', is none of milp"):
            planned_from_file(a_step(), plan, FAST)


def test_a_budget_or_a_plan_is_needed() -> None:
    with pytest.raises(UsageError, match="mem_budget is missing"):
        actsolve.optimize(Net(), (X,))


def test_a_planned_step_becomes_a_module() -> None:
    step = a_step()
    captured, planned = plan_training_step(step, 0.8, FAST)
    module = module_of(step, captured, planned)
    assert losses(module) == losses(Net())
    with pytest.raises(UsageError, match="was not planned for these inputs"):
        module(X[:3])


def test_every_planner_has_its_say() -> None:
    found = attempts(prepare(a_step(), 0.8, FAST), FAST)
    assert list(found) == list(PLANNERS)
    assert found["milp"].fits and not found["keep_all"].fits
    for name, attempt in found.items():
        assert isinstance(attempt, Planned) or (name in ("selective", "checkmate") or name.startswith("offload")), name
        assert isinstance(attempt, Planned) or attempt.plan.note
    nothing = attempts(prepare(a_step(), 1000, FAST), FAST)
    assert not any(a.fits for a in nothing.values())
    assert not isinstance(nothing["milp"], Planned) and nothing["milp"].as_json()["predicted"] is None


@pytest.mark.slow
def test_what_is_being_done_is_told() -> None:
    stages: list[str] = []
    plan_training_step(a_step(), "min", FAST, listener=Listener(stages.append))
    assert stages == ["tracing", "costing ops", "searching for the smallest budget", "planning by milp"]


def test_a_loss_that_is_outside() -> None:
    outside = TrainingStep(nn.Linear(16, 16), (X,))
    assert not plan_training_step(outside, 1.0, FAST)[1].loss_inside
    inside = TrainingStep(nn.Linear(16, 16), (X,), loss_fn=lambda y: y.sum())
    assert plan_training_step(inside, 1.0, FAST)[1].loss_inside
    assert plan_training_step(a_step(), 1.0, FAST)[1].loss_inside


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grads": "maybe"}, "grads='maybe' is not known"),
        ({"planner": "magic"}, "no planner is called 'magic'"),
        ({"gap": -0.1}, "cannot use gap=-0.1"),
        ({"gap": float("inf")}, "cannot use gap=inf"),
        ({"time_limit_s": 0.0}, "cannot use a time limit of 0.0 s"),
        ({"reserve_bytes": -1}, "cannot use reserve_bytes=-1"),
        ({"optimizer": None}, "(?s)cannot use optimizer=None.*its type is NoneType.*an instance of torch.optim.Optimizer"),
        ({"static_bytes": "1GiB"}, "(?s)cannot use static_bytes='1GiB'.*bytes, as an int"),
        ({"time_limit_s": None}, "(?s)cannot use time_limit_s=None.*a number"),
        ({"planner": ["milp"]}, "cannot use planner="),
        ({"keep": 3}, "cannot use keep=3"),
        ({"host_budget_bytes": -1}, "cannot use host_budget_bytes=-1"),
        ({"host_budget_bytes": 1.5}, "cannot use host_budget_bytes=1.5"),
        ({"h2d": "25GB/s"}, "cannot use h2d='25GB/s'"),
        ({"d2h": True}, "cannot use d2h=True"),
        *(
            ({"d2h": speed}, "(?s)cannot use d2h=.*it is no speed of a link")
            for speed in (0, -1.0, float("nan"), float("inf"), 0.5)
        ),
        ({"recompute": (3,)}, "cannot use recompute="),
        ({"optimizer": 3}, "cannot use optimizer=3"),
        ({"optimizer": "magic"}, "magic"),
        ({"keep": "10"}, r"(?s)cannot use keep='10'.*keep=\['10'\]"),
        ({"planner": "sqrt_l", "keep": ("blocks.0",)}, "cannot honour keep with the planner sqrt_l"),
        ({"planner": "keep_all", "keep": ("a",), "recompute": ("b",)}, "cannot honour keep and recompute with the planner"),
    ],
)
def test_settings_that_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": lambda t: t}, "(?s)cannot use this model.*its type is function.*a torch.nn.Module"),
        ({"model": Net}, "(?s)cannot use this model.*its type is that of a class, Net"),
        ({"args": X}, r"(?s)cannot use this args.*its type is Tensor.*args=\(x,\)"),
        ({"kwargs": 3}, "(?s)cannot use this kwargs.*its type is int.*a dict of inputs"),
        ({"loss_fn": "mse"}, "(?s)cannot use this loss_fn.*its type is str"),
        ({"optimizer": None}, "cannot use optimizer=None"),
        ({"optimizer": "magic"}, "magic"),
        ({"mem_budget": "abc"}, "'abc'"),
        ({"mem_budget": 1.5}, "cannot use the memory budget 1.5"),
        ({"hardware": "abacus"}, "abacus"),
        ({"planner": "magic"}, "no planner is called 'magic'"),
        ({"solver": "abacus"}, "no solver is called 'abacus'"),
        ({"keep": ["block.0"]}, "(?s)no op comes from a module called 'block.0'.*blocks.0"),
        ({"recompute": ["nowhere"]}, "no op comes from a module called 'nowhere'"),
        ({"plan": "nowhere.json"}, "nowhere.json"),
        ({"host_budget": "lots"}, "cannot read host_budget 'lots'"),
        ({"host_budget": 0.5}, "cannot use host_budget_bytes=0.5"),
        ({"h2d": "25GB"}, "(?s)cannot read h2d '25GB'.*25GB/s"),
        ({"d2h": 0}, "cannot use d2h=0"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "original"])
def test_arguments_that_cannot_be_used_are_told_before_the_trace(
    given: dict[str, Any], message: str, on_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actsolve.planning.capture_as_laid_out", never_traced)
    arguments = {"model": Net(), "args": (X,), "mem_budget": 0.8, "hardware": "a100", "on_error": on_error, **given}
    with pytest.raises((UsageError, SolverError), match=message):
        actsolve.optimize(**arguments)
    if given.keys() <= {"model", "args", "kwargs", "loss_fn"}:
        with pytest.raises(UsageError, match=message):
            plan_training_step(TrainingStep(**{"model": Net(), "args": (X,), **given}), 0.8, FAST)


def test_a_reserve_leaves_room_for_what_is_needed() -> None:
    for reserve in (Reserve(), Reserve(size_bytes=1000), Reserve(share=0.05), Reserve(size_bytes=7, share=0.3)):
        for needed in (0, 1, 19, 20, 21, 12345, 10**12 + 1):
            budget = reserve.budget_for(needed)
            assert budget - reserve.of(budget) >= needed
            assert budget == 0 or budget - 1 - reserve.of(budget - 1) < needed


@pytest.mark.parametrize("hardware", ["a100", "auto"])
def test_what_a_plan_takes_longer_is_its_replays_and_stalls(hardware: str) -> None:
    """Also where random ops are replayed: to save a generator's state is theirs to pay."""
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.GELU())]
    step = TrainingStep(torch.nn.Sequential(*layers), (torch.randn(256, 64),), loss_fn=lambda y: y.square().mean())
    planned = plan_training_step(step, "min", replace(FAST, hardware=hardware, host_budget_bytes=0, time_limit_s=1.0))[1]
    replayed = [planned.graph.ops[s.op] for s in planned.schedule.steps if s.op is not None and s.kind is StepKind.REPLAY]
    assert any(op.random for op in replayed)
    assert planned.objective_s == pytest.approx(planned.timeline.extra_s, abs=1e-12) and planned.objective_s > 0
