"""What the planner claims is proven, and over what, where it would be easy to claim too much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from all_schedules import ANYWHERE, cheapest
from strategies import random_problem

from actsolve.check import check
from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op, Phase, Value
from actsolve.links import Links
from actsolve.plan import Plan, Status
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PlannerOptions, plan
from actsolve.planners.certified import certified
from actsolve.planners.milp import milp
from actsolve.problem import Costs, Problem
from actsolve.simulate import timeline_of

BRIEF = PlannerOptions(time_limit_s=2.0)


def test_what_was_proven_of_a_seed_is_not_proven_of_another_budget() -> None:
    """A plan of a smaller budget is optimal there, and not where there is more room; without time nothing else is found."""
    problem = random_problem(5, 6)
    small, large = (replace(problem, budget_bytes=budget) for budget in (37, 40))
    seed = milp(small, BRIEF)
    assert seed.status is Status.OPTIMAL
    found = plan(large, "milp", PlannerOptions(time_limit_s=0.0, seeds=(seed,)))
    least = cheapest(large, ANYWHERE)
    assert least is not None and least.extra_s < timeline_of(small, seed).extra_s
    assert found.bound_s is None or found.bound_s <= least.extra_s + 1e-9


def test_what_was_proven_without_links_is_not_proven_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows that may offload ran out of time: what is left is the plan that only recomputes, without its proof."""
    problem = random_problem(51, 6)
    alone = plan(problem, "milp", BRIEF)
    assert alone.status is Status.OPTIMAL and timeline_of(problem, alone).extra_s > 0
    linked = replace(problem, links=Links(1e5, 1e5), min_offload_bytes=1)
    module = certified.__globals__
    windows = module["_windows"]
    nothing = Plan("milp", status=Status.UNKNOWN)
    monkeypatch.setitem(module, "_windows", lambda best, share: nothing if best.problem.offloadable else windows(best, share))
    monkeypatch.setitem(module, "_search", lambda *_, **__: None)  # as where its program would be too large
    found = plan(linked, "milp", BRIEF)
    assert found.found and found.bound_s is None and found.global_bound_s is None and found.status is Status.FEASIBLE


def test_nothing_is_called_infeasible_that_only_the_windows_cannot_do() -> None:
    """With a pin, what runs an op twice is not looked for."""
    problem = replace(random_problem(22, 6), budget_bytes=27, pinned_recompute=frozenset({3}))
    by_hand = schedule_of(problem.graph, Plan("by hand", replays={9: (1, 2)}))
    assert check(problem, by_hand) <= 27
    assert plan(problem, "milp", BRIEF).status is not Status.INFEASIBLE


def test_a_state_that_nobody_reads_takes_nothing() -> None:
    """The op that saves an RNG state runs only where a replay reads it: 20 bytes do not count where none does."""
    forward, backward, kind = Phase.FORWARD, Phase.BACKWARD, Kind.ACTIVATION
    sizes = ((1, 0), (20, 1), (1, 2), (6, 3), (6, 4), (1, 5), (1, 6), (1, 7))
    values = (Value("in", 0, Kind.INPUT, None), *(Value(f"v{p}", size, kind, p) for size, p in sizes))
    ops = (
        Op("a", "a", forward, (0,), (1,)),
        Op("rng", RNG_STATE_TARGET, forward, (), (2,), replayable=False, optional=True, why_not="it reads the generator"),
        Op("drop", "d", forward, (1,), (3,), replay_inputs=(2,), random=True),
        Op("b", "b", forward, (3,), (4,)),
        Op("c", "c", forward, (3,), (5,)),
        Op("gc", "gc", backward, (5,), (6,), replayable=False),
        Op("gb", "gb", backward, (4, 6), (7,), replayable=False),
        Op("ga", "ga", backward, (3, 7), (8,), replayable=False),
    )
    graph, seconds = Graph(ops, values, (), (8,)).verify(), (1.0, 0.0, *(1.0,) * 6)
    found = 0
    for budget in range(8, 16):
        for pins in (frozenset[int](), frozenset({3})):
            problem = Problem(graph, Costs(seconds, seconds, (0,) * 8), budget, pinned_keep=pins)
            planned, least = plan(problem, "milp", BRIEF), cheapest(problem, ANYWHERE)
            if least is not None and not pins:
                assert planned.global_bound_s is None or planned.global_bound_s <= least.extra_s + 1e-9
                assert planned.found and timeline_of(problem, planned).extra_s == pytest.approx(least.extra_s)
            windows = plan(problem, "sqrt_l")
            if windows.found and timeline_of(problem, windows).fits:
                assert planned.status is not Status.INFEASIBLE
            found += planned.found
    assert found > 8


def test_no_baseline_is_ever_better_though_there_is_no_time() -> None:
    """Also those that are slow, and not begun from; PyTorch's own where there is a traced model to ask."""
    better = 0
    for seed in range(40):
        problem = random_problem(seed, 7)
        options = PlannerOptions(time_limit_s=0.0, torch_saved=lambda share, p=problem: frozenset(sorted(p.graph.decidable)[1:]))
        ours = plan(problem, "milp", options)
        for name in ("chen_greedy", "treeverse", "torch_budget", "rotor", "greedy", "sqrt_l", "per_layer"):
            other = plan(problem, name, options)
            if other.found and (timeline := timeline_of(problem, other)).fits:
                assert ours.found and timeline_of(problem, ours).extra_s <= timeline.extra_s + 1e-9, (seed, name)
                better += timeline_of(problem, ours).extra_s < timeline.extra_s - 1e-9
    assert better > 10
