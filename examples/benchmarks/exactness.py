"""Is the optimized module exact, within its budget, well predicted and well planned?

For every model and budget, in training mode with dropout and batch norm: loss, outputs, all gradients, parameters, buffers and
random state are bitwise equal to eager over 3 AdamW steps; the measured peak (allocator level, in-op workspace included) is at
most the budget, and the predicted peak within 2% of it; the gap is at most 1% after at most 10 s; and the simulated step is no
slower than any baseline that fits. A budget that nothing fits is shown with the reason.

    python examples/benchmarks/exactness.py --models gpt-mini,unet-mini --budgets 60%,min
"""

from __future__ import annotations

import argparse
import sys

import common
import torch
from common import Row, percent

from actsolve.api import module_of
from actsolve.errors import InfeasibleBudget
from actsolve.planned import Planned
from actsolve.planning import planned_by, with_budget
from actsolve.runtime.exactness import largest_difference
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes

MODELS = ["gpt-mini", "llama-mini", "bert-mini", "vit-mini", "resnet18-mini", "mobilenet_v2-mini", "unet-mini", "conv-chain-mini"]
BUDGETS = ("80%", "60%", "45%", "min")
STEPS = 3
MAX_PEAK_ERROR = 0.02
MAX_GAP = 0.01
MAX_STEP_GAP = 0.0005  # of the step time: enough for "optimal" where the extra time is tiny
MAX_SOLVE_S = 10.0
TIME_TOLERANCE = 1 + 1e-9


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget."""
    step, prepared, settings = common.prepared_step(name, options)
    rows = []
    for budget in options.budgets:
        common.tell(f"{name} at {budget}")
        row: Row = {"model": name, "budget": budget}
        rows.append(row)
        within = with_budget(prepared, budget, settings)
        row["budget_bytes"] = within.problem.budget_bytes
        try:
            planned = planned_by(within, settings)
        except InfeasibleBudget as error:
            # Its minimum is a budget that a plan was found for: that one may not fail.
            row.update(reason=f"exit {error.exit_code}: {error.what}; {error.where}; {error.why}", missed=[])
            if budget == "min":
                row["missed"].append("no plan for the smallest budget")
            continue
        module = module_of(step, prepared.captured, planned)
        row.update(predictions(planned), **measured(step, module, planned))
        row["missed"] = missed(row)
    return rows


def measured(step: TrainingStep, module: torch.nn.Module, planned: Planned) -> Row:
    """Return what running says."""
    difference = largest_difference(common.trainer(step), common.trainer(step, module), STEPS)
    peak_bytes = common.peak_bytes(common.trainer(step, module))
    return {
        "difference": difference,
        "measured_peak_bytes": peak_bytes,
        "peak_ratio": planned.timeline.peak_bytes / peak_bytes,
    }


def predictions(planned: Planned) -> Row:
    """Return what planning says."""
    step_s = planned.timeline.step_s
    return {
        "predicted_peak_bytes": planned.timeline.peak_bytes,
        "status": planned.plan.status.value,
        "gap": planned.gap,
        "step_gap": planned.step_gap,
        "solve_s": planned.plan.solve_s,
        "overhead": step_s / planned.keep_all.step_s,
        "against": {
            baseline: {"ratio": step_s / result.timeline.step_s, "fits": result.timeline.fits}
            for baseline, result in planned.baselines.items()
            if result.timeline is not None
        },
    }


def missed(row: Row) -> list[str]:
    """Return what does not hold of what is to be shown."""
    found = missed_in_run(row)
    if row["gap"] is None or (row["gap"] > MAX_GAP and row["step_gap"] > MAX_STEP_GAP):
        found.append("no bound" if row["gap"] is None else f"gap {row['gap']:.1%} of the extra time")
    if row["solve_s"] > MAX_SOLVE_S:
        found.append(f"solved in {row['solve_s']:.1f} s")
    found += [
        f"slower than {name}, which fits"
        for name, other in row["against"].items()
        if other["fits"] and other["ratio"] > TIME_TOLERANCE
    ]
    return found


def missed_in_run(row: Row) -> list[str]:
    """Return what of it does not hold of `measured`."""
    found = []
    if row["difference"] is not None:
        found.append(f"differs from eager by {row['difference']:.1e}")
    if row["measured_peak_bytes"] > row["budget_bytes"]:
        found.append(f"measured peak {row['measured_peak_bytes'] / row['budget_bytes']:.4f} of the budget")
    if abs(row["peak_ratio"] - 1) > MAX_PEAK_ERROR:
        found.append(f"predicted peak {row['peak_ratio']:.3f} of the measured one")
    return found


def against(baseline: str):  # type: ignore[no-untyped-def]
    """Return what shows how much faster than a baseline the step is; in brackets where the baseline does not fit."""

    def show(row: Row) -> str:
        other = row["against"][baseline]
        return percent(other["ratio"]) if other["fits"] else f"({percent(other['ratio'])})"

    return show


def gap(row: Row) -> str:
    """Show the gap, and its share of the step time."""
    return "no bound" if row["gap"] is None else f"{row['gap']:.1%} ({row['step_gap']:.2%})"


COLUMNS = {
    "model": lambda row: row["model"],
    "budget": lambda row: f"{row['budget']} = {format_bytes(row['budget_bytes'])}",
    "exact": lambda row: row["reason"] if "reason" in row else "bitwise" if row["difference"] is None else "NO",
    "peak / budget": lambda row: f"{row['measured_peak_bytes'] / row['budget_bytes']:.4f}",
    "predicted / measured": lambda row: f"{row['peak_ratio']:.4f}",
    "status": lambda row: row["status"],
    "gap (of step)": gap,
    "solve": lambda row: f"{row['solve_s']:.1f} s",
    "overhead": lambda row: percent(row["overhead"]),
    "vs sqrt_l": against("sqrt_l"),
    "vs per_layer": against("per_layer"),
}

if __name__ == "__main__":
    options = common.parser(__doc__, models=MODELS, budgets=BUDGETS, time_limit_s=MAX_SOLVE_S).parse_args()
    sys.exit(common.finish("exactness", common.rows_by_model(rows_of, options), COLUMNS, options))
