"""Is our plan ever slower than one that the field would use, and how much of their extra time does it save?

Real sizes on fake tensors with a profile's costs. Per model, profile and budget every planner gets the same problem, and its
plan is checked and judged by the same simulator. The extra time is that of replays (and stalls, with --links) as a share of
the keep-all step; "-" where no plan fits or the planner does not apply. The saving against a baseline is the share of its
extra time that ours does without; the mean is over the budgets that both fit.

Holds if no baseline that fits is faster than ours, and none fits where ours finds nothing.

    PYTHONPATH=. python examples/benchmarks/baselines.py --models resnet50,unet --hardware a100
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from functools import partial

import common
import torch
from common import Row

import models_zoo
from actsolve.capture.torch_partitioner import saved_by_torch
from actsolve.check import check
from actsolve.planners import PLANNERS, PlannerOptions, plan
from actsolve.problem import Problem
from actsolve.simulate import timeline_of
from actsolve.units import format_bytes

HARDWARE = ("a100", "4090")
BUDGETS = ("70%", "50%", "35%")
AGAINST = ("sqrt_l", "per_layer", "greedy", "rotor", "torch_budget")
OURS = "milp"
TIME_TOLERANCE = 1e-9  # of the keep-all step


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each profile and budget."""
    rows = []
    for row, prepared, problem in common.modelled(name, options):
        problem = problem if options.links else replace(problem, links=None)
        limits = PlannerOptions(time_limit_s=options.time_limit, torch_saved=saved_by_torch(prepared.captured))
        row["planners"] = {planner: figures(problem, planner, limits) for planner in options.planners}
        row["missed"] = missed(row["planners"])
        rows.append(row)
    return rows


def figures(problem: Problem, planner: str, limits: PlannerOptions) -> Row:
    """Return what a planner makes of it; the extra time as a share of the keep-all step."""
    start = time.perf_counter()
    found = plan(problem, planner, limits)
    result: Row = {"fits": False, "solve_s": time.perf_counter() - start, "note": found.note}
    if found.found:
        timeline = timeline_of(problem, found)
        result |= {"fits": timeline.fits, "extra": timeline.extra_s / problem.base_time_s, "peak_bytes": timeline.peak_bytes}
        if timeline.fits:
            check(problem, timeline.schedule)
    return result


def missed(planners: dict[str, Row]) -> list[str]:
    """Return which baselines are better than ours."""
    ours, told = planners[OURS], []
    for name, other in planners.items():
        if name != OURS and other["fits"]:
            if not ours["fits"]:
                told.append(f"{name} fits, and {OURS} finds nothing")
            elif other["extra"] < ours["extra"] - TIME_TOLERANCE:
                told.append(f"{name} is faster: {other['extra']:.2%} against {ours['extra']:.2%}")
    return told


def with_summary(rows: list[Row]) -> list[Row]:
    """Return the rows, and one that gives the mean saving against each baseline."""
    savings = {}
    for name in dict.fromkeys(name for row in rows for name in row["planners"] if name in AGAINST):
        pairs = [(row["planners"][OURS], row["planners"][name]) for row in rows]
        each = [
            1 - ours["extra"] / other["extra"] for ours, other in pairs if ours["fits"] and other["fits"] and other["extra"] > 0
        ]
        if each:
            savings[name] = {"mean": statistics.mean(each), "least": min(each), "over": len(each)}
    return [*rows, {"model": "mean saving", "hardware": "all", "budget": "any", "savings": savings}]


def listed(text: str) -> list[str]:
    """Return the parts of a list with commas."""
    return text.split(",")


def cell(planner: str, row: Row) -> str:
    """Show the extra time of a planner, or the mean saving against it."""
    if "savings" in row:
        saving = row["savings"][planner]
        return f"{saving['mean']:.0%} of {saving['over']}"
    one = row["planners"][planner]
    return f"{one['extra']:.2%}" if one["fits"] else "-"


COLUMNS = {
    "model": lambda row: row["model"],
    "hardware": lambda row: row["hardware"],
    "ops": lambda row: " + ".join(map(str, row["ops"])),
    "budget": lambda row: f"{row['budget']} = {format_bytes(row['budget_bytes'])}" if "ops" in row else row["budget"],
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=models_zoo.names(), budgets=BUDGETS, time_limit_s=30.0)
    flags.add_argument("--hardware", type=listed, default=list(HARDWARE), help=f"profiles; default {','.join(HARDWARE)}")
    planners = [name for name in PLANNERS if not name.startswith("offload")]
    flags.add_argument("--planners", type=listed, default=planners, help="default all that recompute")
    flags.add_argument("--links", action="store_true", help="let ours offload over the profile's link")
    options = flags.parse_args()
    options.planners = list(dict.fromkeys([OURS, *options.planners]))
    torch.set_num_threads(options.threads)
    rows = with_summary(common.rows_by_model(rows_of, options))
    columns = {**COLUMNS, **{name: partial(cell, name) for name in options.planners}}
    sys.exit(common.finish("baselines: extra time of the step", rows, columns, options))
