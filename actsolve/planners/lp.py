"""A mixed-integer linear program as plain columns, rows and coefficients, and two ways to solve it.

HiGHS gets the arrays directly, for PuLP's HiGHS class passes on neither warm starts nor the dual bound; every other
solver is reached through PuLP. A model of 60,000 rows must not spend longer in Python than in the solver, so nothing
here makes an object per row until PuLP is asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt
import pulp

from actsolve.errors import SolverError
from actsolve.planners.highs_run import SilentHighs, finite, run_highs
from actsolve.planners.options import Progress

_OVERRUN, _OVERRUN_S = 1.5, 10.0  # of its time limit, and seconds more: then HiGHS is no longer waited for

Array = npt.NDArray[np.float64]
INFINITY = math.inf


class Outcome(Enum):
    """What a solver said."""

    OPTIMAL = "optimal"  # within the gap asked for
    FEASIBLE = "feasible"  # a solution, without that proof
    INFEASIBLE = "infeasible"  # proven
    UNKNOWN = "unknown"  # nothing found before it stopped


@dataclass(frozen=True)
class Solution:
    """What a solver returned.

    Attributes:
        outcome: What it said.
        x: The value of every column, or None.
        objective: The objective there.
        bound: Its dual bound on the objective; None if it exposes none.
        interrupted: Whether the user stopped it (Ctrl-C).
    """

    outcome: Outcome
    x: Array | None = None
    objective: float | None = None
    bound: float | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Limits:
    """When a solver stops: at either gap, at the time limit, or when ``ends`` says so.

    `sub_mips` lets HiGHS search around its relaxation for incumbents. `ends` is called now and then with the incumbent and
    the bound, in units of the objective, either None while unknown; only HiGHS calls it.
    """

    relative_gap: float = 0.01
    absolute_gap: float = 0.0
    time_limit_s: float = 60.0
    threads: int | None = None
    sub_mips: bool = False
    ends: Callable[[float | None, float | None], bool] | None = None


@dataclass
class LinearModel:
    """Minimise cost over columns within rows ``lower <= coefficients . columns <= upper``, built in bulk."""

    cost: list[float] = field(default_factory=list)
    column_lower: list[float] = field(default_factory=list)
    column_upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    coefficient: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = False) -> int:
        """Add a column; return its index."""
        self.cost.append(cost)
        self.column_lower.append(lower)
        self.column_upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, lower: float, upper: float, columns: list[int], coefficients: list[float]) -> int:
        """Add a row; return its index. No column may be named twice."""
        self.index += columns
        self.coefficient += coefficients
        self.row_start.append(len(self.index))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_lower) - 1

    @property
    def n_columns(self) -> int:
        return len(self.cost)

    @property
    def n_rows(self) -> int:
        return len(self.row_lower)

    def to_pulp(self) -> pulp.LpProblem:
        """Return the same program for PuLP; column i is named ``x<i>``.

        Columns of no row and no cost are left out: the files that PuLP writes for other solvers name their bounds alone, and CBC
        does not take that.
        """
        problem = pulp.LpProblem("actsolve", pulp.LpMinimize)
        columns = [
            pulp.LpVariable(f"x{i}", finite(low), finite(high), pulp.LpInteger if integer else pulp.LpContinuous)
            for i, (low, high, integer) in enumerate(zip(self.column_lower, self.column_upper, self.integer, strict=True))
        ]
        used = set(self.index)
        problem.addVariables([c for i, c in enumerate(columns) if i in used or self.cost[i]])
        problem.setObjective(pulp.LpAffineExpression([(c, v) for c, v in zip(columns, self.cost, strict=True) if v]))
        for row in range(self.n_rows):
            span = range(self.row_start[row], self.row_start[row + 1])
            terms = [(columns[self.index[k]], self.coefficient[k]) for k in span]
            low, high = self.row_lower[row], self.row_upper[row]
            if low == high:
                problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, f"r{row}", high))
                continue
            if high < INFINITY:
                problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintLE, f"r{row}", high))
            if low > -INFINITY:
                problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintGE, f"s{row}", low))
        return problem


def solve(
    model: LinearModel, solver: str, limits: Limits, start: Array | None = None, progress: Progress | None = None
) -> Solution:
    """Solve ``model``. Ctrl-C stops the solver and returns what it has.

    Args:
        model: What to minimise.
        solver: ``"highs"``, or the name of any solver that PuLP knows; case does not matter.
        limits: When to stop.
        start: A solution to start from, a value for every column.
        progress: Called with (elapsed_s, incumbent, bound), in units of the objective; only HiGHS calls it.

    Raises:
        SolverError: the solver is unknown, not installed, or failed.
    """
    if solver.lower() == "highs":
        return _solve_highs(model, limits, start, progress)
    return _solve_pulp(model, _pulp_solver(solver, limits, warm=start is not None), start)


# HiGHS


def _solve_highs(model: LinearModel, limits: Limits, start: Array | None, progress: Progress | None) -> Solution:
    highs: Any = SilentHighs()  # type: ignore[no-untyped-call]
    highs.passModel(highs_model(model))
    for name, value in _highs_options(limits).items():
        highs.setOptionValue(name, value)
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = start.tolist()
        solution.value_valid = True
        highs.setSolution(solution)
    run = run_highs(highs, progress, limits.ends, give_up_s=_OVERRUN * limits.time_limit_s + _OVERRUN_S)
    if run.left_behind:
        outcome = Outcome.UNKNOWN if run.x is None else Outcome.FEASIBLE
        return Solution(outcome, run.x, run.objective, run.bound, run.interrupted)
    found = _highs_solution(highs, any(model.integer), run.interrupted)
    # HiGHS 1.16 returns the start under the optimum's objective where presolve alone finds a better solution.
    if start is not None and found.x is not None and _worse(float(np.dot(found.x, model.cost)), found.objective):
        return _solve_highs(model, limits, None, progress)
    return found


def _worse(objective: float, told: float | None) -> bool:
    return told is not None and objective > told + 1e-6 * max(1.0, abs(told))


def _highs_options(limits: Limits) -> dict[str, float | int | str]:
    options: dict[str, float | int | str] = {
        "time_limit": float(limits.time_limit_s),
        "mip_rel_gap": float(limits.relative_gap),
        "mip_abs_gap": float(limits.absolute_gap),
        "random_seed": 0,
        # Sub-MIPs and restarts copy and presolve dense rows again and again: without, 0.6 of the time over 33 models, and
        # 2 s in place of 11 on a U-Net; but of many equal values to offload they find the few in 3 s that diving did not in 100.
        # Symmetry never helped, and cost a third of the time at 48 identical layers.
        "mip_heuristic_run_rins": limits.sub_mips,
        "mip_heuristic_run_rens": limits.sub_mips,
        "mip_allow_restart": False,
        "mip_detect_symmetry": False,
    }
    if limits.threads is not None:
        options["threads"] = limits.threads
    return options


def highs_model(model: LinearModel) -> highspy.HighsLp:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = model.n_columns, model.n_rows
    lp.col_cost_ = np.array(model.cost, dtype=np.float64)
    lp.col_lower_ = np.array(model.column_lower, dtype=np.float64)
    lp.col_upper_ = np.array(model.column_upper, dtype=np.float64)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[i] for i in model.integer]
    lp.row_lower_ = np.array(model.row_lower, dtype=np.float64)
    lp.row_upper_ = np.array(model.row_upper, dtype=np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(model.row_start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(model.index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(model.coefficient, dtype=np.float64)
    return lp


def _highs_solution(highs: Any, is_mip: bool, interrupted: bool) -> Solution:
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Solution(Outcome.INFEASIBLE, interrupted=interrupted)
    if status in (highspy.HighsModelStatus.kSolveError, highspy.HighsModelStatus.kModelError, highspy.HighsModelStatus.kNotset):
        raise SolverError("HiGHS failed", why=highs.modelStatusToString(status))
    bound = finite(info.mip_dual_bound) if is_mip else info.objective_function_value
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Solution(Outcome.UNKNOWN, bound=bound, interrupted=interrupted)
    optimal = status == highspy.HighsModelStatus.kOptimal
    x = np.array(highs.getSolution().col_value, dtype=np.float64)
    return Solution(Outcome.OPTIMAL if optimal else Outcome.FEASIBLE, x, info.objective_function_value, bound, interrupted)


# PuLP


def available_solvers() -> list[str]:
    """Return the names of the solvers that can be asked for here."""
    return ["highs", *(s for s in pulp.listSolvers(onlyAvailable=True) if s != "HiGHS")]


def _pulp_solver(name: str, limits: Limits, warm: bool) -> pulp.LpSolver:
    known = {s.lower(): s for s in pulp.listSolvers()} | {"cbc": "PULP_CBC_CMD", "glpk": "GLPK_CMD", "scip": "SCIP_CMD"}
    try_ = "one of " + ", ".join(available_solvers())
    if name.lower() not in known:
        raise SolverError(f"no solver is called {name!r}", try_=try_)
    full = known[name.lower()]
    wanted: dict[str, object] = {"timeLimit": limits.time_limit_s, "gapRel": limits.relative_gap}
    extra: dict[str, object] = {"warmStart": warm} if warm else {}
    if limits.threads is not None:
        extra["threads"] = limits.threads
    build: Callable[..., pulp.LpSolver] = pulp.getSolver
    for arguments in ({**wanted, **extra}, wanted, {}):
        try:
            solver = build(full, msg=False, **arguments)
        except TypeError:
            continue  # not every PuLP solver takes a gap, a start or threads
        if solver.available():
            return solver
        break
    raise SolverError(f"the solver {full} is not installed", try_=try_)


def _solve_pulp(model: LinearModel, solver: pulp.LpSolver, start: Array | None) -> Solution:
    problem = model.to_pulp()
    variables = {v.name: v for v in problem.variables()}
    if start is not None:
        for name, variable in variables.items():
            variable.setInitialValue(float(start[int(name[1:])]), check=False)
    begin = time.perf_counter()
    try:
        problem.solve(solver)
    except KeyboardInterrupt:
        return Solution(Outcome.UNKNOWN, interrupted=True)
    except pulp.PulpSolverError as error:
        raise SolverError(f"{solver.name} failed after {time.perf_counter() - begin:.1f} s", why=str(error)) from error
    # `status` says Optimal for a time-limited incumbent too: only `sol_status` tells them apart.
    outcome = {
        pulp.LpSolutionOptimal: Outcome.OPTIMAL,
        pulp.LpSolutionIntegerFeasible: Outcome.FEASIBLE,
        pulp.LpSolutionInfeasible: Outcome.INFEASIBLE,
    }.get(problem.sol_status, Outcome.UNKNOWN)
    if outcome not in (Outcome.OPTIMAL, Outcome.FEASIBLE):
        return Solution(outcome)
    x = np.zeros(model.n_columns)
    for i in range(model.n_columns):
        variable = variables.get(f"x{i}")
        value = None if variable is None else variable.varValue
        x[i] = max(0.0, model.column_lower[i]) if value is None else value
    return Solution(outcome, x, float(np.dot(x, model.cost)))
