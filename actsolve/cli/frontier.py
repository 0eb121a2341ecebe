"""``actsolve frontier``: the memory/time curve."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from actsolve.cli import flags
from actsolve.cli.session import session

Points = Annotated[int, typer.Option(metavar="N", help="How many budgets, both ends included.", rich_help_panel="How to plan")]
Png = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the curve to this file.", rich_help_panel="Output", show_default=False),
]
TimeLimit = Annotated[float, typer.Option(metavar="SECONDS", help="For all solves together.", rich_help_panel="How to plan")]


def frontier(
    context: typer.Context,
    target: flags.Target,
    points: Points = 12,
    overrides: flags.Overrides = [],  # noqa: B006
    fake: flags.Fake = None,
    optimizer: flags.Optimizer = "adamw",
    grads: flags.Grads = "none",
    shards: flags.Shards = 1,
    static_bytes: flags.StaticBytes = None,
    reserve: flags.Reserve = None,
    hardware: flags.Hardware = "auto",
    host_budget: flags.HostBudget = None,
    h2d: flags.H2d = None,
    d2h: flags.D2h = None,
    solver: flags.Solver = "highs",
    gap: flags.Gap = 0.01,
    time_limit: TimeLimit = 120.0,
    keep: flags.Keep = [],  # noqa: B006
    recompute: flags.Recompute = [],  # noqa: B006
    png: Png = None,
    out: flags.Out = None,
    as_json: flags.Json = False,
) -> None:
    """Show how fast a step can be for each memory budget, from the smallest that works to keeping everything."""
    with session(as_json) as s:
        from actsolve.frontier_planning import frontier as frontier_of
        from actsolve.frontier_planning import require_points
        from actsolve.planning import Listener, prepare
        from actsolve.report.frontier_png import require_matplotlib, write_frontier_png
        from actsolve.report.frontier_text import frontier_text
        from actsolve.target import load_target

        require_points(points)
        flags.require_writable(out)
        flags.require_writable(png, "--png", "picture")
        if png is not None:
            require_matplotlib()
        settings = flags.settings(context)
        s.stage(f"building {target}")
        step = load_target(target, overrides, fake=flags.is_fake(fake, runs=False, hardware=hardware, shards=shards))
        listener = Listener(s.stage, s.measuring, s.solving)
        prepared = prepare(step, "100%", settings, target=target, listener=listener)
        with _interrupts() as pressed:
            found = frontier_of(prepared, settings, points, listener=listener, stop=pressed)
        content = found.as_json()
        flags.write_result(out, content)
        if png is not None:
            write_frontier_png(png, found)
        s.result(content, frontier_text(found))


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield what tells whether Ctrl-C was pressed: a solve takes it as its end, and does not pass it on."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        assert callable(before)
        before(number, frame)

    installed = False
    if callable(before):
        with contextlib.suppress(ValueError):  # not in the main thread, which alone gets signals
            signal.signal(signal.SIGINT, note)
            installed = True
    try:
        yield lambda: bool(pressed)
    finally:
        if installed:
            signal.signal(signal.SIGINT, before)
