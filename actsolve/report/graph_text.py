"""A graph as a table of plain text: one line per op, the same on every run."""

from __future__ import annotations

from collections.abc import Sequence

from actsolve.graph import Graph, Kind, Op
from actsolve.json_file import shown
from actsolve.report.table import aligned
from actsolve.units import format_bytes

_HEADER = ("#", "op", "target", "outputs", "FLOPs", "flags", "source")
_NUMBERS = (0, 4)  # columns aligned to the right


def graph_text(graph: Graph) -> str:
    """Return the table of ops, forward then backward, under a summary of the given values.

    An output is shown with the bytes of its storage, and with ``*`` where the caller holds it to the end
    of the step. Unknown FLOPs are ``?``. Names are escaped where they are not printable.
    """
    table = aligned([_HEADER, *(_row(graph, index, op) for index, op in enumerate(graph.ops))], _NUMBERS, indent="")
    if graph.n_forward < len(graph.ops):
        table.insert(1 + graph.n_forward, "-- backward")
    return "\n".join([*graph_summary(graph), "", *table]) + "\n"


def graph_summary(graph: Graph) -> list[str]:
    """Return a line on the ops, and one for each kind of value: how many, and their bytes."""
    n_backward = len(graph.ops) - graph.n_forward
    lines = [f"graph {shown(graph.name) or '(no name)'}: {graph.n_forward} forward ops, {n_backward} backward ops"]
    for kind in Kind:
        sizes = [v.size_bytes for v in graph.values if v.kind is kind]
        label = "produced" if kind is Kind.ACTIVATION else kind.value
        if sizes:
            lines.append(_count(label, sizes))
    lines.append(_count("to decide", [graph.values[v].size_bytes for v in graph.decidable]))
    lines += [f"  update     {shown(graph.values[b].name)} <- {shown(graph.values[new].name)}" for new, b in graph.updates]
    return lines


def _count(label: str, sizes: Sequence[int]) -> str:
    return f"  {label:<10} {len(sizes):>5} {'value ' if len(sizes) == 1 else 'values'}  {format_bytes(sum(sizes))}"


def _row(graph: Graph, index: int, op: Op) -> tuple[str, ...]:
    outputs = ", ".join(
        f"{shown(graph.values[v].name)}{'*' if v in graph.held else ''} {format_bytes(graph.values[v].size_bytes)}"
        for v in op.outputs
    )
    return (
        str(index),
        shown(op.name),
        shown(op.target),
        outputs,
        format_flops(op.flops),
        _flags(graph, op, index),
        shown(op.source),
    )


def _flags(graph: Graph, op: Op, index: int) -> str:
    flags = []
    if index < graph.n_forward and not op.replayable:
        flags.append(f"no replay: {shown(op.why_not) or 'unknown reason'}")
    if op.random:
        flags.append("random")
    if op.optional:
        flags.append("optional")
    if op.in_place is not None:
        flags.append(f"over {shown(graph.values[op.in_place[0]].name)}")
    return "; ".join(flags)


def format_flops(flops: int | None) -> str:
    """Return ``flops`` with a decimal prefix and three significant places: ``1.23 G``; ``?`` if unknown."""
    if flops is None:
        return "?"
    if flops < 1000:
        return str(flops)
    count = float(flops)
    for prefix in "kMGTPE":
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {prefix}"
    return f"{count:.0f} E"
