"""What one training step computes: a bipartite graph of ops and values.

A *value* is a storage: views, ``getitem``, ``detach``, ``t`` and ``split`` are not values, they ride on the storage that they
alias, and its size is the storage's bytes, counted once. An *op* is one kernel call. Forward ops come first, in execution
order; backward ops follow, in execution order.

Invariants, held by `Graph.verify`:

- ops are sorted: every forward op before every backward op, and every op after the producers of its inputs;
- a value has exactly one producer, or none if it is given (a parameter, buffer, input, constant or tangent);
- a forward op reads no backward value and no tangent;
- no forward op reads what an optional op makes, for that may not run: only a replay or the backward does; it runs once at most;
- what is copied into a buffer is there at the end of the forward;
- names are unique; sizes are non-negative;
- `in_place` names an input and an output of its op, of equal size, and the input is no given value.

Values and ops are referred to by index. The graph is free of torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NoReturn

import networkx as nx

from actsolve.errors import ActsolveError


class GraphError(ActsolveError):
    """A graph that breaks an invariant. Where it came from a file, the file is at fault."""

    exit_code = 2


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(StrEnum):
    """Where a value comes from. All but ACTIVATION are given: no op produces them."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    TANGENT = "tangent"  # gradient of an output, given by the caller; live during the whole backward
    ACTIVATION = "activation"  # produced by an op, forward or backward


STATIC_KINDS = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT})


@dataclass(frozen=True, slots=True)
class Value:
    """A storage.

    Attributes:
        name: Unique, and stable between runs.
        size_bytes: Bytes of the whole storage.
        kind: Where it comes from.
        producer: Index of the op that produces it; None if it is given.
        shape: Shape of the tensor that first named it, for display.
        dtype: Its dtype, such as ``float32``, for display.
    """

    name: str
    size_bytes: int
    kind: Kind = Kind.ACTIVATION
    producer: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call.

    Attributes:
        name: Unique, and stable between runs.
        target: The kernel, such as ``aten.mm.default``.
        phase: Forward or backward.
        inputs: Values read, each once, in order of first use.
        outputs: Values produced.
        flops: Floating point operations of one run (a multiply-add counts 2); None if unknown.
        replayable: Whether a second run, inside the backward, gives bitwise the same outputs. So does one in the forward: all
            that has changed there since the first run is the random generator, and a replay brings its state along; buffers
            change only when the forward ends. Always False for backward ops.
        why_not: The reason if a forward op is not replayable: "mutates", "reads a buffer that the step
            changes", "collective", ...
        replay_inputs: Values that only a replay reads, besides `inputs`: the RNG state of a random op,
            produced by an optional ``actsolve.rng_state`` op just before it.
        random: Draws random numbers. Its first run, in the forward, always happens, in order.
        optional: Run only where one of its outputs is kept.
        in_place: ``(input, output)``: the kernel can write this output into that input's storage. It is
            done only where the input is not read again.
        module: Qualified name of the module that ran it, such as ``blocks.3.attn``.
        layer: Index of its layer, where the model has an outermost ModuleList or Sequential.
        source: ``file:line`` in the user's code.
        signature: Target, shapes, strides, dtypes and constants: ops of equal signature cost the same.
    """

    name: str
    target: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int | None = 0
    replayable: bool = True
    why_not: str = ""
    replay_inputs: tuple[int, ...] = ()
    random: bool = False
    optional: bool = False
    in_place: tuple[int, int] | None = None
    module: str = ""
    layer: int | None = None
    source: str = ""
    signature: str = ""


RNG_STATE_TARGET = "actsolve.rng_state"


@dataclass(frozen=True)
class Graph:
    """One training step.

    Attributes:
        ops: Forward ops, then backward ops, each in execution order.
        values: All storages.
        outputs: Values that the forward returns and the caller holds to the end of the step.
        gradients: Values that the backward returns, held from their production to the end of the step.
        updates: ``(new, buffer)``: at the end of the forward ``new`` is copied into the buffer, then freed
            (unless a backward op or a replay still reads it).
        name: What was captured, for display.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    updates: tuple[tuple[int, int], ...] = ()
    name: str = ""

    @cached_property
    def n_forward(self) -> int:
        """Number of forward ops; ``ops[n_forward:]`` are the backward ops."""
        return sum(op.phase is Phase.FORWARD for op in self.ops)

    @cached_property
    def forward_readers(self) -> tuple[tuple[int, ...], ...]:
        """Per value: the forward ops that read it, ascending."""
        return self._readers(0, self.n_forward)

    @cached_property
    def backward_readers(self) -> tuple[tuple[int, ...], ...]:
        """Per value: the backward ops that read it, ascending (op indices, so >= `n_forward`)."""
        return self._readers(self.n_forward, len(self.ops))

    def _readers(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        readers: list[list[int]] = [[] for _ in self.values]
        for index in range(start, stop):
            for value in self.ops[index].inputs:
                readers[value].append(index)
        return tuple(map(tuple, readers))

    @cached_property
    def replay_readers(self) -> tuple[tuple[int, ...], ...]:
        """Per value: the forward ops whose replay would read it, ascending: replayable, and possibly needed."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops[: self.n_forward]):
            if op.replayable and self.late[index] is not None:
                for value in (*op.inputs, *op.replay_inputs):
                    readers[value].append(index)
        return tuple(map(tuple, readers))

    @cached_property
    def held(self) -> frozenset[int]:
        """Values that the caller holds from their production to the end of the step."""
        return frozenset(self.outputs) | frozenset(self.gradients)

    @cached_property
    def is_forward_value(self) -> tuple[bool, ...]:
        """Per value: whether a forward op produces it."""
        return tuple(v.producer is not None and v.producer < self.n_forward for v in self.values)

    @cached_property
    def late(self) -> tuple[int | None, ...]:
        """Per forward op: the latest backward op by which it must have been replayed, if it is replayed at all.

        The first direct backward read of its outputs, or else the latest `late` among the replayable
        forward ops that read them (DESIGN section 4: late_f). None if neither the backward nor any
        replay can ever need it. Indices are op indices, so >= `n_forward`.
        """
        late: list[int | None] = [None] * self.n_forward
        for index in range(self.n_forward - 1, -1, -1):
            reads: list[int] = []
            for value in self.ops[index].outputs:
                reads += self.backward_readers[value][:1]
                for reader in self.forward_readers[value]:
                    reader_late = late[reader]
                    if reader_late is not None and self.ops[reader].replayable:
                        reads.append(reader_late)
            late[index] = max(reads, default=None)
        return tuple(late)

    @cached_property
    def decidable(self) -> tuple[int, ...]:
        """Values that a planner decides on, ascending: forward values that the backward or a replay can read.

        Values that the caller holds anyway are left out: they are live whatever is decided.
        """
        decidable = []
        for index in range(len(self.values)):
            if not self.is_forward_value[index] or index in self.held:
                continue
            if self.backward_readers[index] or self.replay_readers[index]:
                decidable.append(index)
        return tuple(decidable)

    def given_bytes(self, kind: Kind) -> int:
        """Bytes of all given values of ``kind``, each storage once."""
        return sum(v.size_bytes for v in self.values if v.kind is kind)

    @cached_property
    def last_read(self) -> tuple[int | None, ...]:
        """Per value: the last backward op before which, or at which, it can be read: by that op, or by a replay.

        None if nothing in the backward can read it (DESIGN section 4: last_v). Indices are op indices.
        """
        last: list[int | None] = []
        for index in range(len(self.values)):
            reads = list(self.backward_readers[index][-1:])
            reads += [late for r in self.replay_readers[index] if (late := self.late[r]) is not None]
            last.append(max(reads, default=None))
        return tuple(last)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of ops, constants, shapes, strides and aliases: equal for equal training steps."""
        digest = hashlib.sha256()
        for v in self.values:
            digest.update(repr((v.name, v.size_bytes, v.kind.value, v.producer)).encode())
        for o in self.ops:
            what = (o.name, o.target, o.phase.value, o.inputs, o.outputs, o.signature)
            digest.update(repr((*what, o.replayable, o.replay_inputs, o.random, o.optional, o.in_place)).encode())
        digest.update(repr((self.outputs, self.gradients, self.updates)).encode())
        return digest.hexdigest()[:32]

    def verify(self) -> Graph:
        """Return the graph itself if every invariant of this module's opening text holds.

        Raises:
            GraphError: one does not hold; the message names the op or value.
        """
        _verify(self)
        return self

    def to_networkx(self) -> nx.DiGraph:
        """Return the bipartite graph: nodes ``("op", i)`` and ``("value", i)`` with their fields as attributes."""
        graph: nx.DiGraph = nx.DiGraph(name=self.name)
        for index, value in enumerate(self.values):
            graph.add_node(("value", index), name=value.name, size_bytes=value.size_bytes, kind=value.kind.value)
        for index, op in enumerate(self.ops):
            graph.add_node(("op", index), name=op.name, target=op.target, phase=op.phase.value, flops=op.flops, source=op.source)
            graph.add_edges_from((("value", v), ("op", index)) for v in op.inputs)
            graph.add_edges_from((("op", index), ("value", v)) for v in op.outputs)
        return graph


Fail = Callable[[str, str], NoReturn]


def _verify(graph: Graph) -> None:
    def fail(what: str, where: str) -> NoReturn:
        raise GraphError(f"malformed graph: {what}", where=where)

    n_values = len(graph.values)
    for names, what in (([v.name for v in graph.values], "value"), ([o.name for o in graph.ops], "op")):
        if len(set(names)) != len(names):
            fail(f"two {what}s share a name", Counter(names).most_common(1)[0][0])
    producer: dict[int, int] = {}
    available = {i for i, v in enumerate(graph.values) if v.kind is not Kind.ACTIVATION}
    tangents = {i for i, v in enumerate(graph.values) if v.kind is Kind.TANGENT}
    may_be_missing: set[int] = set()  # outputs of optional ops
    in_backward = False
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD:
            in_backward = True
            if op.replayable:
                fail("a backward op is marked replayable", op.name)
        elif in_backward:
            fail("a forward op follows a backward op", op.name)
        for value in (*op.inputs, *op.replay_inputs, *op.outputs):
            if not 0 <= value < n_values:
                fail(f"value {value} does not exist", op.name)
        if len(set(op.inputs)) != len(op.inputs) or len(set(op.outputs)) != len(op.outputs):
            fail("an op lists a value twice", op.name)
        for value in (*op.inputs, *op.replay_inputs):
            if value not in available:
                fail(f"{graph.values[value].name} is read before it is produced", op.name)
            if not in_backward and value in tangents:
                fail(f"a forward op reads the tangent {graph.values[value].name}", op.name)
        if not in_backward and not may_be_missing.isdisjoint(op.inputs):
            fail("a forward op reads what an optional op makes", op.name)
        if op.optional and op.replayable:
            fail("an optional op is marked replayable", op.name)
        if op.optional:
            may_be_missing.update(op.outputs)
        for value in op.outputs:
            if value in available:
                fail(f"{graph.values[value].name} is produced twice, or is given", op.name)
            available.add(value)
            producer[value] = index
        if op.in_place is not None:
            _verify_in_place(graph, op, fail)
    for index, v in enumerate(graph.values):
        if v.size_bytes < 0:
            fail("negative size", v.name)
        if v.producer != producer.get(index):
            fail("producer does not match the ops", v.name)
        if index not in available:
            fail("an activation has no producer", v.name)
    for index in (*graph.outputs, *graph.gradients, *(i for pair in graph.updates for i in pair)):
        if not 0 <= index < n_values:
            fail(f"value {index} does not exist", "outputs, gradients or updates")
    _verify_updates(graph, fail)


def _verify_updates(graph: Graph, fail: Fail) -> None:
    for new, _ in graph.updates:
        producer = graph.values[new].producer
        given = graph.values[new].kind in STATIC_KINDS
        if not given and (producer is None or producer >= graph.n_forward or graph.ops[producer].optional):
            fail("a buffer is updated with a value that is not there at the end of the forward", graph.values[new].name)


def _verify_in_place(graph: Graph, op: Op, fail: Fail) -> None:
    assert op.in_place is not None
    source, target = op.in_place
    if source not in op.inputs or target not in op.outputs:
        fail("in_place names no input and output of the op", op.name)
    if graph.values[source].kind is not Kind.ACTIVATION:
        fail("in_place would overwrite a given value", op.name)
    if graph.values[source].size_bytes != graph.values[target].size_bytes:
        fail("in_place joins storages of different sizes", op.name)
