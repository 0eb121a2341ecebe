"""``actsolve compare``: every planner and baseline side by side."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from actsolve.cli import flags
from actsolve.cli.session import session


def compare(
    context: typer.Context,
    target: flags.Target,
    mem_budget: flags.MemBudget,
    run: Annotated[bool, typer.Option("--run", help="Also train with each plan that fits here, and measure it.")] = False,
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
    time_limit: flags.TimeLimit = 60.0,
    keep: flags.Keep = [],  # noqa: B006
    recompute: flags.Recompute = [],  # noqa: B006
    out: flags.Out = None,
    as_json: flags.Json = False,
) -> None:
    """Show every planner and baseline side by side: peak, step time, and what each costs over keeping everything."""
    with session(as_json) as s:
        from actsolve.api import module_of
        from actsolve.compiled import as_run
        from actsolve.cost.optimizers import new_optimizer
        from actsolve.planned import Planned
        from actsolve.planning import Listener, attempts, prepare
        from actsolve.report.compare_text import compare_json, compare_text
        from actsolve.runtime.measured_run import measure_runs
        from actsolve.static_memory import parse_budget
        from actsolve.target import load_target

        parse_budget(mem_budget)
        flags.require_writable(out)
        settings = flags.settings(context)
        s.stage(f"building {target}")
        step = load_target(target, overrides, fake=flags.is_fake(fake, runs=run, hardware=hardware, shards=shards))
        listener = Listener(s.stage, s.measuring, s.solving)
        prepared = prepare(step, mem_budget, settings, target=target, listener=listener)
        found = attempts(prepared, settings, listener=listener)
        measured = None
        if run:
            found = {n: as_run(a, prepared.captured) if isinstance(a, Planned) else a for n, a in found.items()}
            fitting = {name: a for name, a in found.items() if isinstance(a, Planned) and a.fits}
            modules = {name: module_of(step, prepared.captured, a) for name, a in fitting.items()}
            make = partial(new_optimizer, optimizer)
            measured = measure_runs(step, modules, make, accumulate=settings.grads == "accumulate", stage=s.stage)
        figures = None if measured is None else {name: m.as_json() for name, m in measured.items()}
        content = compare_json(found, figures)
        flags.write_result(out, content)
        s.result(content, compare_text(found, figures))
        if not any(a.fits for a in found.values()):
            raise typer.Exit(3)
