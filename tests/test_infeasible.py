"""What the message of exit code 3 says of the peak: every byte of it, whatever step it is at."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hand_made import HAND_MADE, A
from offload_plans import drawn_plan, with_links
from strategies import random_problem
from test_plan_text import PROBLEM

from actsolve.infeasible import bytes_at_peak, infeasible_budget, loaded_too_large
from actsolve.plan import Copies, Plan, Status
from actsolve.problem import Problem
from actsolve.schedule import build_schedule
from actsolve.simulate import Timeline, simulate
from actsolve.static_memory import Reserve, StaticMemory


def timeline_of(problem: Problem, plan: Plan) -> Timeline:
    return simulate(problem, build_schedule(problem.graph, plan.kept, plan.early, plan.offloaded))


@pytest.mark.parametrize("seed", range(40))
def test_the_kinds_add_up_at_every_step(seed: int) -> None:
    """As if the peak were there: at a run, at a free, at a copy and at the optimizer's step."""
    problem = with_links(random_problem(seed))
    for plan in (drawn_plan(problem, random.Random(seed)), Plan("keep_all", frozenset(problem.graph.decidable))):
        timeline = timeline_of(problem, plan)
        for index, memory_bytes in enumerate(timeline.memory_bytes):
            elsewhere = (-1,) * len(timeline.memory_bytes)
            there = replace(timeline, memory_bytes=(*elsewhere[:index], memory_bytes, *elsewhere[index + 1 :]))
            assert problem.static_bytes + sum(bytes_at_peak(there).values()) == memory_bytes == there.peak_bytes


def test_host_memory_is_named_where_it_would_help() -> None:
    """Where large values are live at the peak that the op there does not read, and no link has been looked at."""

    def message(problem: Problem) -> str:
        keep_all = Plan("keep_all", frozenset(HAND_MADE.decidable))
        nothing = Plan("milp", status=Status.INFEASIBLE)
        return str(infeasible_budget(problem, nothing, StaticMemory(given=7000), Reserve(), (50_000, keep_all), 60.0))

    tight = replace(PROBLEM, budget_bytes=9000, min_offload_bytes=1)
    assert "the smallest found to work; or offloading to host memory, with --h2d and --d2h, or a smaller batch" in message(tight)
    for other in (with_links(tight), replace(tight, min_offload_bytes=1 << 20)):
        assert "the smallest found to work; or a smaller batch" in message(other)


def test_a_loaded_plan_that_takes_too_much_of_the_host() -> None:
    problem = replace(with_links(PROBLEM), host_budget_bytes=4095)
    offloaded = {A: Copies(free_at=2, back_at=7)}
    timeline = timeline_of(problem, Plan("x", frozenset(HAND_MADE.decidable) - {A}, offloaded=offloaded))
    assert not timeline.fits and timeline.peak_bytes <= problem.budget_bytes
    assert str(loaded_too_large(timeline, StaticMemory())) == (
        "InfeasibleBudget: the loaded plan does not fit 4.00 KiB (4095 bytes) of host memory here\n"
        "  why    it offloads 4.00 KiB\n"
        "  try    --host-budget 4096 if that much can be had, or plan again here"
    )
