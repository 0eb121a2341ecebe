"""The whole model of the MILP over given windows, and the plan that a solution of it stands for."""

from __future__ import annotations

from actsolve.planners.improve import Candidate, candidate
from actsolve.planners.lifetimes import write_memory_rows
from actsolve.planners.lp import Array
from actsolve.planners.milp_rows import Columns, decision_columns, decisions_of, early_replays, offloaded_by
from actsolve.planners.moments import MemoryRows
from actsolve.planners.slots import Grid
from actsolve.planners.windows import Windows
from actsolve.problem import Problem

COARSE = Grid(64, whole=0.5)  # of the first pass


def build(
    problem: Problem, found: Windows, room_bytes: int, grid: Grid = COARSE, rows_of: type[MemoryRows] = MemoryRows
) -> tuple[Columns, MemoryRows, float]:
    """Return the whole model, and by what its objective is to be divided to give seconds."""
    total = sum(problem.costs.replay_seconds[f] for f in found.demands)
    time_scale = 1000.0 / total if total > 0 else 1.0
    unit = memory_unit(problem)
    columns = decision_columns(problem, found, time_scale, unit, grid)
    rows = rows_of(columns, room_bytes, unit)
    write_memory_rows(problem, columns, rows)
    return columns, rows, time_scale


def decided(problem: Problem, columns: Columns, x: Array) -> Candidate:
    """Return the plan that the solution ``x`` stands for, simulated."""
    return candidate(problem, decisions_of(columns, x), early_replays(columns, x), offloaded_by(columns, x))


def memory_unit(problem: Problem) -> float:
    """Bytes that the solver sees as 1: its tolerance of 1e-6 is then a millionth of the largest value."""
    largest = max((problem.graph.values[v].size_bytes for v in problem.graph.decidable), default=1)
    return max(1.0, largest / 100.0)
