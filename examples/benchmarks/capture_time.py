"""How long until a model is planned for, and how long the second time?

Every model of the zoo at half of what keeping everything needs above static memory: those of real size on fake tensors with a
profile's costs, the mini ones with costs that are measured here. Each is planned for twice, in two processes, with a cache
directory of the benchmark's own: empty first, then as the first run left it. Seconds are since the process had its imports.
Nothing is offloaded unless with --links.

Holds if gpt-small is built, captured and costed in under 20 s, and if no second run measures an op or solves again. That nothing
fits is no miss, and is found out again: only a plan can be checked, and so only plans are kept.

    python examples/benchmarks/capture_time.py --models gpt-small,gpt-mini
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable

import common
from common import Row
from torch._subclasses import FakeTensorMode

import models_zoo
from actsolve.errors import InfeasibleBudget
from actsolve.planning import Listener, planned_by, prepare, with_budget
from actsolve.settings import Settings
from actsolve.units import format_bytes

MAX_CAPTURE_S = {"gpt-small": 20.0}
_MINI = "-mini"


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return what one run takes, from building the model to its plan."""
    real = not name.endswith(_MINI)
    host_budget_bytes = None if options.links else 0
    hardware = options.hardware if real else "auto"
    settings = Settings(hardware=hardware, time_limit_s=options.time_limit, host_budget_bytes=host_budget_bytes)
    measured = 0

    def measuring(done: int, _: int) -> None:
        nonlocal measured
        measured = done

    start = time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True) if real else contextlib.nullcontext():
        step = models_zoo.get(name)()
    built_s = time.perf_counter() - start
    listener = Listener(measuring=measuring)
    prepared = with_budget(prepare(step, "100%", settings, target=name, listener=listener), options.budget, settings)
    row: Row = {
        "model": name,
        "hardware": hardware,
        "budget": options.budget,
        "budget_bytes": prepared.problem.budget_bytes,
        "ops": [prepared.captured.graph.n_forward, len(prepared.captured.graph.ops) - prepared.captured.graph.n_forward],
        "build_s": built_s,
        "capture_s": prepared.capture_s,
        "cost_s": prepared.cost_s,
        "measured": measured,
    }
    try:
        planned = planned_by(prepared, settings)
    except InfeasibleBudget as error:
        row["nothing"] = error.what
    else:
        found = planned.plan
        row |= {"solve_s": found.solve_s, "earlier_s": found.earlier_s, "status": found.status.value, "gap": planned.gap}
    row["total_s"] = time.perf_counter() - start
    return [row]


def compared(first: Row, second: Row) -> Row:
    """Return both runs as one row."""
    shared = ("model", "hardware", "budget", "budget_bytes", "ops")
    return {**{key: first[key] for key in shared}, "first": first, "second": second, "missed": missed(first, second)}


def missed(first: Row, second: Row) -> list[str]:
    """Return what does not hold of two runs."""
    told = []
    captured_s = first["build_s"] + first["capture_s"] + first["cost_s"]
    if captured_s > MAX_CAPTURE_S.get(first["model"], float("inf")):
        told.append(f"{captured_s:.1f} s until it is captured and costed")
    if second["measured"]:
        told.append(f"the second run measures {second['measured']} ops again")
    if "solve_s" in second and second["earlier_s"] is None:
        told.append("the second run solves again")
    return told


def seconds(which: str, key: str) -> Callable[[Row], str]:
    """Return what shows the seconds of one run."""
    return lambda row: f"{row[which][key]:.2f} s"


def outcome(row: Row) -> str:
    """Show what the first run found."""
    first = row["first"]
    if "nothing" in first:
        return "nothing fits"
    return f"{first['status']}, " + ("no bound" if first["gap"] is None else f"{first['gap']:.2%}")


COLUMNS = {
    "model": lambda row: row["model"],
    "hardware": lambda row: row["hardware"],
    "ops": lambda row: " + ".join(map(str, row["ops"])),
    "budget": lambda row: f"{row['budget']} = {format_bytes(row['budget_bytes'])}",
    "build": seconds("first", "build_s"),
    "capture": seconds("first", "capture_s"),
    "cost": seconds("first", "cost_s"),
    "solve": seconds("first", "solve_s"),
    "all": seconds("first", "total_s"),
    "status, gap": outcome,
    "again: capture": seconds("second", "capture_s"),
    "again: cost": seconds("second", "cost_s"),
    "again: solve": seconds("second", "solve_s"),
    "again: all": seconds("second", "total_s"),
}


def main() -> int:
    flags = common.parser(__doc__, models=models_zoo.names(), time_limit_s=30.0)
    flags.add_argument("--budget", default="50%", help="default 50%%")
    flags.add_argument("--hardware", default="a100", help="profile for models of real size; default a100")
    flags.add_argument("--links", action="store_true", help="let values be offloaded over the profile's link")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"ACTSOLVE_CACHE_DIR": directory, "ACTSOLVE_PLAN_CACHE": "on"}
        first, second = (common.rows_by_model(rows_of, options) for _ in range(2))
    rows = list(map(compared, first, second))
    return common.finish("time until a model is planned for, at first and again", rows, COLUMNS, options)


if __name__ == "__main__":
    sys.exit(main())
