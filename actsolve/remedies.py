"""What would help where nothing fits, each with the smallest budget that was found with it.

No remedy is named on suspicion: what it needs is what a plan takes in the simulator under it. The one exception is the loss in
chunks, which is another program: its figure is what would be needed if the loss's values took nothing, and it says "at best".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from actsolve.graph import Kind
from actsolve.links import Links
from actsolve.peak import LOGITS, bytes_at_peak, loss_values, values_at_peak
from actsolve.plan import Plan
from actsolve.plan_schedule import schedule_of
from actsolve.planners import smallest_budget
from actsolve.problem import Problem
from actsolve.remedy import Remedy
from actsolve.settings import Settings
from actsolve.simulate import Timeline, simulate
from actsolve.static_memory import Reserve, StaticMemory
from actsolve.units import format_bytes

SMALLER_BATCH = Remedy("a smaller batch")
_WORTHWHILE = 0.05  # of the peak: what lowers it by less is not worth naming, unless the budget is met with it
_SEARCH_S = 5.0
_ANY_LINKS = Links(25e9, 25e9)  # the least peak does not depend on their speed


@dataclass(frozen=True)
class Shortage:
    """A budget that nothing fits, and the smallest one that something does.

    Attributes:
        problem: What was planned for, within the budget that is too small.
        static: Its static memory by kind.
        reserve: What must stay free; more of it in a larger budget, if it is a share.
        settings: How it was planned.
        plan: The plan of the smallest peak.
        timeline: That plan, simulated within the smallest budget.
    """

    problem: Problem
    static: StaticMemory
    reserve: Reserve
    settings: Settings
    plan: Plan
    timeline: Timeline

    @property
    def budget_bytes(self) -> int:
        return self.problem.budget_bytes

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that a plan was found for."""
        return self.timeline.problem.budget_bytes

    @property
    def unreserved(self) -> Problem:
        """The problem without what must stay free, which is added to what is found."""
        return replace(self.problem, static_bytes=self.static.total_bytes - self.static.reserve)

    @property
    def fixed_bytes(self) -> int:
        """The budget that parameters, buffers, their gradients and the optimizer take, whatever the batch is."""
        static = self.static
        kept = static.given if static.given is not None else static.total_bytes - static.reserve - static.inputs
        gradients = sum(self.problem.graph.values[v].size_bytes for v in set(self.problem.graph.gradients))
        return self.reserve.budget_for(kept + gradients + self.problem.optimizer_bytes)


def remedies(shortage: Shortage) -> tuple[Remedy, ...]:
    """Return what would lower the smallest budget: first what fits, then what needs least.

    A smaller batch is named without a figure, where one could fit: what a batch needs takes a trace of its own
    (`actsolve.smaller_batch`). Nothing is named that lowers the need by less than 5% and does not fit either.
    """
    found = [r for r in _candidates(shortage) if r.needs_bytes is None or _is_worthwhile(shortage, r)]
    found.sort(key=lambda r: (not r.fits, r.needs_bytes or 0))
    if shortage.fixed_bytes <= shortage.budget_bytes:
        return (*found, SMALLER_BATCH)
    fixed = f"parameters, gradients and optimizer alone need {format_bytes(shortage.fixed_bytes)}, so no batch is small enough"
    return (*found, Remedy("a smaller model", note=fixed))


def _is_worthwhile(shortage: Shortage, remedy: Remedy) -> bool:
    assert remedy.needs_bytes is not None
    smallest_bytes = shortage.smallest_bytes
    return (remedy.fits and remedy.needs_bytes < smallest_bytes) or remedy.needs_bytes <= (1 - _WORTHWHILE) * smallest_bytes


def _candidates(shortage: Shortage) -> Iterator[Remedy]:
    yield from _loss_in_chunks(shortage)
    yield from _host_memory(shortage)
    static, settings = shortage.static, shortage.settings
    if static.given is None and static.optimizer_state:
        problem = replace(shortage.unreserved, optimizer_bytes=0)
        state = format_bytes(static.optimizer_state)
        name = f"{settings.optimizer}'s" if isinstance(settings.optimizer, str) else "its"
        note = f"it keeps no state; {name} takes {state}"
        yield _simulated(shortage, "--optimizer sgd", problem, static.optimizer_state, note)
    if static.given is None and static.gradients:
        note = f"the gradients that are there before the step take {format_bytes(static.gradients)}"
        yield _simulated(shortage, "--grads none", shortage.unreserved, static.gradients, note)


def _simulated(shortage: Shortage, what: str, problem: Problem, less_bytes: int, note: str) -> Remedy:
    """What the plan of the smallest peak needs if that many static bytes are not there."""
    problem = replace(problem, static_bytes=problem.static_bytes - less_bytes)
    return _remedy(shortage, what, simulate(problem, shortage.timeline.schedule).peak_bytes, note)


def _remedy(shortage: Shortage, what: str, peak_bytes: int, note: str = "", *, at_best: bool = False) -> Remedy:
    needs_bytes = shortage.reserve.budget_for(peak_bytes)
    return Remedy(what, needs_bytes, needs_bytes <= shortage.budget_bytes, note, at_best)


def _loss_in_chunks(shortage: Shortage) -> Iterator[Remedy]:
    """What is left of the peak where the values of the loss take nothing."""
    taken_bytes = bytes_at_peak(shortage.timeline).get(LOGITS, 0)
    if not taken_bytes:
        return
    graph = shortage.problem.graph
    loss = loss_values(graph)
    without = replace(graph, values=tuple(replace(v, size_bytes=0) if i in loss else v for i, v in enumerate(graph.values)))
    peak_bytes = simulate(replace(shortage.unreserved, graph=without), shortage.timeline.schedule).peak_bytes
    note = f"its values (logits) take {format_bytes(taken_bytes)} at the peak"
    yield _remedy(shortage, "the loss in chunks of the batch or sequence", peak_bytes, note, at_best=True)


def _host_memory(shortage: Shortage) -> Iterator[Remedy]:
    """What is needed with as much host memory as can be used: where no link is known, or where the host budget is what binds."""
    problem, settings = shortage.unreserved, shortage.settings
    refused = settings.host_budget_bytes == 0
    if problem.links is not None and problem.host_budget_bytes is None:
        return  # host memory has been used as far as it helps
    if problem.links is None and _idle_bytes(shortage.timeline) < _WORTHWHILE * shortage.timeline.peak_bytes:
        return
    problem = replace(problem, links=problem.links or _ANY_LINKS, host_budget_bytes=None)
    options = settings.planner_options()
    seeded = replace(options, time_limit_s=min(_SEARCH_S, options.time_limit_s), seeds=(shortage.plan,))
    peak_bytes, plan = smallest_budget(problem, seeded)
    host_bytes = simulate(problem, schedule_of(problem.graph, plan)).host_peak_bytes
    if not host_bytes:
        return
    if shortage.problem.links is not None or refused:
        what = f"--host-budget {host_bytes} ({format_bytes(host_bytes)})"
        yield _remedy(shortage, what, peak_bytes, "more of what is idle at the peak is offloaded")
    else:
        note = f"offloading {format_bytes(host_bytes)} to host memory"
        yield _remedy(shortage, "--h2d and --d2h, such as 25GB/s", peak_bytes, note)


def _idle_bytes(timeline: Timeline) -> int:
    """Bytes at the peak that could be on the host meanwhile: values that the op there does not read."""
    graph, steps = timeline.problem.graph, timeline.schedule.steps
    op = steps[timeline.peak_step].op if timeline.peak_step < len(steps) else None
    busy: set[int] = set() if op is None else {*graph.ops[op].inputs, *graph.ops[op].replay_inputs, *graph.ops[op].outputs}
    live = {v for v, _ in values_at_peak(timeline) if graph.values[v].kind is Kind.ACTIVATION}
    idle = live.intersection(graph.decidable) - busy
    return sum(graph.values[v].size_bytes for v in idle if graph.values[v].size_bytes >= timeline.problem.min_offload_bytes)
