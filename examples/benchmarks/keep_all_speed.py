"""Does an optimized module cost anything by itself, and is the predicted cost of recomputing right?

The module that keeps everything against eager: the median ratio of at least 40 interleaved pairs of steps is at most 1.03 where
eager takes 200 ms or more, and 1.10 below; no op runs twice. Where eager is faster than that the model runs a second time, its
batch enlarged until it is not. Beside it a plan for a budget (60%): its predicted overhead over keep-all, and the measured one.

    python examples/benchmarks/keep_all_speed.py --models mlp-mini --pairs 40
"""

from __future__ import annotations

import argparse
import math
import sys
from statistics import median

import common
from common import Row, interval, percent

import models_zoo
from actsolve.api import module_of
from actsolve.errors import InfeasibleBudget
from actsolve.planned import Planned
from actsolve.planning import Prepared, planned_by, with_budget
from actsolve.runtime.measure_step import interleaved_times, median_ratio_ci
from actsolve.runtime.trainer import Trainer
from actsolve.schedule import Schedule, StepKind
from actsolve.training_step import TrainingStep
from actsolve.units import format_seconds

MODELS = [*(name for name in models_zoo.names() if name.endswith("-mini"))]
LONG_S = 0.2
MAX_RATIO_LONG, MAX_RATIO_SHORT = 1.03, 1.10
HEADROOM = 1.3  # above 200 ms, for the machine may be quicker later


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget at the model's own batch, and at one that makes eager take 200 ms."""
    batch = options.batch or models_zoo.get(name).settings["batch"]
    rows = rows_at(name, batch, options)
    if (step_s := rows[0]["eager_s"]) < LONG_S and not options.batch and not options.short:
        rows += rows_at(name, math.ceil(batch * HEADROOM * LONG_S / step_s), options)
    return rows


def rows_at(name: str, batch: int, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget at one batch."""
    step, prepared, settings = common.prepared_step(name, options, batch=batch)
    plans = {"keep_all": planned_by(prepared, settings, "keep_all")}
    reasons = {}
    for budget in options.budgets:
        common.tell(f"{name} batch {batch} at {budget}")
        try:
            plans[budget] = planned_by(with_budget(prepared, budget, settings), settings)
        except InfeasibleBudget as error:
            reasons[budget] = error.what
    times = measured(step, prepared, plans, options.pairs)
    return [
        {
            "model": f"{name} x{batch}",
            "budget": budget,
            **keep_all_figures(plans["keep_all"], times),
            **({"reason": reasons[budget]} if budget in reasons else overhead(plans[budget], times, budget)),
        }
        for budget in options.budgets
    ]


def measured(step: TrainingStep, prepared: Prepared, plans: dict[str, Planned], pairs: int) -> dict[str, list[float]]:
    """Return the times of eager and of each plan's module, in turns."""
    trainers: dict[str, Trainer] = {"eager": common.trainer(step)}
    for name, planned in plans.items():
        trainers[name] = common.trainer(step, module_of(step, prepared.captured, planned))
    steps, before = {n: t.step for n, t in trainers.items()}, {n: t.drop_gradients for n, t in trainers.items()}
    return interleaved_times(steps, pairs, before=before)


def keep_all_figures(kept: Planned, times: dict[str, list[float]]) -> Row:
    """Return how the keep-all module does against eager."""
    row: Row = {
        "eager_s": median(times["eager"]),
        "predicted_s": kept.timeline.step_s,
        "ratio": median_ratio_ci(times["keep_all"], times["eager"]),
        "pairs": len(times["eager"]),
        "run_twice": ops_run_twice(kept.schedule),
        "missed": [],
    }
    limit = MAX_RATIO_LONG if row["eager_s"] >= LONG_S else MAX_RATIO_SHORT
    if row["ratio"][0] > limit:
        row["missed"].append(f"keep-all takes {interval(row['ratio'])} of eager, above {limit}")
    if row["run_twice"]:
        row["missed"].append(f"{row['run_twice']} ops run twice")
    return row


def overhead(planned: Planned, times: dict[str, list[float]], budget: str) -> Row:
    """Return a plan's overhead over keep-all, predicted and measured."""
    return {
        "predicted_overhead": planned.timeline.step_s / planned.keep_all.step_s,
        "measured_overhead": median_ratio_ci(times[budget], times["keep_all"]),
    }


def ops_run_twice(schedule: Schedule) -> int:
    """Return how many ops a schedule runs more than once."""
    runs = [s.op for s in schedule.steps if s.kind in (StepKind.COMPUTE, StepKind.REPLAY)]
    return len(runs) - len(set(runs))


COLUMNS = {
    "model": lambda row: row["model"],
    "eager step (ops' sum)": lambda row: f"{format_seconds(row['eager_s'])} ({format_seconds(row['predicted_s'])})",
    "keep-all / eager": lambda row: interval(row["ratio"]),
    "pairs": lambda row: str(row["pairs"]),
    "ops run twice": lambda row: str(row["run_twice"]),
    "budget": lambda row: row["budget"],
    "predicted overhead": lambda row: row.get("reason") or percent(row["predicted_overhead"]),
    "measured overhead": lambda row: " ".join(map(percent, row["measured_overhead"])),
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=MODELS, budgets=("60%",))
    flags.add_argument("--pairs", type=int, default=40, help="how often each step is timed; default 40")
    flags.add_argument("--batch", type=int, help="in place of the models' own")
    flags.add_argument("--short", action="store_true", help="only the models' own batch")
    options = flags.parse_args()
    sys.exit(common.finish("keep-all speed", common.rows_by_model(rows_of, options), COLUMNS, options))
