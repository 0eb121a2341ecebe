"""The memory/time curve as a picture."""

from __future__ import annotations

import importlib.util
import io
import os

from actsolve.errors import UsageError
from actsolve.frontier import Frontier
from actsolve.json_file import shown, write_bytes
from actsolve.report.frontier_text import drawn_baselines, units

_SIZE_IN, _DPI = (8.0, 5.0), 150


def require_matplotlib() -> None:
    """Raise UsageError unless pictures can be drawn: better now than after two minutes of solving."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "cannot draw a picture", where="--png", why="matplotlib is not installed", try_="pip install 'actsolve[plot]'"
        )


def write_frontier_png(path: str | os.PathLike[str], frontier: Frontier) -> None:
    """Draw the curve, what is proven below it, and the fixed rules, and write them to ``path`` at once.

    Raises:
        UsageError: matplotlib is missing, or the path cannot be written.
    """
    write_bytes(path, frontier_png(frontier), what="picture")


def frontier_png(frontier: Frontier) -> bytes:
    """Return the picture as the bytes of a PNG file.

    Raises:
        UsageError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    points = frontier.points
    (unit, unit_bytes), (seconds, unit_s) = units(frontier)
    budgets = [p.budget_bytes / unit_bytes for p in points]
    axes.plot(budgets, [p.step_s / unit_s for p in points], "o-", color="C0", label="the best plan found", zorder=3)
    base_s = frontier.last.keep_all.step_s
    proven = [
        (x, (base_s + p.planned.bound_s) / unit_s) for x, p in zip(budgets, points, strict=True) if p.planned.bound_s is not None
    ]
    if proven:
        axes.plot([x for x, _ in proven], [y for _, y in proven], ".--", color="C7", label="at least (proven)")
    for index, (name, baseline) in enumerate(drawn_baselines(frontier).items()):
        mark = "xsD^v<>"[index % 7]
        axes.plot(baseline.peak_bytes / unit_bytes, baseline.step_s / unit_s, mark, color=f"C{1 + index % 6}", label=name)
    axes.set(xlabel=f"memory budget, {unit}", ylabel=f"step, {seconds}", title=_plain(shown(frontier.target)))
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _plain(text: str) -> str:
    """A dollar sign would begin a formula."""
    return text.replace("$", r"\$")
