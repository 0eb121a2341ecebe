"""What does it gain to choose between recomputing and offloading for each value, over only the one or only the other?

Real sizes on fake tensors with a profile's costs and link. Per model, profile and budget three problems go to the same planner:
recompute-only has no links, offload-only lets no op be replayed, joint has both. Every plan is checked. The extra time is that of
replays and stalls, as a share of the keep-all step, and so is the gain: by how much the joint step is shorter than the better one
of the other two. Of that, what is beyond the gap is left if the better one is replaced by the bound on it; what is beyond both
gaps, if both are. Bounds are over the planner's windows.

Holds if the joint plan is never slower than another one, and if on each profile at least four models gain at least 1% beyond
the gap at some budget.

    PYTHONPATH=. python examples/benchmarks/offload_gain.py --models vit-l16,resnet50 --hardware a100 --budgets 40%
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace

import common
import torch
from common import Row

from actsolve.check import check
from actsolve.planners import PlannerOptions
from actsolve.planners.milp import milp
from actsolve.problem import Problem
from actsolve.simulate import timeline_of
from actsolve.units import format_bytes

MODELS = ("vit-l16", "resnet50", "unet", "llama-1b", "mlp", "conv-chain")
HARDWARE = ("a100", "4090")
BUDGETS = ("60%", "40%", "30%")
MIN_GAIN = 0.01  # of the keep-all step
MIN_MODELS = 4
TIME_TOLERANCE = 1e-9  # of the keep-all step
OTHERS = ("recompute", "offload")


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each profile and budget."""
    rows = []
    for row, _, problem in common.modelled(name, options):
        keep_all_s = row["keep_all_s"] = problem.base_time_s
        limits = PlannerOptions(time_limit_s=options.time_limit)
        row |= {kind: found(one, keep_all_s, limits) for kind, one in problems(problem).items()}
        row |= gains(row)
        row["missed"] = missed(row)
        rows.append(row)
    return rows


def problems(problem: Problem) -> dict[str, Problem]:
    """Return what is planned for: without links, without replays, and with both."""
    ops = tuple(replace(op, replayable=False, why_not="only offload") for op in problem.graph.ops)
    return {
        "recompute": replace(problem, links=None),
        "offload": replace(problem, graph=replace(problem.graph, ops=ops)),
        "joint": problem,
    }


def found(problem: Problem, keep_all_s: float, limits: PlannerOptions) -> Row:
    """Return what the planner finds; times but that of the solve as shares of the keep-all step."""
    start = time.perf_counter()
    plan = milp(problem, limits)
    result: Row = {"status": plan.status.value, "solve_s": time.perf_counter() - start}
    if not plan.found:
        return result
    timeline = timeline_of(problem, plan)
    check(problem, timeline.schedule)
    bound_s = 0.0 if plan.bound_s is None else min(max(0.0, plan.bound_s), timeline.extra_s)
    return {
        **result,
        "extra": timeline.extra_s / keep_all_s,
        "bound": bound_s / keep_all_s,
        "stalls": timeline.stall_s / keep_all_s,
        "d2h_bytes": timeline.d2h_bytes,
        "h2d_bytes": timeline.h2d_bytes,
    }


def gains(row: Row) -> Row:
    """Return by how much the joint plan is better than the better one of the others, for sure and so far."""
    others = [row[kind] for kind in OTHERS if "extra" in row[kind]]
    if "extra" not in row["joint"] or not others:
        return {}
    joint, better = row["joint"]["extra"], min(others, key=lambda other: other["extra"])
    unproven = [kind for kind in OTHERS if row[kind]["status"] == "unknown"]
    return {
        "gain": better["extra"] - joint,
        "gain_beyond_gap": better["bound"] - joint,
        "gain_beyond_both": -joint if unproven else min(other["bound"] for other in others) - joint,
    }


def missed(row: Row) -> list[str]:
    """Return where the joint plan is the worse one."""
    if "extra" not in row["joint"]:
        fitting = [kind for kind in OTHERS if "extra" in row[kind]]
        why = f"joint is {row['joint']['status']}, and {' and '.join(fitting)} found a plan on {row['hardware']}"
        return [why] if fitting else []
    worse = -row.get("gain", 0.0)
    return [f"joint is slower by {worse:.2e} of the step on {row['hardware']}"] if worse > TIME_TOLERANCE else []


def with_summary(rows: list[Row]) -> list[Row]:
    """Return the rows, and one for each profile that counts the models that gain enough."""
    summaries = []
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        best: dict[str, float] = {}
        for row in rows:
            if row["hardware"] == hardware:
                best[row["model"]] = max(best.get(row["model"], -math.inf), row.get("gain_beyond_gap", -math.inf))
        gaining = [name for name, gain in best.items() if gain >= MIN_GAIN]
        enough = len(gaining) >= min(MIN_MODELS, len(best))
        told = (
            [] if enough else [f"only {len(gaining)} of {len(best)} models gain {MIN_GAIN:.0%}: {', '.join(gaining) or 'none'}"]
        )
        summaries.append(
            {
                "model": f"{len(gaining)} of {len(best)} gain",
                "hardware": hardware,
                "budget": "any",
                "gaining": gaining,
                "missed": told,
            }
        )
    return [*rows, *summaries]


def extra(kind: str):  # type: ignore[no-untyped-def]
    """Return what shows the extra time of a plan, and after a slash its bound where that is less by 0.05% of the step."""

    def show(row: Row) -> str:
        one = row[kind]
        if "extra" not in one:
            return str(one["status"])
        return f"{one['extra']:.2%}" + (f" / {one['bound']:.2%}" if one["extra"] - one["bound"] >= 0.0005 else "")

    return show


def joint_gap(row: Row) -> str:
    """Show the joint plan's gap, and its share of the keep-all step."""
    one = row["joint"]
    missing = one["extra"] - one["bound"]
    return f"{missing / one['extra'] if one['extra'] > 0 else 0.0:.1%} ({missing:.2%})"


def solves(row: Row) -> str:
    """Show the seconds of the three solves."""
    return " + ".join(f"{row[kind]['solve_s']:.0f}" for kind in (*OTHERS, "joint")) + " s"


def gain(row: Row) -> str:
    """Show the gain."""
    if "gaining" in row:
        return ", ".join(row["gaining"]) or "none"
    if "gain" not in row:
        return "only joint" if "extra" in row["joint"] else "-"
    return f"{row['gain']:.2%}"


COLUMNS = {
    "model": lambda row: row["model"],
    "hardware": lambda row: row["hardware"],
    "ops": lambda row: " + ".join(map(str, row["ops"])),
    "budget": lambda row: f"{row['budget']} = {format_bytes(row['budget_bytes'])}" if "ops" in row else row["budget"],
    "recompute only": extra("recompute"),
    "offload only": extra("offload"),
    "joint": lambda row: f"{row['joint']['extra']:.2%}" if "extra" in row["joint"] else row["joint"]["status"],
    "of it stalls": lambda row: f"{row['joint']['stalls']:.2%}",
    "gap (of step)": joint_gap,
    "solve": solves,
    "out": lambda row: format_bytes(row["joint"]["d2h_bytes"]),
    "gain": gain,
    "beyond gap": lambda row: f"{row['gain_beyond_gap']:.2%}",
    "of both": lambda row: f"{row['gain_beyond_both']:.2%}",
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=MODELS, budgets=BUDGETS, time_limit_s=30.0)
    flags.add_argument(
        "--hardware", type=lambda text: text.split(","), default=list(HARDWARE), help=f"profiles; default {','.join(HARDWARE)}"
    )
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    rows = with_summary(common.rows_by_model(rows_of, options))
    sys.exit(common.finish("offloading: gain", rows, COLUMNS, options))
