"""What is broken on purpose costs time and changes no bit."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch
from offload_plans import drawn_plan, with_links
from strategies import random_problem
from symbolic import outcome
from torch import nn

from actsolve.api import module_of
from actsolve.check import check
from actsolve.cost.optimizers import new_optimizer
from actsolve.experiments import blocking, late_out, on_demand, synchronous
from actsolve.links import Links
from actsolve.plan_schedule import schedule_of
from actsolve.planning import planned_by, prepare, with_budget
from actsolve.problem import Problem
from actsolve.runtime.exactness import largest_difference
from actsolve.runtime.switches import SWITCHES
from actsolve.runtime.trainer import Trainer
from actsolve.schedule import Schedule, StepKind
from actsolve.settings import Settings
from actsolve.simulate import simulate
from actsolve.training_step import TrainingStep

WAITS = {StepKind.COPY_OUT: StepKind.WAIT_OUT, StepKind.COPY_BACK: StepKind.WAIT_BACK}


def drawn(seed: int) -> tuple[Problem, Schedule]:
    rng = random.Random(seed)
    problem = with_links(random_problem(seed, 6), Links(2e3, 1e3, 1.5e3, 0.8e3))
    problem = replace(problem, budget_bytes=2**50)
    return problem, schedule_of(problem.graph, drawn_plan(problem, rng))


@pytest.mark.parametrize("broken", [synchronous, late_out, on_demand, blocking])
def test_a_broken_schedule_is_valid_computes_the_same_and_takes_no_less_time(broken: object) -> None:
    n_slower = 0
    for seed in range(120):
        problem, schedule = drawn(seed)
        worse = broken(problem.graph, schedule)  # type: ignore[operator]
        assert check(problem, worse) > 0
        assert outcome(problem.graph, worse) == outcome(problem.graph, schedule)
        before, after = simulate(problem, schedule), simulate(problem, worse)
        assert after.d2h_bytes == before.d2h_bytes
        if broken in (synchronous, blocking):  # a copy that begins later can leave the link to the other direction
            assert after.step_s >= before.step_s - 1e-12
        n_slower += after.step_s > before.step_s + 1e-12
    assert n_slower > 10


def test_what_blocks_waits_where_it_is_queued() -> None:
    for seed in range(40):
        steps = blocking(drawn(seed)[0].graph, drawn(seed)[1]).steps
        for step, following in itertools.pairwise(steps):
            if step.kind in WAITS:
                assert (following.kind, following.value) == (WAITS[step.kind], step.value)


def test_copies_that_block_do_not_overlap() -> None:
    """Then the step is its runs and, one after the other, its copies at the speed of each alone."""
    for seed in range(60):
        problem, schedule = drawn(seed)
        timeline = simulate(problem, blocking(problem.graph, schedule))
        assert problem.links is not None
        alone_s = timeline.d2h_bytes / problem.links.d2h + timeline.h2d_bytes / problem.links.h2d
        assert timeline.stall_s == pytest.approx(alone_s)


def test_every_switch_trains_bitwise_as_eager() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU())))
    step = TrainingStep(net, (torch.randn(128, 64),), loss_fn=lambda y: y.square().mean())
    settings = Settings(optimizer="none", h2d=5e7, d2h=5e7, time_limit_s=5.0)
    prepared = prepare(step, "100%", settings)
    prepared = replace(prepared, problem=replace(prepared.problem, min_offload_bytes=1024))
    planned = planned_by(with_budget(prepared, "60%", settings), settings, "offload_all")
    assert planned.timeline.d2h_bytes > 0
    for name, switch in SWITCHES.items():
        module = module_of(step, prepared.captured, planned, switch)
        make = lambda parameters: new_optimizer("sgd", parameters)  # noqa: E731
        eager = replace(step, model=copy.deepcopy(net))
        assert largest_difference(Trainer(eager, make), Trainer(step, make, module=module)) is None, name
        assert switch.timeline(planned, 1e10).step_s >= planned.timeline.step_s - 1e-12, name
        assert switch.about
