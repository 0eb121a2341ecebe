"""Is an optimized module that offloads exact, within its device and its host budget, and well predicted?

For every model and budget, over a link that is emulated: loss, outputs, all gradients, parameters, buffers and random state are
bitwise equal to eager over 3 AdamW steps; the measured peak on the device (host memory not counted) is at most the budget, and
the predicted one within 2% of it; and the host memory taken for what is offloaded is at most the host budget. The budget
at which most bytes are offloaded is planned once more with half of them as its host budget. Each model has to offload
something. A budget that nothing fits is shown with the reason; where nothing fits any of them, the smallest one is tried, too.

The link of a model copies all that it saves in half of its step, each way. What the minis save is small: here values from 1 KiB
are offloaded.

    PYTHONPATH=. python examples/benchmarks/offload_exactness.py --models gpt-mini,unet-mini --budgets 50%,35%
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import common
import exactness
from common import Row, percent
from exactness import MAX_SOLVE_S, gap, measured, missed_in_run, predictions

from actsolve.api import module_of
from actsolve.cost.link_speed import host_budget_of
from actsolve.errors import InfeasibleBudget
from actsolve.module import runtime_of
from actsolve.plan import Decision
from actsolve.planned import Planned
from actsolve.planning import Prepared, link_of, planned_by, with_budget
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes, format_speed

MODELS = [*exactness.MODELS, "resnet50-mini", "vgg16-mini", "mlp-mini"]  # a mini of each family of the zoo
BUDGETS = ("70%", "50%", "35%")
LINK_SHARE = 0.5  # of the keep-all step, in which all saved bytes are copied one way
MIN_OFFLOAD_BYTES = 1024
HALF = 2


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget, and one with half of the host memory that the others took at most."""
    step, prepared, settings = common.prepared_step(name, options)
    prepared, settings = linked(step, prepared, settings)
    rows = [row_of(name, budget, step, prepared, settings) for budget in options.budgets]
    if all("reason" in row for row in rows):  # a model that is nearly all optimizer state: its share above static is small
        rows.append(row_of(name, "min", step, prepared, settings))
    most = max(rows, key=lambda row: row.get("offloaded_bytes", 0))
    if not most.get("offloaded_bytes"):
        rows[-1]["missed"].append("nothing is offloaded at any budget")
        return rows
    problem = replace(prepared.problem, host_budget_bytes=most["offloaded_bytes"] // HALF)
    return [*rows, row_of(name, most["budget"], step, replace(prepared, problem=problem), settings)]


def linked(step: TrainingStep, prepared: Prepared, settings: Settings) -> tuple[Prepared, Settings]:
    """Return it with a link that is emulated, as fast as the model's values ask for."""
    graph = prepared.problem.graph
    saved_bytes = sum(graph.values[v].size_bytes for v in graph.decidable)
    speed = saved_bytes / (LINK_SHARE * prepared.problem.base_time_s)
    settings = replace(settings, h2d=speed, d2h=speed)
    problem = replace(
        prepared.problem,
        links=link_of(step, settings).links,
        host_budget_bytes=host_budget_of(settings.hardware, None),
        min_offload_bytes=MIN_OFFLOAD_BYTES,
    )
    return replace(prepared, problem=problem), settings


def row_of(name: str, budget: str, step: TrainingStep, prepared: Prepared, settings: Settings) -> Row:
    """Plan for a budget, run it, and return what was found."""
    common.tell(f"{name} at {budget}")
    within = with_budget(prepared, budget, settings)
    problem = within.problem
    row: Row = {
        "model": name,
        "budget": budget,
        "budget_bytes": problem.budget_bytes,
        "host_budget_bytes": problem.host_budget_bytes,
        "link_bytes_per_s": settings.d2h,
    }
    try:
        planned = planned_by(within, settings)
    except InfeasibleBudget as error:
        return {**row, "reason": f"exit {error.exit_code}: {error.what}; {error.where}; {error.why}", "missed": []}
    module = module_of(step, prepared.captured, planned)
    row.update(predictions(planned), **decisions(planned), **measured(step, module, planned))
    runtime = runtime_of(module)
    assert runtime is not None and runtime.first is not None
    engine = runtime.first.backward.engine
    row["arena_bytes"] = 0 if engine is None else engine.n_arenas * engine.host_bytes
    row["missed"] = missed(row)
    return row


def decisions(planned: Planned) -> Row:
    """Return what is offloaded and what is recomputed."""
    totals = planned.decision_totals()
    offloaded, recomputed = totals[Decision.OFFLOAD.value], totals[Decision.RECOMPUTE.value]
    return {
        "n_offloaded": offloaded["count"],
        "offloaded_bytes": offloaded["bytes"],
        "n_recomputed": recomputed["count"],
        "copied_bytes": planned.timeline.d2h_bytes + planned.timeline.h2d_bytes,
        "stalls": planned.timeline.stall_s / planned.keep_all.step_s,
    }


def missed(row: Row) -> list[str]:
    """Return what does not hold of what is to be shown."""
    found = missed_in_run(row)
    if row["arena_bytes"] > row["host_budget_bytes"]:
        found.append(f"{row['arena_bytes']} bytes of host memory, of {row['host_budget_bytes']}")
    if row["arena_bytes"] < row["offloaded_bytes"]:
        found.append(f"{row['offloaded_bytes']} bytes offloaded, and {row['arena_bytes']} of host memory")
    return found


COLUMNS = {
    "model": lambda row: row["model"],
    "link": lambda row: format_speed(row["link_bytes_per_s"]),
    "budget": lambda row: f"{row['budget']} = {format_bytes(row['budget_bytes'])}",
    "exact": lambda row: row["reason"] if "reason" in row else "bitwise" if row["difference"] is None else "NO",
    "peak / budget": lambda row: f"{row['measured_peak_bytes'] / row['budget_bytes']:.4f}",
    "predicted / measured": lambda row: f"{row['peak_ratio']:.4f}",
    "offloaded": lambda row: f"{row['n_offloaded']}, {format_bytes(row['offloaded_bytes'])}",
    "arena / host budget": lambda row: f"{format_bytes(row['arena_bytes'])} / {format_bytes(row['host_budget_bytes'])}",
    "recomputed": lambda row: str(row["n_recomputed"]),
    "gap (of step)": gap,
    "overhead": lambda row: percent(row["overhead"]),
    "solve": lambda row: f"{row['solve_s']:.1f} s",
}

if __name__ == "__main__":
    options = common.parser(__doc__, models=MODELS, budgets=BUDGETS, time_limit_s=MAX_SOLVE_S).parse_args()
    sys.exit(common.finish("offloading: exactness", common.rows_by_model(rows_of, options), COLUMNS, options))
