"""``actsolve trace``: what one training step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from actsolve.cli import flags
from actsolve.cli.session import session

if TYPE_CHECKING:
    from actsolve.graph import Graph
    from actsolve.problem import Costs


def trace(
    target: flags.Target,
    overrides: flags.Overrides = [],  # noqa: B006  # Typer's way to say that an option may be repeated
    hardware: Annotated[
        str | None, typer.Option(help="Also say what each op costs: auto to measure here, or a profile.", show_default=False)
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Leave out the table of ops.")] = False,
    fake: flags.Fake = None,
    out: flags.Out = None,
    as_json: flags.Json = False,
) -> None:
    """Print the annotated graph of a training step: ops, values, bytes, FLOPs, source lines."""
    with session(as_json) as s:
        from actsolve.capture.captured import capture
        from actsolve.graph_file import graph_content, save_graph
        from actsolve.report.graph_text import graph_summary, graph_text
        from actsolve.step_problem import costs_of
        from actsolve.target import load_target

        flags.require_writable(out)
        s.stage(f"building {target}")
        step = load_target(target, overrides, fake=flags.is_fake(fake, runs=False, hardware=hardware))
        s.stage("tracing")
        captured = capture(step, name=target)
        graph = captured.graph
        costs = None
        if hardware is not None:
            s.stage("costing ops")
            costs = costs_of(captured, hardware, s.measuring)
        if out is not None:
            save_graph(out, graph, costs)
        text = "\n".join(graph_summary(graph)) + "\n" if summary or out is not None else graph_text(graph)
        content = {**summary_of(target, graph, costs), "graph": graph_content(graph, costs)}
        s.result(content, text + (f"written to {out}\n" if out is not None else ""))


def summary_of(target: str, graph: Graph, costs: Costs | None) -> dict[str, Any]:
    """Return the figures of a graph."""
    values: dict[str, dict[str, int]] = {}
    for value in graph.values:
        total = values.setdefault(value.kind.value, {"count": 0, "bytes": 0})
        total["count"] += 1
        total["bytes"] += value.size_bytes
    decidable = [graph.values[v].size_bytes for v in graph.decidable]
    return {
        "target": target,
        "fingerprint": graph.fingerprint,
        "forward_ops": graph.n_forward,
        "backward_ops": len(graph.ops) - graph.n_forward,
        "values": values,
        "decidable": {"count": len(decidable), "bytes": sum(decidable)},
        "forward_flops": sum(op.flops or 0 for op in graph.ops[: graph.n_forward]),
        "backward_flops": sum(op.flops or 0 for op in graph.ops[graph.n_forward :]),
        "unknown_flops": [op.name for op in graph.ops if op.flops is None],
        "step_s": None if costs is None else sum(costs.seconds),
    }
