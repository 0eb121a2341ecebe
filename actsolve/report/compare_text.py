"""Every planner and baseline side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actsolve.json_file import shown
from actsolve.plan import Decision
from actsolve.planned import Attempt, Planned
from actsolve.planners import BASELINES
from actsolve.report.plan_text import link_text
from actsolve.report.table import aligned
from actsolve.units import format_bytes, format_seconds

_AGAINST = ("sqrt_l", "per_layer")
_OVER_THE_LINK = ("recompute_s", "stall_s", "d2h_bytes", "h2d_bytes", "host_peak_bytes")
_OF_THE_STEP = {
    *("target", "budget_bytes", "static_bytes", "static", "host_budget_bytes", "links", "links_source", "capture_s", "cost_s"),
    *("costs", "unknown_costs", "keep_all", "notes"),
}
_SHARED_FIGURES = ("objective_s", "bound_s", "gap", "step_gap", "solve_s", "decisions", "smallest_budget_bytes")

Measured = Mapping[str, Mapping[str, Any]]


def compare_text(found: Mapping[str, Attempt], measured: Measured | None = None) -> str:
    """Return the table of planners, and that of what was measured, as plain text.

    Args:
        found: What each planner made of one step, by name.
        measured: Per planner that was run, the fields of ``measured`` in ``optimize --json``.
    """
    one = next(iter(found.values()))
    budget, static = one.problem.budget_bytes, one.static.total_bytes
    lines = [f"{shown(one.target)} within {format_bytes(budget)} ({budget} bytes), of which {format_bytes(static)} static", ""]
    header = ("simulated", "fits", "peak", "step", "over keep-all", *(f"below {name}" for name in _AGAINST), "proof")
    lines += aligned([header, *(_row(name, attempt, found) for name, attempt in found.items())], {2, 3, 4, 5, 6}, "")
    lines += _offloading_lines(found)
    if measured:
        lines += ["", *_measured_lines(measured, budget)]
    smallest = min((a.smallest_bytes for a in found.values() if a.smallest_bytes is not None), default=None)
    if smallest is not None:
        lines += ["", f"the smallest budget found to work: {format_bytes(smallest)} ({smallest} bytes)"]
    lines += ["", f"costs: {shown(one.problem.costs.source)}"]
    if one.problem.links is not None:
        lines.append(f"link: {link_text(one)}")
    lines += [f"note: {shown(note)}" for note in _notes(found)]
    return "\n".join(lines) + "\n"


def compare_json(found: Mapping[str, Attempt], measured: Measured | None = None) -> dict[str, Any]:
    """Return the same as plain JSON data."""
    one = next(iter(found.values()))
    planners = {name: _figures(name, attempt, found) for name, attempt in found.items()}
    for name, figures in (measured or {}).items():
        planners[name]["measured"] = dict(figures)
    of_the_step = {key: value for key, value in one.as_json().items() if key in _OF_THE_STEP}
    return {**of_the_step, "notes": _notes(found), "planners": planners}


def _notes(found: Mapping[str, Attempt]) -> list[str]:
    """What is to be said of any of them, once."""
    return list(dict.fromkeys(note for attempt in found.values() for note in attempt.notes))


def _figures(name: str, attempt: Attempt, found: Mapping[str, Attempt]) -> dict[str, Any]:
    figures = attempt.as_json()
    predicted = figures["predicted"] or dict.fromkeys(("peak_bytes", "step_s", *_OVER_THE_LINK))
    base_s = attempt.keep_all.step_s
    step_s = predicted["step_s"]
    return {
        "status": figures["status"],
        "fits": attempt.fits,
        "peak_bytes": predicted["peak_bytes"],
        "step_s": step_s,
        "overhead": None if step_s is None or base_s <= 0 else (step_s - base_s) / base_s,
        **{key: predicted[key] for key in _OVER_THE_LINK},
        "below": {other: _below(attempt, found.get(other)) for other in _AGAINST if other != name},
        **{key: figures[key] for key in _SHARED_FIGURES},
        "note": attempt.plan.note,
    }


def _below(attempt: Attempt, other: Attempt | None) -> float | None:
    """The share of the other's step time that this one saves."""
    if not isinstance(attempt, Planned) or not isinstance(other, Planned) or other.timeline.step_s <= 0:
        return None
    return 1 - attempt.timeline.step_s / other.timeline.step_s


def _row(name: str, attempt: Attempt, found: Mapping[str, Attempt]) -> tuple[str, ...]:
    plan = attempt.plan
    if not isinstance(attempt, Planned):
        return (name, "no", "-", "-", "-", *("-" for _ in _AGAINST), shown(plan.note) or plan.status.value)
    step_s, base_s = attempt.timeline.step_s, attempt.keep_all.step_s
    saved = [_below(attempt, found.get(other)) if other != name else None for other in _AGAINST]
    gap = "no bound" if attempt.gap is None else f"gap {attempt.gap:.2%}"
    silent = name in BASELINES and attempt.gap is None
    proof = "" if silent else f"{plan.status.value}, {gap}, {format_seconds(plan.solve_s)}"
    return (
        name,
        "yes" if attempt.fits else "no",
        format_bytes(attempt.timeline.peak_bytes),
        format_seconds(step_s),
        f"{(step_s - base_s) / base_s:.1%}" if base_s > 0 else "-",
        *("-" if s is None else f"{round(s, 4) + 0.0:.1%}" for s in saved),
        "; ".join(part for part in (proof, shown(plan.note)) if part),
    )


def _offloading_lines(found: Mapping[str, Attempt]) -> list[str]:
    """A table of what goes over the link, if anything does."""
    rows: list[tuple[str, ...]] = [("offloading", "values", "out", "back", "stalls", "host memory")]
    for name, attempt in found.items():
        if isinstance(attempt, Planned) and attempt.timeline.d2h_bytes:
            timeline, total = attempt.timeline, attempt.decision_totals()[Decision.OFFLOAD.value]
            sizes = map(format_bytes, (timeline.d2h_bytes, timeline.h2d_bytes))
            host = format_bytes(timeline.host_peak_bytes)
            rows.append((name, str(total["count"]), *sizes, format_seconds(timeline.stall_s), host))
    return ["", *aligned(rows, {1, 2, 3, 4, 5}, "")] if len(rows) > 1 else []


def _measured_lines(measured: Measured, budget_bytes: int) -> list[str]:
    eager = next(iter(measured.values()))
    rows = [
        ("measured here", "fits", "peak", "step", "over eager", "95% interval", "against eager"),
        (
            "eager",
            "yes" if eager["eager_peak_bytes"] <= budget_bytes else "no",
            format_bytes(eager["eager_peak_bytes"]),
            format_seconds(eager["eager_step_s"]),
            *("", "", ""),
        ),
    ]
    for name, m in measured.items():
        ratio, low, high = m["step_ratio"]
        same = m["gradients"] if m["gradients"] == "bitwise" else f"differs by {m['gradients']:.3g}"
        rows.append(
            (
                name,
                "yes" if m["peak_bytes"] <= budget_bytes else "NO",
                format_bytes(m["peak_bytes"]),
                format_seconds(m["step_s"]),
                f"{ratio - 1:+.1%}",
                f"{low - 1:+.1%} to {high - 1:+.1%}",
                same,
            )
        )
    return aligned(rows, {2, 3, 4}, "")
