"""The schedule of a general graph as text for a person: what fits, what it costs, what is proven, what runs again."""

from __future__ import annotations

import math

from actsolve.dag import Dag
from actsolve.graph_plan import GraphPlan
from actsolve.json_file import shown
from actsolve.report.table import aligned
from actsolve.units import format_bytes, format_seconds

_MOST_ROWS = 5


def graph_plan_text(plan: GraphPlan, dag: Dag) -> str:
    """Return the report of a plan that has a schedule."""
    sections = [
        [_headline(plan, dag)],
        ["memory", *_memory(plan)],
        ["time, in the unit of the file", *_time(plan)],
        ["proof", *_proof(plan)],
        _again(plan, dag),
        ["notes", *(f"  {shown(note)}" for note in plan.notes)] if plan.notes else [],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(plan: GraphPlan, dag: Dag) -> str:
    again = plan.runs_again()
    if not again:
        return f"{shown(plan.graph)} fits {format_bytes(plan.budget_bytes)} as it is: nothing runs again"
    nodes = f"{len(again)} of {dag.n_nodes} nodes {'runs' if len(again) == 1 else 'run'} again"
    runs = f"{again.total()} more run{'s' if again.total() > 1 else ''}"
    return f"{shown(plan.graph)} within {format_bytes(plan.budget_bytes)}: {nodes}, {runs} in all, {plan.overhead:.3%} more time"


def _memory(plan: GraphPlan) -> list[str]:
    rows = []
    for label, size in (("budget", plan.budget_bytes), ("peak", plan.peak_bytes or 0), ("plain order", plan.peak_bytes_in_order)):
        share = f"{size / plan.budget_bytes:.1%} of the budget" if plan.budget_bytes and label != "budget" else f"{size} bytes"
        rows.append((label, format_bytes(size), share))
    return aligned(rows, numbers={1})


def _time(plan: GraphPlan) -> list[str]:
    rows, exact = [("every node once", _figure(plan.base_time), "")], isinstance(plan.base_time, int)
    for label, time in (("schedule", plan.objective), ("lower bound", plan.lower_bound)):
        if time is not None:
            over = (time - plan.base_time) / plan.base_time if plan.base_time else 0.0
            rows.append((label, _figure(math.floor(time) if exact else time), f"{over:+.3%}"))
    return aligned(rows, numbers={1, 2})


def _figure(time: float) -> str:
    return str(time) if isinstance(time, int) else f"{time:.6g}"


def _proof(plan: GraphPlan) -> list[str]:
    rows = [
        ("status", f"{plan.status.value}, in {format_seconds(plan.solve_s)}"),
        ("gap", f"{plan.gap:.3%} of the time, {plan.extra_gap:.2%} of what is beyond every node once"),
        ("bound", "global: no schedule takes less in which nodes run first in the order of the file, whatever runs again"),
    ]
    return aligned(rows)


def _again(plan: GraphPlan, dag: Dag) -> list[str]:
    """The nodes whose further runs take most."""
    again = plan.runs_again()
    if not again:
        return []
    ranked = sorted(again, key=lambda node: (-again[node] * dag.time[node], node))
    rows = []
    for node in ranked[:_MOST_ROWS]:
        times = "once more" if again[node] == 1 else f"{again[node]} times more"
        rows.append((dag.names[node], times, _figure(again[node] * dag.time[node]), format_bytes(dag.sizes[node])))
    if rest := ranked[_MOST_ROWS:]:
        total = sum(again[node] * dag.time[node] for node in rest)
        runs = sum(again[node] for node in rest)
        rows.append((f"{len(rest)} more", f"{runs} runs", _figure(total), ""))
    return ["run again most: their time, and the size of their value", *aligned(rows, numbers={2, 3})]
