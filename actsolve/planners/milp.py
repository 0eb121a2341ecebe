"""Keep, recompute or offload, by mixed-integer programming over replay windows and slots of a link, with a proven gap.

The steps: the baselines and keep-all first; where values can be offloaded, the best plans that only recompute, or only offload;
the MILP (`milp_rows`, `moments`, `slots`), seeded with the best of these that fits; the exact schedule of what it decides; and
an exact local improvement. The rows are conservative, so what is returned may be a little better than the solver believes,
never worse than the best baseline, and never over budget.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from functools import partial

from actsolve.errors import UsageError
from actsolve.plan import Plan, Status
from actsolve.planners.improve import Candidate, candidate, improved
from actsolve.planners.keep_all import keep_all
from actsolve.planners.lifetimes import write_memory_rows
from actsolve.planners.lp import Array, Limits, Outcome, Solution, solve
from actsolve.planners.milp_rows import Columns, decision_columns, decisions_of, early_replays, offloaded_by, start_from
from actsolve.planners.moments import MemoryRows
from actsolve.planners.offload_all import offload_all
from actsolve.planners.offload_boundaries import offload_boundaries
from actsolve.planners.options import PlannerOptions, Progress
from actsolve.planners.per_layer import per_layer
from actsolve.planners.slots import Grid
from actsolve.planners.sqrt_l import sqrt_l
from actsolve.planners.windows import Windows, windows
from actsolve.problem import Problem

STEP_GAP = 0.0005  # a plan within this share of the step time is optimal, whatever its gap
_SMALL_STEP = 0.1  # of the step gap: at that the solver stops at once
_EPSILON_S = 1e-9
_NARROWEST = 12  # backward ops: about half a transformer layer
_WIDENING = 1.5
_DEMANDS = 4000  # step columns of a model that is solved only in the hope of a better plan
_IN_VAIN = 2  # such passes in a row gain nothing: no more,
_COARSE = Grid(64, whole=0.5)  # of the first pass
_FINE = (Grid(128, whole=0.0), Grid(128, whole=0.5))  # of the others, in turn
_ROUGH = 0.03  # a gap that is enough for the first of several passes that offload, after
_ROUGH_AFTER = 0.2  # of the time limit
_SIMPLER = 0.15  # of the time limit, for what only recomputes, and for what only offloads
_LAST_S = 0.5  # for the local improvement, once time is up
_CHEAP_S = 2.0  # if all together have taken this long
_PATIENCE_S = 5.0  # with a pass that finds nothing better


def milp(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan that takes the least time within the budget, to within the gap.

    Raises:
        UsageError: a pin cannot be honoured.
        SolverError: the solver asked for is missing or fails.
    """
    options = options or PlannerOptions()
    check_pins(problem)
    begin = time.perf_counter()
    everything = candidate(problem, keep_all(problem).kept)
    if everything.fits and everything.extra_s < _EPSILON_S:
        return Plan("milp", everything.kept, status=Status.OPTIMAL, bound_s=0.0)
    best = _best_seed(problem, options, everything)
    search = _Search(problem, options, best, begin)
    if problem.offloadable:
        search.begin_with_simpler_plans()
    search.run()
    best, bound = search.best, search.bound_s
    if best is None:
        return Plan("milp", status=Status.INFEASIBLE if search.proven_infeasible else Status.UNKNOWN, bound_s=bound)
    good_enough_s = 0.0 if bound is None else bound * (1 + options.gap / 5)
    best = improved(problem, best, good_enough_s, deadline=max(search.deadline, time.perf_counter()) + _LAST_S)
    if bound is not None and problem.offloadable and best.extra_s < bound * (1 - options.gap) - _EPSILON_S:
        bound = None  # slots are too coarse for so many stalls: what they prove is not true of whole copies
    bound = None if bound is None else min(bound, best.extra_s)
    return Plan(
        "milp", best.kept, best.early, best.offloaded, status=_status(problem, options, best.extra_s, bound), bound_s=bound
    )


def check_pins(problem: Problem) -> None:
    """Raise UsageError if a pin names what cannot be decided, or asks for what cannot be done."""
    graph = problem.graph
    decidable = set(graph.decidable)
    for v in sorted(problem.pinned_keep | problem.pinned_recompute):
        name = graph.values[v].name
        if v not in decidable:
            raise UsageError(f"{name} is pinned, but there is nothing to decide", why="no backward op or replay reads it")
        if v in problem.pinned_keep and v in problem.pinned_recompute:
            raise UsageError(f"{name} is pinned both to be kept and to be recomputed")
        producer = graph.values[v].producer
        assert producer is not None
        op = graph.ops[producer]
        if v in problem.pinned_recompute and not op.replayable:
            raise UsageError(
                f"{name} is pinned to be recomputed, and its op cannot be replayed", where=op.name, why=op.why_not, try_="keep it"
            )


def _best_seed(problem: Problem, options: PlannerOptions, everything: Candidate) -> Candidate | None:
    """The fastest of the baselines, and of the plans given, that fits."""
    seeds = [everything]
    for found in (*options.seeds, *(b(problem) for b in (sqrt_l, per_layer, offload_all, offload_boundaries))):
        if found.found:
            seeds.append(candidate(problem, found.kept, found.early, frozenset(found.offloaded)))
    fitting = [s for s in seeds if s.fits and not s.kept & problem.pinned_recompute]
    return min(fitting, key=lambda s: s.extra_s, default=None)


class _Search:
    """The passes over wider and wider windows, each seeded with the best plan so far.

    Narrow windows are solved first: mostly they give the same plans as wide ones in a tenth of the time, but not on nets with
    long skips (8% dearer on a U-Net) and not on tight budgets. Small steps pay there: the best plan of windows of 12 ops, then
    of 18, took 9 s on a vision transformer where 48 at once took a minute.
    """

    def __init__(self, problem: Problem, options: PlannerOptions, seed: Candidate | None, begin: float) -> None:
        self.problem, self.options = problem, options
        self.best = seed
        self.bound_s: float | None = None
        self.proven_infeasible = False
        self.begin = begin
        self.deadline = begin + options.time_limit_s - min(_LAST_S, 0.1 * options.time_limit_s)
        self._solved = 0  # passes that were not infeasible
        self._in_vain = 0  # the last of them, that found no plan better by more than the gap
        self.interrupted = False

    def begin_with_simpler_plans(self) -> None:
        """Take the best plans that only recompute, and only offload, if they are better: small models, soon solved."""
        ops = tuple(replace(op, replayable=False, why_not="only offload") for op in self.problem.graph.ops)
        simpler: list[tuple[Problem, int | None]] = [(replace(self.problem, links=None), None)]
        if not self.problem.pinned_recompute:
            simpler.append((replace(self.problem, graph=replace(self.problem.graph, ops=ops)), 1 + len(_FINE)))
        limited = replace(self.options, time_limit_s=_SIMPLER * self.options.time_limit_s)
        for problem, passes in simpler:
            search = _Search(problem, limited, None, time.perf_counter())
            search.run(passes)
            if search.best is not None and (self.best is None or search.best.extra_s < self.best.extra_s):
                self.best = search.best
            if search.interrupted:
                self.interrupted = True
                return

    def run(self, passes: int | None = None) -> None:
        """Solve until wider windows promise no better plan, or time, or the number of ``passes``, is up."""
        n_backward = len(self.problem.graph.ops) - self.problem.graph.n_forward
        width = self.options.window or _NARROWEST
        for number in itertools.count(1):
            found = windows(self.problem, width if width < n_backward else None)
            if self._over(found):
                return
            grid = _COARSE if number == 1 else _FINE[number % len(_FINE)]
            limits = (self.deadline, self._patience())
            self._take(found, _solve_windows(self.problem, self.options, found, grid, self.best, *limits))
            if number == passes or (found.whole and (number > len(_FINE) or not self.problem.offloadable)):
                return
            if number % 2 == 0 or not self.problem.offloadable:  # else the same windows once more, on another grid
                width = math.ceil(width * _WIDENING)

    def _over(self, found: Windows) -> bool:
        """Whether to stop before a pass over these windows."""
        if self.interrupted or time.perf_counter() > self.deadline:
            return True
        if self._solved == 0 or self.best is None:
            return False
        gap_s = self.best.extra_s - (self.bound_s or 0.0)
        if self.problem.offloadable and self._solved == 1:
            return False
        at_once = self.options.window is not None and gap_s <= self.options.gap * self.best.extra_s
        in_vain = self._in_vain >= _IN_VAIN and time.perf_counter() - self.begin > _CHEAP_S
        return at_once or in_vain or found.n_demands > _DEMANDS

    def _patience(self) -> _Patience:
        """The first pass that finds a plan may take all the time, or most of it; a later one must find a better plan for that."""
        now = time.perf_counter()
        hopeful = self._solved > 0 and self.best is not None
        first = self._solved == 0 and bool(self.problem.offloadable)
        return _Patience(
            content=self.begin + 0.5 * self.options.time_limit_s,
            hope=now + max(_PATIENCE_S, now - self.begin) if hopeful else math.inf,
            rough=now + _ROUGH_AFTER * self.options.time_limit_s if first else math.inf,
        )

    def _take(self, found: Windows, outcome: _Outcome) -> None:
        """Note what a pass found."""
        self.interrupted = outcome.solution.interrupted
        if outcome.solution.outcome is Outcome.INFEASIBLE:
            self.proven_infeasible = found.whole
            return
        before, after = self.best, outcome.best
        gained = False
        if after is not None and (before is None or after.extra_s < before.extra_s - _EPSILON_S):
            gained = before is None or after.extra_s < before.extra_s * (1 - self.options.gap)
            self.best = after
        # The bound is that of the widest windows that were solved to the gap, but for a much better plan's own. Grids are not
        # wider or narrower: where values can be offloaded, it is the least of all bounds.
        least = [b for b in (self.bound_s, outcome.bound_s) if b is not None and self.problem.offloadable]
        if self._solved == 0 or gained or self._conclusive(outcome):
            self.bound_s = min(least, default=outcome.bound_s)
        self._solved += 1
        self._in_vain = 0 if gained or self._solved == 1 else self._in_vain + 1

    def _conclusive(self, outcome: _Outcome) -> bool:
        """Whether a pass closed the gap; or only the step gap, if the passes before have not closed more."""
        if outcome.solution.outcome is Outcome.OPTIMAL or self.best is None:
            return outcome.solution.outcome is Outcome.OPTIMAL
        allowed_s = self.options.gap * self.best.extra_s
        within, within_before = (b is not None and self.best.extra_s - b <= allowed_s for b in (outcome.bound_s, self.bound_s))
        status = _status(self.problem, self.options, self.best.extra_s, outcome.bound_s)
        return within or (not within_before and status is Status.OPTIMAL)


@dataclass(frozen=True)
class _Patience:
    """When a pass ends before its gap is closed, as `time.perf_counter` tells it.

    Attributes:
        content: From then on the step gap is enough.
        hope: From then on it goes on only if it has found a better plan.
        rough: From then on a few per cent of the incumbent are enough.
    """

    content: float
    hope: float
    rough: float

    def ends(self, enough: float, seed: float, incumbent: float | None, bound: float | None) -> bool:
        """Whether to stop now: figures of the solver, the objective of the seed, and how near the bound is enough."""
        now = time.perf_counter()
        if now > self.hope and (incumbent is None or incumbent >= seed * (1 - _EPSILON_S)):
            return True
        if now > self.rough and incumbent is not None and bound is not None:
            enough = max(enough, _ROUGH * incumbent)
            return incumbent - bound <= enough
        return now > self.content and incumbent is not None and bound is not None and incumbent - bound <= enough


@dataclass(frozen=True)
class _Outcome:
    solution: Solution
    best: Candidate | None = None
    bound_s: float | None = None


def _solve_windows(
    problem: Problem,
    options: PlannerOptions,
    found: Windows,
    grid: Grid,
    seed: Candidate | None,
    deadline: float,
    patience: _Patience,
) -> _Outcome:
    """Solve the MILP over these windows, and again while the exact schedule of its plan does not fit.

    That happens where q is fractional: an output that dies at once, or workspace, then counts in part at several
    moments. So these q become binary. What is left after that is rounding, and a little less room cures it.
    """
    is_highs = options.solver.lower() == "highs"  # no other asks whether to go on
    stepwise: set[int] = set()
    tightened_bytes = 0
    bound_s: float | None = None
    while True:
        columns, rows, time_scale = build(problem, found, problem.dynamic_budget_bytes - tightened_bytes, grid)
        if rows.fixed_peak_bytes > problem.dynamic_budget_bytes:
            return _Outcome(Solution(Outcome.INFEASIBLE))
        columns.make_stepwise(stepwise)
        start = None
        if seed is not None:
            start = start_from(columns, seed.kept, seed.early, seed.offloaded)
            rows.fill(start)
        enough = _step_gap(options) * problem.base_time_s * time_scale
        seed_s = math.inf if seed is None else seed.extra_s
        limits = Limits(
            relative_gap=options.gap,
            absolute_gap=_SMALL_STEP * enough,
            time_limit_s=max(0.1, (deadline if is_highs else min(deadline, patience.hope)) - time.perf_counter()),
            threads=options.threads,
            sub_mips=columns.slots is not None,
            ends=partial(patience.ends, enough, seed_s * time_scale),
        )
        solution = solve(columns.lp, options.solver, limits, start, _in_seconds(options.progress, time_scale))
        if tightened_bytes and solution.outcome is Outcome.INFEASIBLE:
            return _Outcome(Solution(Outcome.UNKNOWN), bound_s=bound_s)
        if not tightened_bytes:
            bound_s = None if solution.bound is None else max(0.0, solution.bound / time_scale)
        if solution.x is None:
            return _Outcome(solution, bound_s=bound_s)
        best = decided(problem, columns, solution.x)
        if best.fits:
            return _Outcome(solution, best, bound_s)
        fractional = columns.fractional_steps(solution.x) - stepwise
        stepwise |= fractional
        if not fractional:
            if tightened_bytes:
                return _Outcome(solution, bound_s=bound_s)
            tightened_bytes = best.peak_bytes - problem.budget_bytes
        if time.perf_counter() > deadline or solution.interrupted:
            return _Outcome(solution, bound_s=bound_s)


def _in_seconds(progress: Progress | None, time_scale: float) -> Progress | None:
    """Translate what the solver reports."""
    if progress is None:
        return None
    return lambda elapsed_s, incumbent, bound: progress(
        elapsed_s, None if incumbent is None else incumbent / time_scale, None if bound is None else bound / time_scale
    )


def build(problem: Problem, found: Windows, room_bytes: int, grid: Grid = _COARSE) -> tuple[Columns, MemoryRows, float]:
    """Return the whole model, and by what its objective is to be divided to give seconds."""
    total = sum(problem.costs.replay_seconds[f] for f in found.demands)
    time_scale = 1000.0 / total if total > 0 else 1.0
    unit = memory_unit(problem)
    columns = decision_columns(problem, found, time_scale, unit, grid)
    rows = MemoryRows(columns, room_bytes, unit)
    write_memory_rows(problem, columns, rows)
    return columns, rows, time_scale


def decided(problem: Problem, columns: Columns, x: Array) -> Candidate:
    """Return the plan that the solution ``x`` stands for, simulated."""
    return candidate(problem, decisions_of(columns, x), early_replays(columns, x), offloaded_by(columns, x))


def memory_unit(problem: Problem) -> float:
    """Bytes that the solver sees as 1: its tolerance of 1e-6 is then a millionth of the largest value."""
    largest = max((problem.graph.values[v].size_bytes for v in problem.graph.decidable), default=1)
    return max(1.0, largest / 100.0)


def _step_gap(options: PlannerOptions) -> float:
    """The step gap to stop at: smaller where the caller asks for a smaller gap than usual."""
    return STEP_GAP * min(1.0, options.gap / 0.01)


def _status(problem: Problem, options: PlannerOptions, extra_s: float, bound_s: float | None) -> Status:
    if bound_s is None:
        return Status.FEASIBLE
    missing = extra_s - bound_s
    small = extra_s < _EPSILON_S or missing <= options.gap * extra_s + _EPSILON_S
    return Status.OPTIMAL if small or missing <= STEP_GAP * (problem.base_time_s + extra_s) else Status.FEASIBLE
