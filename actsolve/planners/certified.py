"""Keep, recompute or offload, as fast as can be, with proofs: the planner that users get.

Where nothing can be offloaded, the program over segments (`dag_search`) goes first: it lets every op run again any number of
times, and its bound is that of every schedule. Mostly it ends within seconds, with a schedule that meets it. What is left of
the time goes to replay windows (`milp`) and to the search around the best. Where values can be offloaded, the windows plan;
what only recomputes is one of the plans that theirs has to beat.

Replays in the forward make that program larger, and are seldom of use. So they are looked at last, and in large graphs only
where nothing fits without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from actsolve.check import check
from actsolve.dag import dag_of
from actsolve.plan import Plan, Status
from actsolve.planners.chen_greedy import chen_greedy
from actsolve.planners.dag_search import DagSearch, too_large
from actsolve.planners.greedy import greedy
from actsolve.planners.keep_all import keep_all
from actsolve.planners.milp import check_pins, milp
from actsolve.planners.one_pass import status_of
from actsolve.planners.options import PlannerOptions
from actsolve.planners.rotor import rotor
from actsolve.planners.selective import selective
from actsolve.planners.sequence import Ints, Sequence
from actsolve.planners.torch_budget import torch_budget
from actsolve.planners.treeverse import treeverse
from actsolve.problem import Problem
from actsolve.replays import replays_in_forward, replays_of, saved_by
from actsolve.schedule import Schedule, StepKind
from actsolve.simulate import Timeline, timeline_of

_SEGMENTS = 0.4  # of the time limit: for the program over segments, before the windows
_WINDOWS = 0.35  # and for these
_ASIDE = 0.2  # and for what only recomputes, where values can be offloaded,
_OFFLOADED = 0.75  # and then for the windows
_LARGE = 1000  # ops: there the windows are the quicker of the two, and go first
_AT_LEAST_S = 2.0
_ANYWHERE = 200  # ops: up to there replays in the forward are looked at in any case
_IN_DOUBT = 0.15  # of the time limit, where neither a plan nor a proof was found; and for replays in the forward
_ALSO_PROVE = 0.7  # of that: mostly the proof that nothing fits is quicker there
_CLOSE = 0.02  # of the extra time: a proof on all schedules so near is worth that of the windows
_COLUMNS = 150_000  # a program over segments that would be larger is not begun
_TOO_MANY = 10_000  # ops for the greedy planner, which takes minutes on 20,000
_EPSILON_S = 1e-9

Rule = Callable[[Problem, PlannerOptions], Plan]


def certified(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that takes the least time within the budget, to within the gap, and what is proven of it.

    `Plan.bound_s` holds for the plans of the class that the plan is of; `Plan.global_bound_s` for every schedule with these first
    runs that offloads nothing, or of these only for those that replay in the backward (`Plan.bounds_forward`).

    Raises:
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    check_pins(problem)
    return _certified(problem, options or PlannerOptions(), _slower_rules(problem))


def _certified(problem: Problem, options: PlannerOptions, rules: Iterable[Rule]) -> Plan:
    """Return the plan; ``rules`` are looked at where nothing is proven."""
    best = _Best(problem, options)
    if best.keeps_all:  # no schedule takes less
        return replace(milp(problem, options), global_bound_s=0.0, bounds_forward=True)
    if reason := _impossible(problem):
        return Plan("milp", status=Status.INFEASIBLE, note=reason)
    for seed in (*options.seeds, *_seeds(problem, options)):
        best.take(_unproven(seed))
    try:
        if problem.pinned_recompute:  # the program over segments knows no such pins
            best.take(_windows(best, 1.0))
        elif problem.offloadable:
            _only_recompute(best)
        else:
            _prove(best)
        if best.result().status in (Status.FEASIBLE, Status.UNKNOWN):
            for rule in rules:
                best.take(_unproven(rule(problem, options)))
    except KeyboardInterrupt:  # between two solves: the solver itself returns what it has
        if best.plan is None:
            raise
        best.interrupted = True
    return best.result()


def _impossible(problem: Problem) -> str:
    """Return why no schedule can fit, whatever it replays or offloads, where that is plain; else nothing."""
    dag = dag_of(problem, anywhere=True)
    if problem.static_bytes + sum(dag.sizes[v] for v in dag.held) + problem.optimizer_bytes > problem.budget_bytes:
        return "what the caller holds, and the optimizer's step, alone need more"
    return too_large(dag)


def _unproven(plan: Plan) -> Plan:
    """Return ``plan`` without what was proven of it, and without how it was found: for another problem."""
    if not plan.found:
        return plan
    return replace(plan, bound_s=None, global_bound_s=None, bounds_forward=False, earlier_s=None, interrupted=False)


def _seeds(problem: Problem, options: PlannerOptions) -> Iterable[Plan]:
    """Baselines that are quick and that windows know nothing of: they run ops again more than once."""
    honoured = not problem.pinned_keep and not problem.pinned_recompute
    quick = (rotor, selective) if len(problem.graph.ops) > _TOO_MANY else (rotor, greedy, selective)
    return (b(problem, options) for b in quick) if honoured else ()


def _slower_rules(problem: Problem) -> tuple[Rule, ...]:
    """Baselines that take seconds on a large model: looked at where nothing is proven, so that none of them is ever better."""
    return () if problem.pinned_keep or problem.pinned_recompute else (chen_greedy, treeverse, torch_budget)


class _Best:
    """The best plan so far, as simulated, and what was proven."""

    def __init__(self, problem: Problem, options: PlannerOptions) -> None:
        self.problem, self.options = problem, options
        self.begin = time.perf_counter()
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self.nothing = Plan("milp", status=Status.UNKNOWN)  # what is said where no plan is found
        self.global_bound_s: float | None = None
        self.bounds_forward = False
        self.interrupted = False
        whole = timeline_of(problem, keep_all(problem))
        self.keeps_all = whole.fits and whole.extra_s < _EPSILON_S

    @property
    def replays_in_forward(self) -> bool:
        """Whether the best plan does."""
        return self.plan is not None and replays_in_forward(self.problem.graph, self.plan)

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until a share of the time limit has passed."""
        return max(0.0, self.begin + share * self.options.time_limit_s - time.perf_counter())

    def take(self, plan: Plan) -> None:
        """Keep ``plan`` if it fits, honours the pins, and is the best."""
        self.interrupted |= plan.interrupted
        if not plan.found:
            if plan.planner == "milp":
                self.nothing = plan
            return
        if plan.synchronous or plan.kept & self.problem.pinned_recompute or not self.problem.pinned_keep <= plan.kept:
            return
        timeline = timeline_of(self.problem, plan)
        if timeline.fits and (self.timeline is None or timeline.extra_s < self.timeline.extra_s - _EPSILON_S):
            self.plan, self.timeline = replace(plan, planner="milp", note=""), timeline

    def result(self) -> Plan:
        """The best plan with its bounds and what they prove."""
        if self.plan is None or self.timeline is None:
            found = replace(self.nothing, global_bound_s=self.global_bound_s, bounds_forward=self.bounds_forward)
            return replace(found, interrupted=self.interrupted)
        extra_s = self.timeline.extra_s
        check(self.problem, self.timeline.schedule)
        overall = self.global_bound_s
        # What runs ops again more than once is of no class but that of all schedules.
        bound = overall if self.plan.replays is not None else self.plan.bound_s
        if bound is not None and overall is not None:
            bound = max(bound, overall)
        if bound is not None and bound > extra_s * (1 + self.options.gap) + _EPSILON_S:
            bound = None
        bound = None if bound is None else min(bound, extra_s)
        overall = None if overall is None else min(overall, extra_s)
        status = status_of(self.problem, self.options, extra_s, bound)
        found = replace(self.plan, status=status, bound_s=bound, global_bound_s=overall, bounds_forward=self.bounds_forward)
        return replace(found, interrupted=self.interrupted)


def _windows(best: _Best, share: float) -> Plan:
    """Return the plan of the windows, begun from the best plan so far."""
    seeds = best.options.seeds if best.plan is None else (*best.options.seeds, best.plan)
    seeds = tuple(s for s in seeds if s.replays is None)
    found = milp(best.problem, replace(best.options, time_limit_s=max(0.1, best.left_s(share)), seeds=seeds))
    if found.status is Status.INFEASIBLE:  # of the windows' class, which is not all that there is
        return replace(found, status=Status.UNKNOWN, note="nothing fits that replays each op once")
    return found


def _only_recompute(best: _Best) -> None:
    """Take the best plan that offloads nothing, and that of the windows; what time is left goes to the former.

    It is one of the plans that may offload: to allow that must not cost time.
    """
    problem = replace(best.problem, links=None, host_budget_bytes=None)
    search = _search(problem, best, best.left_s(_ASIDE))
    if search is not None and not search.infeasible:
        search.prove(1.0)
        if search.best is not None:
            best.take(plan_of(problem, search.best))
        if search.interrupted:
            best.interrupted = True
            return
    plan = _windows(best, _OFFLOADED)
    best.take(plan)
    left_s = min(best.left_s(), (1 - _OFFLOADED) * best.options.time_limit_s)
    if plan.status is not Status.OPTIMAL and left_s > 0:
        known = best.options.seeds if best.plan is None else (*best.options.seeds, best.plan)
        seeds = tuple(seed for seed in known if not seed.offloaded)
        alone = _certified(problem, replace(best.options, time_limit_s=left_s, seeds=seeds), ())  # the rules are still to come
        best.interrupted |= alone.interrupted
        if alone.found:  # what was proven without links, be it that nothing fits, says nothing here
            best.take(_unproven(alone))


def _prove(best: _Best) -> None:
    """Search for the best plan that recomputes, and for a bound on all.

    What replays in the forward comes last: its program is larger, so the best plan of the others helps, and often it is the best.
    """
    in_forward = best.replays_in_forward  # as given: at the smallest budget, perhaps nothing else fits
    search = _searched(best, anywhere=in_forward)
    if search is None:
        best.take(_windows(best, 1.0))
        return
    _conclude(best, search)
    if in_forward or search.interrupted or (len(best.problem.graph.ops) > _ANYWHERE and best.plan is not None):
        return
    also = _search(best.problem, best, min(best.left_s(), _IN_DOUBT * best.options.time_limit_s), anywhere=True)
    if also is not None:
        also.prove(_ALSO_PROVE if best.plan is None else 1.0)
        also.run()
        _conclude(best, also)


def _searched(best: _Best, *, anywhere: bool) -> DagSearch | None:
    """Return a search from the best plan, and windows in between, that has ended; None where its program would be too large.

    Once a plan is optimal in the class of the windows, what is left is whether others are better: that gets half as long again.
    """
    problem = best.problem
    search = _search(problem, best, best.left_s(), anywhere=anywhere)
    if search is None:
        return None
    if len(problem.graph.ops) <= _LARGE and not search.infeasible:
        search.prove(_SEGMENTS if best.plan is not None else _IN_DOUBT)
    if search.done:
        return search
    plan = _windows(best, _SEGMENTS + _WINDOWS)
    best.take(plan)
    _begin_from_best(search, best)
    if plan.status is Status.OPTIMAL:
        spent_s = best.options.time_limit_s - best.left_s()
        search.prove(min(1.0, (1.5 * spent_s + _AT_LEAST_S) / best.options.time_limit_s))
    else:
        if best.plan is None:  # a budget that nothing fits, perhaps: who asks wants to know soon
            search.deadline = min(search.deadline, time.perf_counter() + _IN_DOUBT * best.options.time_limit_s)
        search.run()
    return search


def _conclude(best: _Best, search: DagSearch) -> None:
    """Take what ``search`` found, and what it proved."""
    anywhere = search.dag.replays_in_forward
    best.interrupted |= search.interrupted
    if search.infeasible:
        unknown = Plan("milp", status=Status.UNKNOWN, note="nothing fits that replays in the backward alone")
        best.nothing = Plan("milp", status=Status.INFEASIBLE, note=search.infeasible) if anywhere else unknown
        return
    if search.best is not None:
        extra_s = search.best.extra_time
        proven = best.plan is not None and best.plan.status is Status.OPTIMAL and best.timeline is not None
        # A hair's breadth is not worth the loss of a proof: that of the windows does not hold for what replays more often.
        slower_s = best.timeline.extra_s if proven and best.timeline is not None else float("inf")
        if extra_s < slower_s * (1 - best.options.gap) or search.bound > (1 - _CLOSE) * extra_s:
            best.take(plan_of(best.problem, search.best))
    if not anywhere or best.replays_in_forward or search.bound >= (1 - best.options.gap) * (best.global_bound_s or 0.0):
        best.global_bound_s, best.bounds_forward = search.bound, anywhere  # on more schedules, if it is as high


def _search(problem: Problem, best: _Best, time_limit_s: float, *, anywhere: bool = False) -> DagSearch | None:
    """Return a search that begins with the best plan, or None where the program would be too large."""
    dag = dag_of(problem, anywhere=anywhere)
    search = DagSearch(dag, replace(best.options, time_limit_s=time_limit_s))
    search.take(search.runner.run(np.arange(dag.n_nodes)))
    if search.columns() > _COLUMNS:
        return None
    _begin_from_best(search, best)
    return search


def _begin_from_best(search: DagSearch, best: _Best) -> None:
    """Let ``search`` take the best plan, if that is one of the schedules that it is a search among."""
    if best.timeline is not None and not best.timeline.copies and (search.dag.replays_in_forward or not best.replays_in_forward):
        search.take(search.runner.run(nodes_of(best.problem, best.timeline.schedule)))


def nodes_of(problem: Problem, schedule: Schedule) -> Ints:
    """Return the runs of ``schedule`` as nodes of `dag_of`: optional ops that it leaves out run, too."""
    nodes: list[int] = []
    next_op = 0
    for step in schedule.steps:
        if step.kind is StepKind.COMPUTE and step.op is not None:
            nodes += range(next_op, step.op + 1)
            next_op = step.op + 1
        elif step.kind is StepKind.REPLAY and step.op is not None:
            nodes.append(step.op)
    return np.array(nodes, dtype=np.int64)


def plan_of(problem: Problem, sequence: Sequence) -> Plan:
    """Return the plan that replays as ``sequence`` does."""
    kinds = (StepKind.COMPUTE, StepKind.REPLAY)
    runs = [(kinds[again], node) for node, again in zip(sequence.nodes.tolist(), sequence.again.tolist(), strict=True)]
    replays = replays_of(problem.graph, runs)
    return Plan("milp", saved_by(problem.graph, replays), replays=replays)
