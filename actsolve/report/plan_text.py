"""A plan as text for a person: what fits, what it costs, where it is paid, and what is not known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from actsolve.graph import Op
from actsolve.json_file import shown
from actsolve.plan import Decision
from actsolve.planned import Attempt, Planned
from actsolve.report.table import aligned
from actsolve.schedule import StepKind
from actsolve.units import format_bytes, format_seconds, format_speed

_MOST_ROWS = 8
_OFF = 2.0  # times as long, or as short, as predicted: then the costs say little
_MOST_UNKNOWN = 5


def plan_text(planned: Planned, measured: Mapping[str, Any] | None = None) -> str:
    """Return the report of a plan: plain text, sections under headings, no line for what there is nothing to say on.

    Args:
        planned: The plan and all that is predicted of it.
        measured: What a run here gave, with the fields of ``measured`` in ``optimize --json``.
    """
    applicable = {name: result for name, result in planned.baselines.items() if result.timeline is not None}
    sections = [
        [_headline(planned)],
        ["memory", *_memory(planned)],
        ["step time", *_time(planned)],
        ["plan", *_proof(planned)],
        ["decisions", *_decisions(planned)],
        ["offloading", *_offloading(planned)] if planned.timeline.d2h_bytes else [],
        _places(planned, "recomputed most, by module", lambda op: _without_numbers(op.module) or "(the step itself)"),
        _places(planned, "recomputed most, by source line", lambda op: op.source or op.module or "(unknown)"),
        ["side by side, simulated", *side_by_side({"this plan": planned, **applicable}, planned)],
        ["measured here", *_measured(planned, measured)] if measured is not None else [],
        ["notes", *(f"  {note}" for note in _notes(planned))] if _notes(planned) else [],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(planned: Planned) -> str:
    target, budget = shown(planned.target), format_bytes(planned.problem.budget_bytes)
    totals = planned.decision_totals()
    parts = []
    if planned.schedule_replays:
        parts.append(_done(totals[Decision.RECOMPUTE.value], "recomputed"))
    if totals[Decision.OFFLOAD.value]["count"]:
        parts.append(_done(totals[Decision.OFFLOAD.value], "offloaded"))
    return f"{target} within {budget}: {'; '.join(parts)}" if parts else f"{target} fits {budget} as it is: nothing is recomputed"


def _done(total: Mapping[str, int], done: str) -> str:
    values = "1 value is" if total["count"] == 1 else f"{total['count']} values are"
    return f"{values} {done}, {format_bytes(total['bytes'])} in all"


def _memory(planned: Planned) -> list[str]:
    budget, peak, everything = planned.problem.budget_bytes, planned.timeline.peak_bytes, planned.keep_all.peak_bytes
    kinds = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(n)}" for kind, n in planned.static.breakdown().items() if n)
    rows = [
        ("budget", format_bytes(budget), f"{budget} bytes"),
        ("predicted peak", format_bytes(peak), f"{peak / budget:.1%} of the budget"),
        ("keeping everything", format_bytes(everything), f"{everything / budget:.1%} of the budget"),
        ("static", format_bytes(planned.static.total_bytes), kinds or "nothing"),
    ]
    return aligned(rows, numbers={1})


def _time(planned: Planned) -> list[str]:
    step_s, base_s = planned.timeline.step_s, planned.keep_all.step_s
    in_forward = f"{_ops(planned.forward_replays)} of it in the forward" if planned.forward_replays else ""
    rows = [
        ("predicted", format_seconds(step_s), f"{_share(planned.objective_s, base_s)} over keeping everything"),
        ("keeping everything", format_seconds(base_s), ""),
        ("of it recomputing", format_seconds(planned.timeline.recompute_s), in_forward),
    ]
    if planned.timeline.d2h_bytes:
        rows.append(("of it waiting for copies", format_seconds(planned.timeline.stall_s), ""))
    return aligned(rows, numbers={1})


def _proof(planned: Planned) -> list[str]:
    plan = planned.plan
    rows = [("status", f"{plan.status.value}, by {shown(plan.planner)} in {format_seconds(plan.solve_s)}")]
    if planned.gap is None or planned.bound_s is None:
        rows.append(("gap", "not known: there is no bound"))
    else:
        rows.append(("gap", f"{planned.gap:.2%} of the extra time, {planned.step_gap or 0:.3%} of the step"))
        rows.append(("plan-class bound", f"{format_seconds(planned.bound_s)} extra, of {format_seconds(planned.objective_s)}"))
    if planned.global_bound_s is not None:
        of = "whatever is replayed and however often" + ("" if plan.bounds_forward else ", in the backward")
        rows.append(("global bound", f"{format_seconds(planned.global_bound_s)} extra, {of}"))
    if plan.note:
        rows.append(("note", shown(plan.note)))
    rows.append(("costs", shown(planned.problem.costs.source) or "of unknown source"))
    if planned.problem.links is not None:
        rows.append(("link", link_text(planned)))
    return aligned(rows)


def _decisions(planned: Planned) -> list[str]:
    totals = planned.decision_totals()
    rows = [
        (name, f"{total['count']} values", format_bytes(total["bytes"]))
        for name, total in totals.items()
        if name != Decision.OFFLOAD.value or total["count"]
    ]
    return aligned(rows, numbers={1, 2})


def _offloading(planned: Planned) -> list[str]:
    """What goes over the link, and the host memory that it takes."""
    timeline, host_budget = planned.timeline, planned.problem.host_budget_bytes
    copies = {out: [c for c in timeline.copies if c.out is out] for out in (True, False)}
    busy_s = {out: sum((c.ended_s or 0.0) - (c.began_s or 0.0) for c in some) for out, some in copies.items()}
    of_budget = "no cap" if host_budget is None else f"{_share(timeline.host_peak_bytes, host_budget)} of its budget"
    if host_budget is not None:
        of_budget += f", {format_bytes(host_budget)} ({host_budget} bytes)"
    rows = [
        ("to the host", format_bytes(timeline.d2h_bytes), _copies(len(copies[True]), busy_s[True], timeline.step_s)),
        ("back", format_bytes(timeline.h2d_bytes), _copies(len(copies[False]), busy_s[False], timeline.step_s)),
        ("stalls", format_seconds(timeline.stall_s), f"{_share(timeline.stall_s, timeline.step_s)} of the step"),
        ("host memory", format_bytes(timeline.host_peak_bytes), of_budget),
    ]
    return aligned(rows, numbers={1})


def _copies(n: int, busy_s: float, step_s: float) -> str:
    return f"{'1 copy' if n == 1 else f'{n} copies'}, {format_seconds(busy_s)}, {_share(busy_s, step_s)} of the step"


def link_text(attempt: Attempt) -> str:
    """Return the speeds of the link that was planned for, and where they come from."""
    links = attempt.problem.links
    if links is None:
        return "none"
    alone = f"{format_speed(links.d2h)} out, {format_speed(links.h2d)} back"
    if links.d2h_both is None and links.h2d_both is None:
        beside = "shared by both directions"
    else:
        beside = f"{format_speed(links.out(beside=True))} and {format_speed(links.back(beside=True))} beside each other"
    return f"{alone}; {beside}" + (f"; {shown(attempt.links_source)}" if attempt.links_source else "")


def _places(planned: Planned, heading: str, place: Callable[[Op], str]) -> list[str]:
    """Where the replays are: runs, seconds, and the bytes of the values that they bring back."""
    runs, seconds, sizes = Counter[str](), Counter[str](), Counter[str]()
    graph, costs = planned.graph, planned.problem.costs
    decidable = frozenset(graph.decidable) - planned.plan.kept - planned.plan.offloaded.keys()
    for step in planned.schedule.steps:
        if step.kind is StepKind.REPLAY and step.op is not None:
            op = graph.ops[step.op]
            key = place(op)
            runs[key] += 1
            seconds[key] += costs.replay_seconds[step.op]  # type: ignore[assignment]  # a Counter of floats
            sizes[key] += sum(graph.values[v].size_bytes for v in op.outputs if v in decidable)
    if not runs:
        return []
    ranked = sorted(runs, key=lambda key: (-seconds[key], key))
    rows = [(shown(key), _ops(runs[key]), format_seconds(seconds[key]), format_bytes(sizes[key])) for key in ranked[:_MOST_ROWS]]
    if rest := ranked[_MOST_ROWS:]:
        left = (sum(counter[key] for key in rest) for counter in (runs, seconds, sizes))
        n, s, b = left
        rows.append((f"{len(rest)} more", _ops(n), format_seconds(s), format_bytes(b)))
    return [heading, *aligned(rows, numbers={1, 2, 3})]


def _ops(n: int) -> str:
    return "1 op" if n == 1 else f"{n} ops"


def _without_numbers(module: str) -> str:
    """``blocks.3.norm`` -> ``blocks.*.norm``: layers that are alike are one row."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def side_by_side(results: Mapping[str, Any], planned: Planned) -> list[str]:
    """Return a table of plans and baselines (anything with a ``timeline``), against keeping everything."""
    rows = [("", "peak", "step", "over keep-all", "fits", "")]
    ours = planned.timeline
    for name, result in results.items():
        timeline = result.timeline
        if timeline is None:
            rows.append((name, "-", "-", "-", "-", shown(result.note)))
            continue
        extra = _share(timeline.step_s - planned.keep_all.step_s, planned.keep_all.step_s)
        saved = timeline.step_s - ours.step_s
        remark = f"this plan saves {_share(saved, timeline.step_s)}" if timeline is not ours and saved > 0 else ""
        remark = "; ".join(part for part in (remark, shown(getattr(result, "note", ""))) if part)
        fits = "yes" if timeline.fits else "no"
        rows.append((name, format_bytes(timeline.peak_bytes), format_seconds(timeline.step_s), extra, fits, remark))
    return aligned(rows, numbers={1, 2, 3})


def _measured(planned: Planned, measured: Mapping[str, Any]) -> list[str]:
    peak, eager_peak = measured["peak_bytes"], measured["eager_peak_bytes"]
    step_s, eager_s, same = measured["step_s"], measured["eager_step_s"], measured["gradients"]
    off = (peak - planned.timeline.peak_bytes + planned.static.reserve) / peak
    within = "within the budget" if peak <= planned.problem.budget_bytes else "OVER THE BUDGET"
    equal = "bitwise equal" if same == "bitwise" else f"largest relative difference {same:.3g}"
    ratio, low, high = (x - 1 for x in measured["step_ratio"])
    interval = f"{ratio:+.1%} (95% interval {low:+.1%} to {high:+.1%}, {measured['pairs']} pairs)"
    rows = [
        ("peak", format_bytes(peak), f"{within}, {off:+.2%} from predicted; eager {format_bytes(eager_peak)}"),
        ("step", format_seconds(step_s), f"{interval} against eager, {format_seconds(eager_s)}"),
        ("against eager", "", f"loss, outputs, gradients, buffers and random state over 3 steps: {equal}"),
    ]
    predicted_s = planned.keep_all.step_s
    if planned.problem.costs.source.startswith("measured") and not 1 / _OFF <= predicted_s / max(eager_s, 1e-9) <= _OFF:
        said = f"keeping everything was to take {format_seconds(predicted_s)}; was the machine busy?"
        rows.append(("costs are off", "", f"{said} A fresh ACTSOLVE_CACHE_DIR measures again"))
    return aligned(rows, numbers={1})


def _notes(planned: Planned) -> list[str]:
    costs, notes = planned.problem.costs, list(map(shown, planned.notes))
    if not planned.loss_inside:
        notes.append("The loss is computed outside the module: memory that it takes is not budgeted. Give loss_fn to include it.")
    if not any(costs.workspace_bytes) and not costs.source.startswith("measured"):
        notes.append("The costs hold no workspace inside ops: a real peak may be higher than predicted by what kernels allocate.")
    if costs.unknown:
        listed = ", ".join(map(shown, costs.unknown[:_MOST_UNKNOWN]))
        more = f" and {len(costs.unknown) - _MOST_UNKNOWN} more" if len(costs.unknown) > _MOST_UNKNOWN else ""
        notes.append(f"Ops of unknown cost, taken as that of their bytes: {listed}{more}.")
    return notes


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "-"
