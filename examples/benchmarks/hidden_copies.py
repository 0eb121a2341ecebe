"""Are copies hidden as planned, and does each thing that breaks that cost what the simulator says?

Over an emulated link, with one computing thread, each model's step is timed in turns: keeping everything; the plan, which
offloads; the plan with one thing broken (`actsolve.runtime.switches`); and the baseline that offloads everything and waits for
each copy. Shown as ratios to keeping everything, predicted beside measured. Holds if the plan takes at most 1.05 of keep-all and
the synchronous baseline at least 1.25; if the plan's step is predicted to 10%, and each other one's to 20%. Where everything is
offloaded the link is the bottleneck: there the predicted stalls are to show up as measured.

    PYTHONPATH=. python examples/benchmarks/hidden_copies.py --threads 1
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import common
import torch
from common import Row, percent

import models_zoo
from actsolve.api import module_of
from actsolve.planned import Planned
from actsolve.planning import Prepared, planned_by, prepare, with_budget
from actsolve.runtime.measure_step import interleaved_times, median_ratio_ci
from actsolve.runtime.switches import SWITCHES, host_copy_bytes_per_s
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.simulate import Timeline
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes, format_seconds, format_speed

SIZES: dict[str, dict[str, Any]] = {
    "gpt-mini": {"width": 384, "batch": 4, "seq": 256},
    "unet-mini": {"width": 16, "batch": 4, "image": (128, 192)},
}
SHARE = {"gpt-mini": "70%", "unet-mini": "75%"}
HIDDEN = 1.5  # times the speed at which what keep-all saves crosses the link once in a forward
MAX_PLANNED, MIN_SYNC = 1.05, 1.25
MAX_ERROR, MAX_SWITCH_ERROR = 0.10, 0.20
UNLIMITED = 1 << 62


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each way to run the model's step."""
    torch.manual_seed(0)
    step = models_zoo.get(name)(**SIZES.get(name, {}))
    settings = Settings(time_limit_s=options.time_limit, optimizer="none", h2d=1e9, d2h=1e9)
    prepared = prepare(step, "100%", settings, target=name)
    settings = replace(settings, **dict.fromkeys(("h2d", "d2h"), speed_of(prepared)))
    prepared = prepare(step, "100%", settings, target=name)
    within = with_budget(prepared, SHARE.get(name, "75%"), settings)
    planned = planned_by(within, settings)
    common.tell(f"{name}: {len(planned.plan.offloaded)} values offloaded, {format_speed(settings.d2h or 0)}")
    unlimited = replace(prepared, problem=replace(prepared.problem, budget_bytes=UNLIMITED))
    others = {n: planned_by(unlimited, settings, n) for n in ("keep_all", "offload_sync")}
    modules = {"keep-all": module_of(step, prepared.captured, others["keep_all"])}
    modules["planned"] = module_of(step, prepared.captured, planned)
    timelines = {"keep-all": others["keep_all"].timeline, "planned": planned.timeline}
    staging = host_copy_bytes_per_s()
    for switch, what in SWITCHES.items():
        modules[switch] = module_of(step, prepared.captured, planned, what)
        timelines[switch] = what.timeline(planned, staging)
    others["offload_all"] = planned_by(within, settings, "offload_all")
    for baseline in ("offload_all", "offload_sync"):
        modules[baseline] = module_of(step, prepared.captured, others[baseline])
        timelines[baseline] = others[baseline].timeline
    times = timed(step, modules, options.pairs)
    return [row_of(name, how, planned, timelines, times) for how in modules]


def speed_of(prepared: Prepared) -> float:
    """Return bytes per second at which copies of what is saved can hide."""
    problem = prepared.problem
    forward_s = sum(problem.costs.seconds[: problem.graph.n_forward])
    saved = sum(problem.graph.values[v].size_bytes for v in problem.graph.decidable if problem.graph.backward_readers[v])
    return HIDDEN * saved / forward_s / 2


def timed(step: TrainingStep, modules: dict[str, torch.nn.Module], pairs: int) -> dict[str, list[float]]:
    """Return the times of forward and backward of each module, in turns."""
    trainers = {name: Trainer(step, lambda _: None, module=module) for name, module in modules.items()}
    steps, before = {n: t.step for n, t in trainers.items()}, {n: t.drop_gradients for n, t in trainers.items()}
    return interleaved_times(steps, pairs, before=before)


def row_of(name: str, how: str, planned: Planned, timelines: dict[str, Timeline], times: dict[str, list[float]]) -> Row:
    """Return what is predicted and measured of one way to run, as ratios to keep-all."""
    base, timeline = timelines["keep-all"], timelines[how]
    ratio = median_ratio_ci(times[how], times["keep-all"])
    row: Row = {
        "model": name,
        "budget": how,
        "links": [getattr(planned.problem.links, n) for n in ("d2h", "h2d")],
        "moved_bytes": timeline.d2h_bytes,
        "step_s": median(times[how]),
        "predicted_s": timeline.step_s,
        "stall_s": timeline.stall_s,
        "predicted": timeline.step_s / base.step_s,
        "measured": ratio,
        "missed": [],
    }
    row["error"] = row["predicted"] / ratio[0] - 1
    row["measured_extra_s"] = row["step_s"] - median(times["keep-all"])
    limit = MAX_ERROR if how == "planned" else MAX_SWITCH_ERROR
    if abs(row["error"]) > limit:
        row["missed"].append(f"predicted {row['predicted']:.3f} of keep-all, measured {ratio[0]:.3f}")
    if how == "planned" and ratio[0] > MAX_PLANNED:
        row["missed"].append(f"takes {ratio[0]:.3f} of keep-all, above {MAX_PLANNED}")
    if how == "offload_sync" and ratio[0] < MIN_SYNC:
        row["missed"].append(f"takes {ratio[0]:.3f} of keep-all, below {MIN_SYNC}")
    return row


COLUMNS = {
    "model": lambda row: row["model"],
    "run as": lambda row: row["budget"],
    "link": lambda row: format_speed(row["links"][0]),
    "out": lambda row: format_bytes(row["moved_bytes"]),
    "step": lambda row: format_seconds(row["step_s"]),
    "ops' sum and stalls": lambda row: f"{format_seconds(row['predicted_s'])}, {format_seconds(row['stall_s'])}",
    "over keep-all": lambda row: format_seconds(row["measured_extra_s"]),
    "predicted / keep-all": lambda row: f"{row['predicted']:.3f}",
    "measured / keep-all": lambda row: common.interval(row["measured"]),
    "error": lambda row: percent(1 + row["error"]),
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=list(SIZES), time_limit_s=30.0)
    flags.add_argument("--pairs", type=int, default=12, help="how often each step is timed; default 12")
    flags.set_defaults(threads=1)
    options = flags.parse_args()
    sys.exit(common.finish("hidden copies", common.rows_by_model(rows_of, options), COLUMNS, options))
