"""The exact integer program over stages: before each backward op, which forward ops are replayed, and what stays until the next.

    R[j, f]     forward op f is replayed before backward op j (binary)
    S[j, v]     forward value v is there when the stage of backward op j begins (binary)
    L[j, v, k]  it is there while op k of stage j runs: after its last read in the stage only if it stays

Stages are those of the backward ops; the last position of a stage is the backward op itself. The forward runs once.

Source:
    Jain et al., Checkmate, MLSys 2020. Theirs has a stage for forward ops too, in which it may replay; our schedules do not.
    Their FREE variables multiply decisions; here a value is there up to its last read, as rows of L, which says the same.
    Memory is exact but where a replay, or a backward op, could overwrite a forward value: there both are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actsolve.graph import Graph, Kind
from actsolve.plan import Plan, Status
from actsolve.planners.keep_all import pins_note
from actsolve.planners.lp import INFINITY, Limits, LinearModel, Outcome, solve
from actsolve.planners.options import PlannerOptions
from actsolve.problem import Problem
from actsolve.replays import saved_by
from actsolve.simulate import timeline_of

MAX_OPS = 64  # more than that, and it takes hours: theirs took up to an hour for chains of about as many
_UNIT = 100.0  # what the largest value counts, for the solver's tolerances
_TIME_SCALE = 1000.0  # what all replays together cost


def checkmate(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan of least time within the budget, for small graphs."""
    options = options or PlannerOptions()
    graph = problem.graph
    if len(graph.ops) > MAX_OPS:
        return Plan("checkmate", status=Status.UNKNOWN, note=f"{len(graph.ops)} ops: its program is solved for {MAX_OPS} at most")
    program = _Program(problem)
    program.write()
    limits = Limits(options.gap, 0.0, options.time_limit_s, options.threads, sub_mips=True)
    solution = solve(program.lp, options.solver, limits)
    if solution.x is None:
        proven = solution.outcome is Outcome.INFEASIBLE
        return Plan("checkmate", status=Status.UNKNOWN, note="proven: no plan fits" if proven else "no plan was found in time")
    replays = {
        j: ops for j in program.stages if (ops := tuple(f for f in program.forward if solution.x[program.run[j, f]] > 0.5))
    }
    plan = Plan("checkmate", saved_by(graph, replays), replays=replays)
    proof = "optimal" if solution.outcome is Outcome.OPTIMAL else "time is up"
    if not timeline_of(problem, plan).fits:
        proof = "beyond the budget by the solver's tolerance"
    return Plan("checkmate", plan.kept, replays=replays, note="; ".join(n for n in (proof, pins_note(problem)) if n))


@dataclass
class _Program:
    """The program being written; bytes and seconds are scaled."""

    problem: Problem
    lp: LinearModel = field(default_factory=LinearModel)
    run: dict[tuple[int, int], int] = field(default_factory=dict)  # R
    there: dict[tuple[int, int], int] = field(default_factory=dict)  # S

    def __post_init__(self) -> None:
        graph: Graph = self.problem.graph
        self.graph = graph
        self.forward = [f for f in range(graph.n_forward) if not graph.ops[f].optional]
        self.stages = range(graph.n_forward, len(graph.ops))
        self.values = [v for v in graph.decidable if v not in graph.held]
        self.decided = frozenset(self.values)
        self.updated = frozenset(new for new, _ in graph.updates)
        largest = max((v.size_bytes for v in graph.values), default=1)
        self.unit = max(1.0, largest / _UNIT)
        self.room = self.problem.dynamic_budget_bytes / self.unit

    def size(self, value: int) -> float:
        return self.graph.values[value].size_bytes / self.unit

    def write(self) -> None:
        costs = self.problem.costs.replay_seconds
        scale = _TIME_SCALE / (sum(costs) or 1.0)
        for j in self.stages:
            for f in self.forward:
                allowed = 1.0 if self.graph.ops[f].replayable else 0.0
                self.run[j, f] = self.lp.column(costs[f] * scale, upper=allowed, integer=True)
            for v in self.values:
                self.there[j, v] = self.lp.column(integer=True)
        self._write_forward_memory()
        for j in self.stages:
            self._write_reads(j)
            self._write_memory(j)

    def _write_reads(self, j: int) -> None:
        """What is read was there or is replayed; what stays, too."""
        for f in self.forward:
            for v in (*self.graph.ops[f].inputs, *self.graph.ops[f].replay_inputs):
                if v in self.decided:
                    self._implied(self.run[j, f], self._sources(j, v))
        for v in self.graph.ops[j].inputs:
            if v in self.decided:
                columns = self._sources(j, v)
                self.lp.row(1.0, INFINITY, columns, [1.0] * len(columns))
        if j + 1 in self.stages:
            for v in self.values:
                self._implied(self.there[j + 1, v], self._sources(j, v))

    def _sources(self, j: int, value: int) -> list[int]:
        """Columns of which one must be 1 for ``value`` to be readable in stage j."""
        producer = self.graph.values[value].producer
        assert producer is not None
        return [self.there[j, value], *([self.run[j, producer]] if (j, producer) in self.run else [])]

    def _implied(self, column: int, by: list[int]) -> None:
        self.lp.row(0.0, INFINITY, [*by, column], [*(1.0 for _ in by), -1.0])

    def _write_forward_memory(self) -> None:
        if not self.stages:
            return
        graph = self.graph
        made: list[int] = []
        for index in range(graph.n_forward):
            op = graph.ops[index]
            fixed, columns, sizes = self.problem.costs.workspace_bytes[index] / self.unit, [], []
            made += op.outputs
            for v in made:
                if self._stays_in_forward(v, index):
                    fixed += self.size(v)
                elif v in self.decided:
                    columns.append(self.there[self.stages.start, v])
                    sizes.append(self.size(v))
            self.lp.row(-INFINITY, self.room - fixed, columns, sizes)

    def _stays_in_forward(self, value: int, index: int) -> bool:
        """Whether a value is there while a forward op runs, whatever is decided."""
        graph = self.graph
        op, readers, producer = graph.ops[index], graph.forward_readers[value], graph.values[value].producer
        assert producer is not None
        if value in graph.held or value in self.updated or (producer == index and not op.optional):
            return True
        overwritten = op.in_place is not None and op.in_place[0] == value
        return bool(readers) and (readers[-1] > index or (readers[-1] == index and not overwritten))

    def _write_memory(self, j: int) -> None:
        """Rows for the replays of stage j, and for the backward op."""
        graph, costs = self.graph, self.problem.costs
        base, at_op = _backward_bytes(self.problem)[j]
        positions = [*(f for f in self.forward if graph.ops[f].replayable), j]
        live = {v: self._live_columns(j, v, positions) for v in self.values}
        extra = self._never_read()
        for k, position in enumerate(positions):
            columns = [live[v][k] for v in self.values]
            sizes = [self.size(v) for v in self.values]
            room = self.room - (at_op if position == j else base) / self.unit
            if position != j:
                unread = sum(self.size(v) for v in graph.ops[position].outputs if v in extra)
                columns.append(self.run[j, position])
                sizes.append(costs.workspace_bytes[position] / self.unit + unread)
            self.lp.row(-INFINITY, room, columns, sizes)

    def _never_read(self) -> frozenset[int]:
        """Outputs of forward ops that a replay makes in vain; of what the caller holds, a second copy."""
        made = {v for op in self.graph.ops[: self.graph.n_forward] for v in op.outputs}
        return frozenset(made - self.decided)

    def _live_columns(self, j: int, value: int, positions: list[int]) -> list[int]:
        """Per position of a stage the column that is 1 where ``value`` is there."""
        graph = self.graph
        producer = graph.values[value].producer
        assert producer is not None
        columns: list[int] = []
        following: int | None = None  # the column of the next position
        for position in reversed(positions):
            op = graph.ops[position]
            if position != j and position < producer:
                columns.append(self.there[j, value])
                continue
            column = self.lp.column()
            if following is not None:
                self.lp.row(0.0, INFINITY, [column, following], [1.0, -1.0])
            elif j + 1 in self.stages:
                self.lp.row(0.0, INFINITY, [column, self.there[j + 1, value]], [1.0, -1.0])
            if position == j and value in op.inputs:
                self.lp.column_lower[column] = 1.0
            if position != j and (value in op.inputs or value in op.replay_inputs or position == producer):
                self.lp.row(0.0, INFINITY, [column, self.run[j, position]], [1.0, -1.0])
            following = column
            columns.append(column)
        return columns[::-1]


def _backward_bytes(problem: Problem) -> dict[int, tuple[int, int]]:
    """Per backward op: the bytes of all but decided values before it, and while it runs."""
    graph = problem.graph
    sizes = [v.size_bytes for v in graph.values]
    current = graph.given_bytes(Kind.TANGENT) + sum(sizes[v] for v in graph.outputs if graph.is_forward_value[v])
    found = {}
    for index in range(graph.n_forward, len(graph.ops)):
        op = graph.ops[index]
        made = sum(sizes[v] for v in op.outputs)
        mine = [v for v in (*op.inputs, *op.outputs) if graph.values[v].producer is not None and not graph.is_forward_value[v]]
        dying = {v for v in mine if v not in graph.held and graph.backward_readers[v][-1:] in ((), (index,))}
        at_once = sizes[op.in_place[0]] if op.in_place is not None and op.in_place[0] in dying else 0
        found[index] = (current, current + made - at_once + problem.costs.workspace_bytes[index])
        current += made - sum(sizes[v] for v in dying)
    return found
