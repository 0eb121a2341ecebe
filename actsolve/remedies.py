"""What would help where nothing fits, each with the smallest budget that was found with it.

No remedy is named on suspicion: what it needs is what a plan takes in the simulator under it. The one exception is the loss in
chunks, which is another program: its figure is what would be needed if the loss's values took nothing, and it says "at best".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

from actsolve.graph import Graph, Kind
from actsolve.links import Links
from actsolve.peak import LOGITS, bytes_at_peak, loss_values, values_at_peak
from actsolve.plan import Plan
from actsolve.planners import smallest_budget
from actsolve.problem import Problem
from actsolve.remedy import Remedy
from actsolve.settings import Settings
from actsolve.simulate import Timeline, simulate, timeline_of
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
    """Everything that may help; if nothing is enough alone, also the changes together, if they are."""
    changes = [c for c in (_loss_in_chunks(shortage), _stateless_optimizer(shortage)) if c is not None]
    alone = [c.remedy(shortage) for c in changes]
    alone += [*_host_memory(shortage), *_without_pins(shortage), *_without_reserve(shortage)]
    yield from alone
    worthwhile = [c for c in changes if _is_worthwhile(shortage, c.remedy(shortage))]
    if len(worthwhile) > 1 and not any(r.fits for r in alone):
        together = reduce(_Change.__add__, worthwhile).remedy(shortage)
        if together.fits:
            yield together


@dataclass(frozen=True)
class _Change:
    """Something other than a plan that lowers the peak: the plan of the smallest peak is simulated with it.

    Attributes:
        what: As in `Remedy`.
        note: As in `Remedy`.
        static_bytes: Static bytes that are not there with it.
        stateless: Whether the optimizer's temporaries are not there either.
        no_loss: Whether the values of the loss take nothing, which is the best that chunks of it can do.
    """

    what: str
    note: str = ""
    static_bytes: int = 0
    stateless: bool = False
    no_loss: bool = False

    def __add__(self, other: _Change) -> _Change:
        static_bytes, stateless = self.static_bytes + other.static_bytes, self.stateless or other.stateless
        return _Change(f"{self.what} together with {other.what}", "", static_bytes, stateless, self.no_loss or other.no_loss)

    def remedy(self, shortage: Shortage) -> Remedy:
        """Return it with what is needed then."""
        problem = shortage.unreserved
        problem = replace(problem, static_bytes=problem.static_bytes - self.static_bytes)
        if self.stateless:
            problem = replace(problem, optimizer_bytes=0)
        if self.no_loss:
            problem = replace(problem, graph=_without_loss(problem.graph))
        peak_bytes = simulate(problem, shortage.timeline.schedule).peak_bytes
        return _remedy(shortage, self.what, peak_bytes, self.note, at_best=self.no_loss)


def _remedy(shortage: Shortage, what: str, peak_bytes: int, note: str = "", *, at_best: bool = False) -> Remedy:
    needs_bytes = shortage.reserve.budget_for(peak_bytes)
    return Remedy(what, needs_bytes, needs_bytes <= shortage.budget_bytes, note, at_best)


def _loss_in_chunks(shortage: Shortage) -> _Change | None:
    taken_bytes = bytes_at_peak(shortage.timeline).get(LOGITS, 0)
    if not taken_bytes:
        return None
    note = f"its values (logits) take {format_bytes(taken_bytes)} at the peak"
    return _Change("the loss in chunks of the batch or sequence", note, no_loss=True)


def _without_loss(graph: Graph) -> Graph:
    """The graph, the values of whose loss take nothing."""
    loss = loss_values(graph)
    return replace(graph, values=tuple(replace(v, size_bytes=0) if i in loss else v for i, v in enumerate(graph.values)))


def _stateless_optimizer(shortage: Shortage) -> _Change | None:
    static, optimizer = shortage.static, shortage.settings.optimizer
    if static.given is not None or not static.optimizer_state:
        return None
    name = f"{optimizer}'s" if isinstance(optimizer, str) else f"that of {type(optimizer).__name__}"
    note = f"it keeps no state; {name} takes {format_bytes(static.optimizer_state)}"
    return _Change("--optimizer sgd", note, static.optimizer_state, stateless=True)


def _host_memory(shortage: Shortage) -> Iterator[Remedy]:
    """What is needed with as much host memory as can be used: where no link is known, or where the host budget is what binds."""
    problem, settings = shortage.unreserved, shortage.settings
    refused = settings.host_budget_bytes == 0
    if problem.links is not None and problem.host_budget_bytes is None:
        return  # host memory has been used as far as it helps
    if problem.links is None and _idle_bytes(shortage.timeline) < _WORTHWHILE * shortage.timeline.peak_bytes:
        return
    problem = replace(problem, links=problem.links or _ANY_LINKS, host_budget_bytes=None)
    peak_bytes, plan = _smallest(problem, settings, shortage.plan)
    host_bytes = timeline_of(problem, plan).host_peak_bytes
    if not host_bytes:
        return
    if shortage.problem.links is not None or refused:
        what = f"--host-budget {host_bytes} ({format_bytes(host_bytes)})"
        note = "more of what is idle at the peak is offloaded"
        if refused and settings.h2d is None and settings.d2h is None:
            note += ", if a speed of the link is known: --h2d and --d2h give it"
        yield _remedy(shortage, what, peak_bytes, note)
    else:
        note = f"offloading {format_bytes(host_bytes)} to host memory"
        yield _remedy(shortage, "--h2d and --d2h, such as 25GB/s", peak_bytes, note)


def _without_pins(shortage: Shortage) -> Iterator[Remedy]:
    """What is needed where the planner decides about all modules."""
    settings = shortage.settings
    if settings.pinned:
        free = replace(shortage.unreserved, pinned_keep=frozenset(), pinned_recompute=frozenset())
        peak_bytes, _ = _smallest(free, settings)
        flags = settings.pinned.replace(" and ", " and --")
        yield _remedy(shortage, f"no --{flags}", peak_bytes, "the planner then decides about these modules too")


def _smallest(problem: Problem, settings: Settings, *seeds: Plan) -> tuple[int, Plan]:
    """Return the smallest budget found in a few seconds, and its plan."""
    options = settings.planner_options()
    return smallest_budget(problem, replace(options, time_limit_s=min(_SEARCH_S, options.time_limit_s), seeds=seeds))


def _without_reserve(shortage: Shortage) -> Iterator[Remedy]:
    """What is needed where nothing is left free, if the user has asked for that."""
    if shortage.settings.reserve_bytes:
        peak_bytes = shortage.timeline.peak_bytes - shortage.timeline.problem.static_bytes + shortage.unreserved.static_bytes
        note = f"{format_bytes(shortage.settings.reserve_bytes)} are left free"
        yield Remedy("a smaller --reserve", peak_bytes, peak_bytes <= shortage.budget_bytes, note, at_best=True)


def _idle_bytes(timeline: Timeline) -> int:
    """Bytes at the peak that could be on the host meanwhile: values that the op there does not read."""
    graph, steps = timeline.problem.graph, timeline.schedule.steps
    op = steps[timeline.peak_step].op if timeline.peak_step < len(steps) else None
    busy: set[int] = set() if op is None else {*graph.ops[op].inputs, *graph.ops[op].replay_inputs, *graph.ops[op].outputs}
    live = {v for v, _ in values_at_peak(timeline) if graph.values[v].kind is Kind.ACTIVATION}
    idle = live.intersection(graph.decidable) - busy
    return sum(graph.values[v].size_bytes for v in idle if graph.values[v].size_bytes >= timeline.problem.min_offload_bytes)
