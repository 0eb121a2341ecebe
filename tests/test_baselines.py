"""The baselines of the field: laws that hold for all of them, and what each is known for."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from strategies import PLAIN, Oddities, random_problem
from symbolic import outcome
from test_planners import chain, problem_of
from torch import Tensor, nn

import models_zoo
from actsolve.api import module_of
from actsolve.capture.captured import capture
from actsolve.check import check
from actsolve.cost.hardware import profile
from actsolve.cost.roofline import roofline_costs
from actsolve.plan import Plan
from actsolve.plan_schedule import schedule_of
from actsolve.planners import BASELINES, PLANNERS, QUICK, PlannerOptions, plan
from actsolve.planners.chain import Chain, chain_of
from actsolve.planners.keep_all import keep_all
from actsolve.planners.treeverse import binomial_events, least_advances, snapshot_counts
from actsolve.planning import plan_training_step
from actsolve.problem import Problem
from actsolve.runtime.exactness import bitwise_equal
from actsolve.schedule import StepKind, build_schedule
from actsolve.settings import Settings
from actsolve.simulate import Timeline, simulate
from actsolve.training_step import TrainingStep

UNLIMITED = 1 << 50
EXACT = PlannerOptions(gap=0.0, time_limit_s=20.0, threads=1)
SEARCHING = ("chen_greedy", "greedy", "treeverse", "rotor", "checkmate")  # they look at the budget
KINDS = (Oddities(), PLAIN, Oddities(multi_output=0.4, in_place=0.5, random_op=0.4, update=0.2, not_replayable=0.2))


def small(seed: int) -> Problem:
    return random_problem(seed, odd=KINDS[seed % len(KINDS)])


def simulated(problem: Problem, found: Plan) -> Timeline:
    return simulate(problem, schedule_of(problem.graph, found))


def captured_problem(step: TrainingStep) -> Problem:
    graph = capture(step).graph
    return Problem(graph, roofline_costs(graph, profile("a100")), UNLIMITED)


# -- all of them -------------------------------------------------------------------------------------------------------


def test_they_are_in_the_registry_in_the_order_of_the_tables() -> None:
    first = ("milp", "keep_all", "sqrt_l", "per_layer", "chen_greedy", "selective", "greedy", "treeverse", "rotor")
    assert tuple(PLANNERS)[:11] == (*first, "checkmate", "torch_budget")
    assert set(QUICK) < set(BASELINES)
    for name in SEARCHING:
        assert name in BASELINES and ("20" in (PLANNERS[name].__doc__ or "") or "Source:" in module_text(name))


def module_text(name: str) -> str:
    return str(__import__(f"actsolve.planners.{name}", fromlist=["x"]).__doc__)


@pytest.mark.parametrize("name", SEARCHING)
def test_the_checker_accepts_every_plan_and_the_step_ends_as_it_should(name: str) -> None:
    """Where it says that a plan fits, it does; and its plan at any budget is one that can be carried out."""
    n_found = n_fit = n_replays = 0
    for seed in range(200):
        problem = small(seed)
        found = plan(problem, name, EXACT)
        if not found.found:
            assert found.note and not found.kept
            continue
        n_found += 1
        timeline = simulated(problem, found)
        assert check(replace(problem, budget_bytes=UNLIMITED), timeline.schedule) == timeline.peak_bytes, seed
        if timeline.fits:
            n_fit += 1
            assert check(problem, timeline.schedule) <= problem.budget_bytes
        assert name != "checkmate" or timeline.fits, seed
        n_replays += sum(step.kind is StepKind.REPLAY for step in timeline.schedule.steps)
        assert outcome(problem.graph, timeline.schedule) == outcome(problem.graph, everything(problem)), seed
    assert n_found > 100 and n_fit > 80 and n_replays > 30


def everything(problem: Problem) -> Any:
    return build_schedule(problem.graph, frozenset(problem.graph.decidable))


@pytest.mark.parametrize("name", ["greedy", "treeverse", "rotor", "checkmate"])
def test_an_unlimited_budget_replays_next_to_nothing(name: str) -> None:
    """Treeverse has no plan that replays nothing: it replays all that one stage saves, at least."""
    for seed in range(0, 200, 4):
        problem = replace(small(seed), budget_bytes=UNLIMITED)
        found = plan(problem, name, EXACT)
        if found.found and name != "treeverse":
            assert simulated(problem, found).recompute_s == 0, seed


@pytest.mark.parametrize("name", SEARCHING)
def test_more_than_one_run_gives_the_same_plan(name: str) -> None:
    for seed in range(0, 60, 3):
        plans = [replace(plan(small(seed), name, EXACT), solve_s=0.0) for _ in range(2)]
        assert plans[0] == plans[1]


# -- treeverse and rotor -----------------------------------------------------------------------------------------------


@cache
def fewest(n_stages: int, n_snapshots: int) -> int:
    """The recursion that the closed form solves."""
    if n_stages == 1:
        return 0
    if n_snapshots == 1:
        return n_stages * (n_stages - 1) // 2
    return min(k + fewest(n_stages - k, n_snapshots - 1) + fewest(k, n_snapshots) for k in range(1, n_stages))


def test_treeverse_runs_stages_as_often_as_the_binomial_formula_says() -> None:
    for n_stages, n_snapshots in product(range(1, 22), range(1, 8)):
        assert least_advances(n_stages, n_snapshots) == fewest(n_stages, n_snapshots)
        events = binomial_events(n_stages, n_snapshots)
        forward = [stage for is_forward, stage in events if is_forward]
        assert len(forward) == fewest(n_stages, n_snapshots) + n_stages
        assert [stage for is_forward, stage in events if not is_forward] == list(range(n_stages))[::-1]
    assert least_advances(10, 3) == 2 * 10 - math.comb(5, 1)  # Griewank and Walther: 10 = C(3 + 2, 3) steps at two repetitions


def test_treeverse_tries_each_small_number_of_snapshots_and_ends_with_all() -> None:
    for n_stages in (2, 5, 40, 150):
        counts = snapshot_counts(n_stages)
        assert counts[0] == 1 and counts[-1] == n_stages - 1 and counts == sorted(set(counts))
        assert counts[:20] == list(range(1, min(21, n_stages))) and len(counts) < 80


@pytest.mark.parametrize("name", ["treeverse", "rotor"])
@pytest.mark.parametrize("length", [5, 9, 14])
def test_an_even_chain_is_replayed_no_more_than_the_formula_says(name: str, length: int) -> None:
    """A step of it reads what the stage before has made, so that none is run again for its own backward, nor is the last one."""
    for snapshots in range(1, length - 1):
        problem = replace(problem_of(chain(length)), budget_bytes=4 + snapshots)  # gradients, the output and one stage beside
        timeline = simulated(problem, plan(problem, name))
        assert timeline.fits
        assert timeline.recompute_s == least_advances(length - 1, snapshots) - (length - 2), snapshots


@pytest.mark.parametrize("snapshots", [1, 3, 12])
def test_rotor_meets_the_least_memory_of_a_long_chain(snapshots: int) -> None:
    problem = replace(problem_of(chain(100)), budget_bytes=4 + snapshots)
    timeline = simulated(problem, plan(problem, "rotor"))
    assert timeline.fits and timeline.recompute_s == least_advances(99, snapshots) - 98
    smaller = replace(problem, budget_bytes=4)
    assert snapshots > 1 or not simulated(smaller, plan(smaller, "rotor")).fits


def test_rotor_is_as_good_as_the_exact_program_on_small_uneven_chains() -> None:
    """Mostly: the exact program may also drop what was to be kept, and make it again (plans that are not persistent)."""
    n_same = n_tried = 0
    for seed in range(12):
        problem = uneven_chain(seed, length=6)
        least = simulated(problem, plan(replace(problem, budget_bytes=1), "treeverse")).peak_bytes
        for budget in range(least, problem.budget_bytes, 2):
            limited = replace(problem, budget_bytes=budget)
            exact, ours = plan(limited, "checkmate", EXACT), simulated(limited, plan(limited, "rotor"))
            if exact.found and ours.fits:
                n_tried += 1
                assert simulated(limited, exact).recompute_s <= ours.recompute_s + 1e-9
                n_same += abs(simulated(limited, exact).recompute_s - ours.recompute_s) < 1e-9
    assert n_tried > 20 and n_same > 0.6 * n_tried


def uneven_chain(seed: int, length: int) -> Problem:
    """A chain of which sizes and seconds differ, with a budget that keeps all."""
    graph = chain(length)
    values = list(graph.values)
    for k in range(length):
        size = 1 + (7 * k + 3 * seed) % 5
        for name in (f"v{k}", f"g{k + 1}"):
            index = next((i for i, v in enumerate(values) if v.name == name), None)
            if index is not None:
                values[index] = replace(values[index], size_bytes=size)
    graph = replace(graph, values=tuple(values)).verify()
    seconds = tuple(float(1 + (5 * k + seed) % 4) for k in range(len(graph.ops)))
    problem = Problem(graph, replace(problem_of(graph).costs, seconds=seconds, replay_seconds=seconds), UNLIMITED)
    return replace(problem, budget_bytes=simulated(problem, keep_all(problem)).peak_bytes)


def test_stages_end_where_one_value_is_left_that_the_backward_reads() -> None:
    found = chain_of(problem_of(chain(6)))
    assert [list(stage) for stage in found.stages] == [[0], [1], [2], [3], [4], [5]]
    assert [list(stage) for stage in chain_of(problem_of(chain(6)), last_apart=False).stages][-2:] == [[3], [4, 5]]


def test_a_value_that_skips_stages_is_kept() -> None:
    step = TrainingStep(Skipping(8), (torch.randn(4, 8),), loss_fn=lambda y: y.sum())
    problem = captured_problem(step)
    found: Chain = chain_of(problem)
    skipping = [v for v in found.kept if len(problem.graph.forward_readers[v]) >= 8]
    assert found.n_stages >= 8 and len(skipping) == 1
    assert "skip stages" in plan(replace(problem, budget_bytes=UNLIMITED), "rotor").note


class Skipping(nn.Module):
    """Each layer reads a table that the first op makes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.sin(x)
        for layer in self.layers:
            x = torch.tanh(layer(x) * table)
        return x


def test_rotor_trains_bitwise_where_ops_run_again_and_again() -> None:
    torch.manual_seed(0)
    step = models_zoo.get("conv-chain-mini")(layers=12, width=4, image=8, batch=16)
    settings = Settings(optimizer="none", hardware="a100", planner="rotor", reserve_bytes=0)
    captured, planned = plan_training_step(step, 0.4, settings)
    replayed = Counter(s.op for s in planned.schedule.steps if s.kind is StepKind.REPLAY)
    assert planned.plan.planner == "rotor" and max(replayed.values()) > 1
    module = module_of(step, captured, planned)
    assert step.loss_fn is not None
    gradients = []
    for loss in (step.loss_fn(step.model(*step.args)), module(*step.args)[0]):
        step.model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in step.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 24 and all(map(bitwise_equal, *gradients))
