"""Seeded random training graphs, costs and budgets, as plain functions and as hypothesis strategies.

The graphs are tiny and odd on purpose: ops of several outputs, ops that cannot be replayed, random ops with a saved RNG
state, in-place ops in both directions, outputs that the caller holds, several gradients of one value, buffer updates and
values of no bytes. Every graph passes `Graph.verify`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from actsolve.errors import ScheduleError
from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op, Phase, Value
from actsolve.problem import Costs, Problem
from actsolve.schedule import build_schedule
from actsolve.simulate import simulate


@dataclass(frozen=True)
class Oddities:
    """How often each oddity is drawn; 0 switches it off."""

    multi_output: float = 0.2
    not_replayable: float = 0.1
    random_op: float = 0.15
    in_place: float = 0.25
    held_output: float = 0.1
    update: float = 0.06
    zero_size: float = 0.1
    workspace: float = 0.25


PLAIN = Oddities(multi_output=0, not_replayable=0, random_op=0, in_place=0, held_output=0, update=0, zero_size=0, workspace=0)


def random_training_graph(seed: int | random.Random, n_forward: int | None = None, odd: Oddities = Oddities()) -> Graph:
    """Return a small training graph of ``n_forward`` forward ops (2 to 7 if None), RNG-state ops not counted."""
    rng = random.Random(seed) if isinstance(seed, int) else seed
    builder = _Builder(rng, odd)
    builder.forward(rng.randint(2, 7) if n_forward is None else n_forward)
    builder.backward()
    return builder.graph().verify()


def costs_for(graph: Graph, seed: int | random.Random, odd: Oddities = Oddities()) -> Costs:
    """Return random costs: whole milliseconds, and a workspace for some ops."""
    rng = random.Random(seed) if isinstance(seed, int) else seed
    seconds = tuple(0.0 if op.optional else rng.randint(1, 9) * 1e-3 for op in graph.ops)
    replay = tuple(s + 1e-3 if op.random else s for s, op in zip(seconds, graph.ops, strict=True))
    workspace = tuple(rng.randint(1, 4) if rng.random() < odd.workspace else 0 for _ in graph.ops)
    return Costs(seconds, replay, workspace, source="random")


def random_problem(seed: int | random.Random, n_forward: int | None = None, odd: Oddities = Oddities()) -> Problem:
    """Return a graph with costs and a budget between what its widest op needs and what keep-all needs."""
    rng = random.Random(seed) if isinstance(seed, int) else seed
    graph = random_training_graph(rng, n_forward, odd)
    costs = costs_for(graph, rng, odd)
    static, optimizer = rng.choice(((0, 0), (0, 0), (7, 0), (5, 3)))
    problem = Problem(graph, costs, 0, static_bytes=static, optimizer_bytes=optimizer)
    low, high = budget_range(problem)
    if rng.random() < 0.7:
        low = least_peak_of_a_few(problem, rng)
    return Problem(graph, costs, rng.randint(low, high), static_bytes=static, optimizer_bytes=optimizer)


def budget_range(problem: Problem) -> tuple[int, int]:
    """Return (what the widest single op needs, the peak of keeping every decidable value)."""
    graph, costs = problem.graph, problem.costs
    widest = 0
    for index, op in enumerate(graph.ops):
        if op.optional:
            continue
        read = sum(graph.values[v].size_bytes for v in op.inputs if graph.values[v].producer is not None)
        made = sum(graph.values[v].size_bytes for v in op.outputs)
        if op.in_place is not None:
            made -= graph.values[op.in_place[1]].size_bytes
        widest = max(widest, read + made + costs.workspace_bytes[index])
    keep_all = simulate(problem, build_schedule(graph, frozenset(graph.decidable))).peak_bytes
    return min(problem.static_bytes + widest, keep_all), keep_all


def least_peak_of_a_few(problem: Problem, rng: random.Random, n: int = 8) -> int:
    """Return the least peak among keep-all and ``n`` random sets of kept values: a budget that can be met."""
    decidable = problem.graph.decidable
    peaks = [budget_range(problem)[1]]
    for _ in range(n):
        try:
            schedule = build_schedule(problem.graph, frozenset(v for v in decidable if rng.random() < 0.5))
        except ScheduleError:
            continue
        peaks.append(simulate(problem, schedule).peak_bytes)
    return min(peaks)


@st.composite
def training_graphs(draw: st.DrawFn, max_forward: int = 7, odd: Oddities = Oddities()) -> Graph:
    """Small training graphs; shrinks towards few ops."""
    n_forward = draw(st.integers(1, max_forward))
    return random_training_graph(draw(st.randoms(use_true_random=False)), n_forward, odd)


@st.composite
def problems(draw: st.DrawFn, max_forward: int = 7, odd: Oddities = Oddities()) -> Problem:
    """Small problems: a graph, costs, and a budget that may or may not be met."""
    n_forward = draw(st.integers(1, max_forward))
    return random_problem(draw(st.randoms(use_true_random=False)), n_forward, odd)


@dataclass
class _Builder:
    rng: random.Random
    odd: Oddities
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    parameter_of: dict[int, int] = field(default_factory=dict)  # forward op -> its parameter
    outputs: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    n_forward: int = 0

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def value(self, name: str, size: int, kind: Kind = Kind.ACTIVATION, producer: int | None = None) -> int:
        self.values.append(Value(name, size, kind, producer, (size,), "uint8"))
        return len(self.values) - 1

    def size(self) -> int:
        return 0 if self.chance(self.odd.zero_size) else self.rng.randint(1, 9)

    def op(self, name: str, phase: Phase, inputs: list[int], sizes: dict[str, int], **fields: object) -> list[int]:
        """Append an op that makes one value per entry of ``sizes``; return these values."""
        made = [self.value(n, size, producer=len(self.ops)) for n, size in sizes.items()]
        self.ops.append(
            Op(name, f"test.{name}", phase, tuple(dict.fromkeys(inputs)), tuple(made), **fields)  # type: ignore[arg-type]
        )
        return made

    def forward(self, n: int) -> None:
        activations = [self.value("x", self.rng.randint(1, 9), Kind.INPUT)]
        for i in range(n):
            inputs = [activations[-1] if self.chance(0.7) else self.rng.choice(activations)]
            if self.chance(0.3):
                inputs.append(self.rng.choice(activations))
            activations += self.forward_op(i, inputs)
        self.outputs.append(activations[-1])
        self.outputs += [v for v in activations[1:-1] if self.chance(self.odd.held_output)]
        self.n_forward = len(self.ops)

    def forward_op(self, i: int, inputs: list[int]) -> list[int]:
        sizes = {f"v{i}": self.size()}
        fields: dict[str, object] = {"layer": i // 2 if self.rng.random() < 0.5 else None}
        source = inputs[0]
        in_place = self.values[source].kind is Kind.ACTIVATION and self.chance(self.odd.in_place)
        if in_place:
            sizes = {f"v{i}": self.values[source].size_bytes}
        if self.chance(self.odd.multi_output):
            sizes[f"w{i}"] = self.size()
        buffer = None
        if self.chance(self.odd.update):
            buffer = self.value(f"buffer{i}", 2, Kind.BUFFER)
            sizes[f"new{i}"] = 2
            fields |= {"replayable": False, "why_not": "reads a buffer that the step changes"}
        elif self.chance(self.odd.not_replayable):
            fields |= {"replayable": False, "why_not": "collective"}
        elif self.chance(self.odd.random_op):
            state = self.op(f"rng{i}", Phase.FORWARD, [], {f"state{i}": 1}, replayable=False, why_not="RNG state", optional=True)
            self.ops[-1] = replace(self.ops[-1], target=RNG_STATE_TARGET)
            fields |= {"random": True, "replay_inputs": tuple(state)}
        if in_place:
            fields["in_place"] = (source, len(self.values))
        index = len(self.ops)
        read = list(inputs)
        if self.chance(0.6):
            parameter = self.value(f"p{i}", self.rng.randint(1, 5), Kind.PARAMETER)
            self.parameter_of[index] = parameter
            read.append(parameter)
            if in_place:
                fields["in_place"] = (source, len(self.values))
        made = self.op(f"f{i}", Phase.FORWARD, read + ([buffer] if buffer is not None else []), sizes, **fields)
        if buffer is not None:
            self.updates.append((made[-1], buffer))
            made = made[:-1]
        return made

    def backward(self) -> None:
        seed = self.outputs[0]
        gradient_of = {seed: self.value("tangent", self.values[seed].size_bytes, Kind.TANGENT)}
        for index in range(self.n_forward - 1, -1, -1):
            forward = self.ops[index]
            incoming = [gradient_of[v] for v in forward.outputs if v in gradient_of]
            if incoming and not forward.optional:
                self.backward_op(index, forward, incoming, gradient_of)

    def backward_op(self, index: int, forward: Op, incoming: list[int], gradient_of: dict[int, int]) -> None:
        """The gradient of one forward op, then one addition for each value that has a gradient already."""
        read = [v for v in (*forward.inputs, *forward.outputs) if self.chance(0.65)]
        wanted = [v for v in forward.inputs if self.values[v].kind is Kind.ACTIVATION]
        sizes = {f"g_{self.values[v].name}_{index}": self.values[v].size_bytes for v in wanted}
        parameter = self.parameter_of.get(index)
        if parameter is not None:
            sizes[f"grad_{self.values[parameter].name}"] = self.values[parameter].size_bytes
        if not sizes:
            return
        fields: dict[str, object] = {"replayable": False}
        same = [k for k, size in enumerate(sizes.values()) if k < len(wanted) and size == self.values[incoming[0]].size_bytes]
        if same and self.values[incoming[0]].kind is Kind.ACTIVATION and self.chance(self.odd.in_place):
            fields["in_place"] = (incoming[0], len(self.values) + same[0])
        made = self.op(f"b{index}", Phase.BACKWARD, [*incoming, *read], sizes, **fields)
        if parameter is not None:
            self.gradients.append(made[-1])
        for v, gradient in zip(wanted, made, strict=False):
            if v in gradient_of:
                gradient = self.addition(gradient_of[v], gradient)
            gradient_of[v] = gradient

    def addition(self, old: int, new: int) -> int:
        fields: dict[str, object] = {"replayable": False}
        if self.values[old].kind is Kind.ACTIVATION and self.chance(self.odd.in_place):
            fields["in_place"] = (old, len(self.values))
        name = f"add{len(self.ops)}"
        return self.op(name, Phase.BACKWARD, [old, new], {f"v_{name}": self.values[old].size_bytes}, **fields)[0]

    def graph(self) -> Graph:
        held = tuple(self.outputs), tuple(self.gradients)
        return Graph(tuple(self.ops), tuple(self.values), *held, tuple(self.updates), name="random")
