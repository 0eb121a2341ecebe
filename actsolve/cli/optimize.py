"""``actsolve optimize``: plan a training step; with ``--run`` execute and measure it here."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from actsolve.cli import flags
from actsolve.cli.session import session
from actsolve.errors import InfeasibleBudget
from actsolve.json_file import write_json


def optimize(
    context: typer.Context,
    target: flags.Target,
    mem_budget: flags.MemBudget,
    run: Annotated[bool, typer.Option("--run", help="Train with the plan here, beside the original; measure both.")] = False,
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
    planner: flags.Planner = "milp",
    solver: flags.Solver = "highs",
    gap: flags.Gap = 0.01,
    time_limit: flags.TimeLimit = 60.0,
    keep: flags.Keep = [],  # noqa: B006
    recompute: flags.Recompute = [],  # noqa: B006
    timeline: flags.Timeline = None,
    out: flags.Out = None,
    as_json: flags.Json = False,
) -> None:
    """Plan what to keep, recompute or offload, within a memory budget."""
    with session(as_json) as s:
        from actsolve.api import module_of
        from actsolve.compiled import as_run
        from actsolve.cost.optimizers import new_optimizer
        from actsolve.planning import Listener, plan_training_step
        from actsolve.report.chrome_trace import chrome_trace
        from actsolve.report.plan_text import plan_text
        from actsolve.runtime.measured_run import measure_runs
        from actsolve.smaller_batch import with_batch
        from actsolve.static_memory import parse_budget
        from actsolve.target import Target

        parse_budget(mem_budget)
        flags.require_writable(out)
        flags.require_writable(timeline, "--timeline", "timeline")
        settings = flags.settings(context)
        s.stage(f"building {target}")
        loaded = Target(target)
        step = loaded.step(overrides, fake=flags.is_fake(fake, runs=run, hardware=hardware, shards=shards))
        listener = Listener(s.stage, s.measuring, s.solving)
        try:
            captured, planned = plan_training_step(step, mem_budget, settings, target=target, listener=listener)
        except InfeasibleBudget as error:
            raise with_batch(error, loaded, overrides, settings, listener) from None
        if out is not None:
            planned.plan_file.save(out)
        if timeline is not None:
            write_json(timeline, chrome_trace(planned.timeline), what="timeline")
        measured = None
        if run:
            planned = as_run(planned, captured)
            modules = {"the plan": module_of(step, captured, planned)}
            make = partial(new_optimizer, optimizer)
            found = measure_runs(step, modules, make, accumulate=settings.grads == "accumulate", stage=s.stage)
            measured = found["the plan"].as_json()
        content = planned.as_json() | ({} if measured is None else {"measured": measured})
        s.result(content, plan_text(planned, measured))
