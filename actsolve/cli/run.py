"""``actsolve run``: train with a saved plan."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from actsolve.cli import flags
from actsolve.cli.session import session


def run(
    context: typer.Context,
    target: flags.Target,
    plan: Annotated[Path, typer.Option(metavar="FILE", help="The plan, as optimize --out wrote it.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 10,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 1e-3,
    mem_budget: Annotated[
        str | None, typer.Option(metavar="B", help="What the plan must fit; its own budget by default.", show_default=False)
    ] = None,
    overrides: flags.Overrides = [],  # noqa: B006
    optimizer: flags.Optimizer = "adamw",
    grads: flags.Grads = "none",
    static_bytes: flags.StaticBytes = None,
    reserve: flags.Reserve = None,
    hardware: flags.Hardware = "auto",
    host_budget: flags.HostBudget = None,
    h2d: flags.H2d = None,
    d2h: flags.D2h = None,
    switches: Annotated[
        list[str],
        typer.Option(
            "--switch",
            help="Break one thing, to see what it costs: synchronous, late_out, on_demand, pageable or half_speed.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    out: flags.Out = None,
    as_json: flags.Json = False,
) -> None:
    """Train some steps on the target's batch with a plan that was saved for it; print each loss and the peak."""
    with session(as_json) as s:
        from actsolve.api import module_of
        from actsolve.compiled import as_run
        from actsolve.cost.optimizers import new_optimizer
        from actsolve.plan_file import load_plan
        from actsolve.planning import Listener, planned_from_file
        from actsolve.report.run_text import run_text
        from actsolve.runtime.trainer import Trainer, train
        from actsolve.target import load_target

        broken = flags.switch_called(*switches) if switches else None
        file = load_plan(plan)
        flags.require_writable(out)
        settings = flags.settings(context)
        s.stage(f"building {target}")
        step = load_target(target, overrides)
        listener = Listener(s.stage, s.measuring)
        captured, planned = planned_from_file(step, file, settings, mem_budget=mem_budget, target=target, listener=listener)
        module = module_of(step, captured, planned, broken)
        timeline = planned.timeline if broken is None else broken.timeline(planned)
        trainer = Trainer(
            step, lambda ps: new_optimizer(optimizer, ps, lr), module=module, accumulate=settings.grads == "accumulate"
        )
        trained = train(trainer, steps, tell=lambda i, loss: s.stage(f"step {i} of {steps}: loss {loss:.6g}"))
        content = {
            "target": target,
            "plan": str(plan),
            "switch": switches[0] if switches else None,
            "steps": steps,
            "losses": [loss if isfinite(loss) else None for loss in trained.losses],
            "peak_bytes": trained.peak_bytes,
            "budget_bytes": planned.problem.budget_bytes,
            "predicted_peak_bytes": timeline.peak_bytes,
            "step_s": trained.step_s,
            "predicted_step_s": timeline.step_s,
            "predicted_stall_s": timeline.stall_s,
            "d2h_bytes": planned.timeline.d2h_bytes,
            "h2d_bytes": planned.timeline.h2d_bytes,
            "host_peak_bytes": planned.timeline.host_peak_bytes,
            "notes": list(as_run(planned, captured).notes),
        }
        flags.write_result(out, content)
        s.result(content, run_text(content))
