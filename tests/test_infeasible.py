"""What the message of exit code 3 says of the peak: every byte of it, whatever step it is at."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from golden_text import assert_golden
from hand_made import HAND_MADE, A
from offload_plans import drawn_plan, with_links
from strategies import random_problem
from test_plan_text import PROBLEM, planned

from actsolve.errors import InfeasibleBudget
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.infeasible import infeasible_budget, shortage_of
from actsolve.not_fitting import loaded_too_large
from actsolve.peak import bytes_at_peak, loss_values, peak_of
from actsolve.plan import Copies, Plan, Status
from actsolve.planned import Attempt
from actsolve.problem import Problem
from actsolve.schedule import build_schedule
from actsolve.settings import Settings
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
            largest = peak_of(there, StaticMemory(given=problem.static_bytes)).largest
            assert [v.size_bytes for v in largest] == sorted((v.size_bytes for v in largest), reverse=True)


def error_of(problem: Problem, static: StaticMemory, kept: frozenset[int], settings: Settings | None = None) -> InfeasibleBudget:
    """The error where that plan is the one of the smallest peak."""
    found = Plan("milp", kept)
    peak_bytes = timeline_of(problem, found).peak_bytes
    nothing = planned(found, problem)
    attempt = Attempt(
        target="hand-made",
        problem=problem,
        plan=Plan("milp", status=Status.INFEASIBLE),
        keep_all=nothing.keep_all,
        baselines=nothing.baselines,
        static=static,
    )
    shortage = shortage_of(problem, static, Reserve(), (peak_bytes, found), settings or Settings())
    return infeasible_budget(shortage, attempt)


EVERYTHING = frozenset(HAND_MADE.decidable)


def test_the_whole_message() -> None:
    """The text, and the same as JSON: the bytes by kind add up to the peak."""
    static = StaticMemory(parameters=1024, buffers=128, inputs=4096, optimizer_state=2048, gradients=1024)
    problem = replace(PROBLEM, budget_bytes=9000, static_bytes=static.total_bytes)
    error = error_of(problem, static, EVERYTHING, Settings(grads="accumulate"))
    content = error.attempt.as_json()
    shown = {key: content[key] for key in ("smallest_budget_bytes", "peak", "remedies")}
    assert_golden("infeasible.txt", f"{error}\n\n{json.dumps(shown, indent=1, allow_nan=False)}\n")
    by_kind = dict(content["peak"]["bytes"])
    static_kinds = by_kind.pop("static")
    assert sum(static_kinds.values()) + sum(by_kind.values()) == content["peak"]["peak_bytes"] == error.smallest_bytes


def test_the_values_of_a_loss() -> None:
    """What its ops read and make, and casts of that, forward and backward; nothing that is given, and no other softmax."""
    values = ("x", "h", "half", "logits", "log_p", "loss", "total", "g", "g_half", "gh")
    graph = Graph(
        (
            Op("mm", "aten.mm.default", Phase.FORWARD, (0,), (1,)),
            Op("softmax", "aten._softmax.default", Phase.FORWARD, (1,), (2,)),
            Op("cast", "aten._to_copy.default", Phase.FORWARD, (2,), (3,)),
            Op("ls", "aten._log_softmax.default", Phase.FORWARD, (3,), (4,)),
            Op("nll", "aten.nll_loss_forward.default", Phase.FORWARD, (4, 0), (5, 6)),
            Op("ls_b", "aten._log_softmax_backward_data.default", Phase.BACKWARD, (4,), (7,), replayable=False),
            Op("cast_b", "aten._to_copy.default", Phase.BACKWARD, (7,), (8,), replayable=False),
            Op("mm_b", "aten.mm.default", Phase.BACKWARD, (8,), (9,), replayable=False),
        ),
        tuple(
            Value(n, 8, Kind.INPUT if n == "x" else Kind.ACTIVATION, producer=None if n == "x" else p)
            for n, p in zip(values, (None, 0, 1, 2, 3, 4, 4, 5, 6, 7), strict=True)
        ),
        outputs=(5,),
        gradients=(9,),
    ).verify()
    names = {graph.values[v].name for v in loss_values(graph)}
    assert names == {"half", "logits", "log_p", "loss", "total", "g", "g_half"}


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
