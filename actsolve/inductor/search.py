"""The budget to plan for, so that what is measured is within the budget that was given.

Inductor fuses kernels, moves them and reuses their memory, so that the peak of a schedule of kernels is only an estimate of the
peak of what it makes of it. Here is the truth: plan, compile, measure, and plan for less or for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from actsolve.check import check
from actsolve.inductor.emit import emitted
from actsolve.inductor.late_replays import late
from actsolve.inductor.operand_copies import with_operand_copies
from actsolve.inductor.split import Split, split_of
from actsolve.inductor.torch_inductor import Modules, Partitioner, compiled
from actsolve.inductor.trial import Trial, trial
from actsolve.plan import Plan
from actsolve.planners import PlannerOptions, least_budget, plan
from actsolve.problem import Problem
from actsolve.simulate import Timeline, timeline_of

_CLOSE = 0.97  # of the budget: more is not worth another round
_LESS = 0.985  # of a planned budget that missed, besides what it missed by: plans come in steps
_STEP = 0.01  # of a planned budget: as little says nothing
_PLANS_PER_ROUND = 3  # some turn out to be plans that were measured before


@dataclass(frozen=True)
class Round:
    """One plan that was compiled and measured.

    Attributes:
        plan: The plan.
        timeline: What the simulator says of it.
        trial: What was measured.
        function: The compiled step.
    """

    plan: Plan
    timeline: Timeline
    trial: Trial
    function: Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """A graph of torch.compile's that is to be trained.

    Attributes:
        module: The graph.
        inputs: Its inputs.
        split: How Inductor splits it.
        problem: Its kernels and their costs; what a plan may take is set per round.
        options: Of Inductor.
        key: What else than the plan a compiled step depends on.
        copies: Whether the copies that Inductor makes of convolutions' weights are nodes (`with_operand_copies`).
    """

    module: torch.fx.GraphModule
    inputs: Sequence[Any]
    split: Split
    problem: Problem
    options: dict[str, Any]
    key: str
    copies: bool = False

    def run_smallest(self, options: PlannerOptions) -> Round:
        """Compile and measure the plan of the smallest peak that is found."""
        _, found = least_budget(self.problem, options)
        return self.run(found, late(self.problem, found))

    def run(self, found: Plan, timeline: Timeline) -> Round:
        """Compile and measure a plan, in the order of ``timeline``."""
        check(replace(self.problem, budget_bytes=timeline.peak_bytes), timeline.schedule)

        def partition(_: torch.fx.GraphModule, stock: Callable[[], Modules], n_outputs: int) -> Modules:
            split = split_of(*(with_operand_copies(*stock(), n_outputs) if self.copies else stock()), n_outputs)
            assert split.graph.fingerprint == self.split.graph.fingerprint, "torch traces the same graph in two ways"
            return emitted(split, timeline.schedule)

        key = f"{self.key} {self.split.graph.fingerprint} {[(s.kind.value, s.op, s.value) for s in timeline.schedule.steps]}"
        function = compiled(self.module, self.inputs, Partitioner(partition, key), self.options)
        return Round(found, timeline, trial(function, self.inputs), function)


def rounds_of(steps: Sequence[Step], budget_bytes: int, stock: Trial | None, options: PlannerOptions, most: int) -> list[Round]:
    """Return rounds of ``steps``, ways to see one graph, the best of all last: the next is looked at where none serves."""
    rounds: list[Round] = []
    for step in steps:
        rounds += rounds_within(step, budget_bytes, stock, options, most)
        rounds.sort(key=lambda r: _rank(r, budget_bytes, stock), reverse=True)
        if needed(rounds[-1].trial, step.problem) <= budget_bytes and _is_exact(rounds[-1], stock):
            break
    return rounds


def rounds_within(step: Step, budget_bytes: int, stock: Trial | None, options: PlannerOptions, most: int) -> list[Round]:
    """Return rounds for plans that take at most ``budget_bytes`` above static memory when they are run, the best of them last.

    If none does, the last one is that of the smallest peak.

    Args:
        step: What to compile.
        budget_bytes: What may be allocated at once above static memory.
        stock: What Inductor's own step took, if it could be run.
        options: For the planner.
        most: How many plans to try; if none of them fits, the smallest that is found is tried too.
    """
    problem = step.problem
    predicted = timeline_of(problem, plan(problem, "keep_all")).peak_bytes
    low, high = 0, predicted  # planned budgets: the largest known to fit, the smallest known not to
    aim = budget_bytes if stock is None else int(budget_bytes * predicted / needed(stock, problem))
    rounds: list[Round] = []
    smallest = False  # whether the last one that was run is the smallest plan
    for _ in range(_PLANS_PER_ROUND * most):
        found = plan(replace(problem, budget_bytes=aim), "milp", replace(options, seeds=tuple(r.plan for r in rounds)))
        smallest = not found.found
        if smallest:
            aim, found = least_budget(problem, options)
        timeline = late(problem, found, aim)
        known = next((r for r in rounds if r.timeline.schedule == timeline.schedule), None)
        if known is None:
            if len(rounds) == most:
                break
            known = step.run(found, timeline)
            rounds.append(known)
        share = budget_bytes / needed(known.trial, problem)
        serves = share >= 1 and _is_exact(known, stock)
        if serves:
            low = max(low, aim)
        else:
            high = min(high, aim)
        if (serves and share * _CLOSE <= 1) or (smallest and share < 1) or high - low <= _STEP * high:
            break
        aim = int(aim * share) if serves else int(aim * min(share, 1.0) * _LESS)
        if not low < aim < high:
            aim = (low + high) // 2
    if not smallest and not any(needed(r.trial, problem) <= budget_bytes for r in rounds):
        rounds.append(step.run_smallest(options))
    return sorted(rounds, key=lambda r: _rank(r, budget_bytes, stock), reverse=True)


def _is_exact(one: Round, stock: Trial | None) -> bool:
    return stock is None or one.trial.difference(stock) is None


def needed(measured: Trial, problem: Problem) -> int:
    """Return the most that a step takes above static memory, the optimizer's step included."""
    return max(measured.peak_bytes, measured.end_bytes + problem.optimizer_bytes)


def _rank(one: Round, budget_bytes: int, stock: Trial | None) -> tuple[bool, bool, float]:
    """What fits comes first: what is bit for bit Inductor's own before what is not, then by time. What does not fit, by peak."""
    size_bytes = needed(one.trial, one.timeline.problem)
    fits = size_bytes <= budget_bytes
    return not fits, fits and not _is_exact(one, stock), one.timeline.extra_s if fits else size_bytes
