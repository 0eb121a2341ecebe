"""The memory/time curve as a table, and as a plot in characters."""

from __future__ import annotations

from collections import Counter

from actsolve.frontier import BaselinePoint, Frontier, Point
from actsolve.json_file import shown
from actsolve.plan import Decision
from actsolve.report.plan_text import link_text
from actsolve.report.table import aligned
from actsolve.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 79, 22  # characters of the plot: it fits a terminal of the usual width
_MARKERS = "xoszv+"  # of the baselines, in turn; the curve has "*"
_OVER = {
    "backward": "of every schedule that replays in the backward, whatever and however often",
    "global": "of every schedule, whatever it replays and however often",
    "plan-class": "of plans that replay an op once, within the windows that were solved for",
}
_FAR = 1.6  # a baseline is drawn up to so many times the slowest point: one far above would flatten the curve


def frontier_text(frontier: Frontier) -> str:
    """Return the report of a curve as plain text: one line per budget, the fixed rules, the plot, and what is to be said."""
    sections = [
        _headline(frontier),
        _points(frontier),
        _proof(frontier),
        _baselines(frontier),
        plot_lines(frontier),
        _notes(frontier),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(frontier: Frontier) -> list[str]:
    first, last = frontier.points[0], frontier.last
    n = len(frontier.points)
    budgets = f"{n} budget{'s' * (n > 1)} from {format_bytes(first.budget_bytes)}, the smallest found to work"
    keep_all = f"keeping everything takes {format_bytes(last.keep_all.peak_bytes)} and {format_seconds(last.keep_all.step_s)}"
    return [f"{shown(frontier.target)}: {budgets}; {keep_all}; planned in {format_seconds(frontier.solve_s)}"]


def _points(frontier: Frontier) -> list[str]:
    header = ("budget", "share", "peak", "step", "over keep-all", "at least", "gap", *(d.value for d in Decision), "status")
    return aligned([header, *map(_row, frontier.points)], set(range(len(header) - 1)), "")


def _row(point: Point) -> tuple[str, ...]:
    planned = point.planned
    totals = planned.decision_totals()
    return (
        format_bytes(point.budget_bytes),
        _percent(point.share, 0),
        format_bytes(planned.timeline.peak_bytes),
        format_seconds(point.step_s),
        _percent(point.overhead),
        _percent(point.least_overhead),
        _percent(planned.gap),
        *(str(totals[d.value]["count"]) for d in Decision),
        planned.plan.status.value,
    )


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _proof(frontier: Frontier) -> list[str]:
    """What the bounds are, where there are any."""
    over = Counter(point.bound_over for point in frontier.points if point.bound_over is not None)
    if not over:
        return []
    lines = ["at least: proven of the time over keep-all"]
    lines += [f"  at {n} of {len(frontier.points)} budgets, {_OVER[kind]}" for kind, n in sorted(over.items())]
    carried = sum(p.proven_at_bytes not in (None, p.budget_bytes) for p in frontier.points)
    if carried:
        lines.append(f"of these bounds {carried} were proven at a larger budget, which cannot take more time")
    return lines


def _baselines(frontier: Frontier) -> list[str]:
    if not frontier.baselines:
        return []
    base_s = frontier.last.keep_all.step_s
    rows: list[tuple[str, ...]] = [("fixed rules", "needs", "step", "over keep-all")]
    for name, baseline in frontier.baselines.items():
        over = _percent((baseline.step_s - base_s) / base_s if base_s > 0 else None)
        rows.append((name, format_bytes(baseline.peak_bytes), format_seconds(baseline.step_s), over))
    return aligned(rows, {1, 2, 3}, "")


def plot_lines(frontier: Frontier) -> list[str]:
    """Return the curve and the fixed rules as a plot in characters: budgets across, seconds of a step up."""
    import plotext

    (unit, unit_bytes), (seconds, unit_s) = units(frontier)
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(_WIDTH, _HEIGHT)
    plotext.theme("clear")
    curve = [(p.budget_bytes / unit_bytes, p.step_s / unit_s) for p in frontier.points]
    plotext.plot([x for x, _ in curve], [y for _, y in curve], marker="*")
    drawn = drawn_baselines(frontier)
    marks = {name: _MARKERS[index % len(_MARKERS)] for index, name in enumerate(drawn)}
    for name, baseline in drawn.items():
        plotext.scatter([baseline.peak_bytes / unit_bytes], [baseline.step_s / unit_s], marker=marks[name])
    plotext.xlabel(f"budget, {unit}")
    plotext.ylabel(f"step, {seconds}")
    lines = [line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines()]
    # plotext's own legend lies in the upper left corner, where the curve begins.
    lines.append(", ".join(("* the best plan found", *(f"{mark} {name}" for name, mark in marks.items()))))
    above = [name for name in frontier.baselines if name not in drawn]
    return lines + ([f"above the plot: {', '.join(above)}"] if above else [])


def drawn_baselines(frontier: Frontier) -> dict[str, BaselinePoint]:
    """Return the fixed rules that a plot has room for."""
    slowest_s = max(point.step_s for point in frontier.points)
    return {name: b for name, b in frontier.baselines.items() if b.step_s <= _FAR * slowest_s}


def units(frontier: Frontier) -> tuple[tuple[str, int], tuple[str, float]]:
    """Return the unit of bytes and the unit of seconds that a plot's axes are best read in, by name and size."""
    largest = frontier.points[-1].budget_bytes
    size = next(((name, size) for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if largest >= size), ("B", 1))
    slowest_s = max(point.step_s for point in frontier.points)
    return size, ("s", 1.0) if slowest_s >= 1 else ("ms", 1e-3)


def _notes(frontier: Frontier) -> list[str]:
    last = frontier.last
    lines = [f"costs: {shown(last.problem.costs.source)}"]
    if last.problem.links is not None:
        lines.append(f"link: {link_text(last)}")
    return lines + [f"note: {shown(note)}" for note in frontier.notes]
