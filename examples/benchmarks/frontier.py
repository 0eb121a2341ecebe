"""Is the memory/time curve what solving each of its budgets alone gives, and does it take at most two minutes?

The curve is drawn as `actsolve frontier` does, each budget seeded with its neighbours' plans and one time limit for all. Then
each budget is solved anew without seeds. The two agree within their gaps where neither plan refutes the other's bound, by more
than 1% of it and 0.05% of the step. Where the lone plan is faster by more than that all the same, it is said. More budget must
never cost time.

The curve need not be convex. A break is a budget whose extra time lies above the line between its neighbours'; it is proven
where even its bound does.

    PYTHONPATH=. python examples/benchmarks/frontier.py --models gpt-small,gpt-small-recompute,resnet50
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import common
import torch
from common import Row
from exactness import MAX_GAP, MAX_STEP_GAP
from torch._subclasses import FakeTensorMode

import models_zoo
from actsolve.errors import InfeasibleBudget
from actsolve.frontier import Frontier, Point
from actsolve.frontier_planning import frontier
from actsolve.planned import Planned
from actsolve.planning import planned_by, prepare, with_budget
from actsolve.settings import Settings
from actsolve.units import format_bytes

MAX_S = 120.0  # tracing and costing included
_ZERO_S = 1e-9


@dataclass(frozen=True)
class Case:
    """A model on a device.

    Attributes:
        size: Its name in the zoo.
        settings: The device, and whether anything is offloaded.
        overrides: Of that size.
    """

    size: str
    settings: Settings
    overrides: dict[str, Any] = field(default_factory=dict)


_A100 = Settings(hardware="a100", time_limit_s=MAX_S)
CASES = {
    "gpt-small": Case("gpt-small", _A100),
    "gpt-small-recompute": Case("gpt-small", replace(_A100, host_budget_bytes=0)),
    "resnet50": Case("resnet50", _A100),
    "unet": Case("unet", replace(_A100, host_budget_bytes=0)),
    "gpt-mini": Case("gpt-mini", replace(_A100, host_budget_bytes=0, time_limit_s=10.0), {"layers": 3}),
}


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget; in the last one, what is to be said of the whole curve."""
    case = CASES[name]
    start = time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = models_zoo.get(case.size)(**case.overrides)
    prepared = prepare(step, "100%", case.settings, target=name)
    curve = frontier(prepared, case.settings, options.points).verify()
    total_s = time.perf_counter() - start
    alone = replace(case.settings, time_limit_s=options.time_limit)
    rows = []
    for index, point in enumerate(curve.points):
        common.tell(f"{name}: {index + 1} of {len(curve.points)} alone")
        row = {"model": name, "budget": format_bytes(point.budget_bytes), "share": point.share, **point.as_json()}
        row["break"] = break_at(curve, index)
        try:
            row.update(against(point, planned_by(with_budget(prepared, point.budget_bytes, case.settings), alone)))
        except InfeasibleBudget as error:
            row.update(alone=None, missed=[], reason=error.what)  # what the curve has there, solving alone does not find
        rows.append(row)
    rows[-1]["total_s"] = total_s
    rows[-1]["alone_s"] = sum(row["alone"]["solve_s"] for row in rows if row["alone"] is not None)
    rows[-1]["missed"] += missed(curve, total_s)
    return rows


def against(point: Point, alone: Planned) -> Row:
    """Return what solving alone gives, and where the two do not agree."""
    ours, what = point.planned, []
    allowed_s = _tolerance_s(alone.objective_s, alone)
    faster_s = ours.objective_s - alone.objective_s
    for bounded, other, whose in ((ours, alone, "the curve's"), (alone, ours, "the lone")):
        if bounded.bound_s is not None and other.objective_s < bounded.bound_s - _tolerance_s(bounded.bound_s, alone):
            what.append(f"{whose} bound of {bounded.bound_s:.3g} s is refuted by {other.objective_s:.3g} s")
    figures = {"overhead": alone.objective_s / alone.keep_all.step_s, "gap": alone.gap, "solve_s": alone.plan.solve_s}
    figures["faster_by"] = faster_s / ours.objective_s if faster_s > allowed_s else None
    return {"alone": figures, "missed": what}


def _tolerance_s(seconds: float, planned: Planned) -> float:
    return max(MAX_GAP * seconds, MAX_STEP_GAP * planned.timeline.step_s)


def break_at(curve: Frontier, index: int) -> str:
    """Return whether the curve lies above the line between its neighbours there: "", "yes" or "proven"."""
    if not 0 < index < len(curve.points) - 1:
        return ""
    before, here, after = curve.points[index - 1 : index + 2]
    weight = (here.budget_bytes - before.budget_bytes) / (after.budget_bytes - before.budget_bytes)
    line_s = (1 - weight) * before.planned.objective_s + weight * after.planned.objective_s
    if here.planned.objective_s <= line_s + _ZERO_S:
        return ""
    return "proven" if (here.planned.bound_s or 0.0) > line_s + _ZERO_S else "yes"


def missed(curve: Frontier, total_s: float) -> list[str]:
    """Return what does not hold of the whole curve."""
    what = []
    if any(larger.step_s > smaller.step_s for smaller, larger in pairwise(curve.points)):
        what.append("more budget costs time")
    if not curve.complete:
        what.append("the curve ends early")
    if total_s > MAX_S:
        what.append(f"took {total_s:.0f} s, of {MAX_S:g}")
    return what


def share(value: float | None) -> str:
    """Return it in per cent."""
    return "-" if value is None else f"{value:.2%}"


def agree(row: Row) -> str:
    """Return whether the curve and the lone solve agree, and whether that one is better."""
    if row["missed"] or row["alone"] is None:
        return "no" if row["missed"] else "nothing found alone"
    better = row["alone"]["faster_by"]
    return "yes" if better is None else f"yes; alone {better:.1%} less"


COLUMNS = {
    "model": lambda row: row["model"],
    "budget": lambda row: row["budget"],
    "share": lambda row: f"{row['share']:.0%}",
    "extra": lambda row: share(row["overhead"]),
    "at least": lambda row: share(
        row["bound_s"] * row["overhead"] / row["objective_s"] if row["objective_s"] else row["bound_s"]
    ),
    "gap": lambda row: share(row["gap"]),
    "solve": lambda row: f"{row['solve_s']:.1f} s",
    "extra alone": lambda row: share(row["alone"]["overhead"]),
    "gap alone": lambda row: share(row["alone"]["gap"]),
    "solve alone": lambda row: f"{row['alone']['solve_s']:.1f} s",
    "agree within the gaps": lambda row: agree(row),
    "break": lambda row: row["break"],
    "whole curve": lambda row: f"{row['total_s']:.0f} s; alone {row['alone_s']:.0f} s",
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=("gpt-small", "gpt-small-recompute", "resnet50"), time_limit_s=20.0)
    flags.add_argument("--points", type=int, default=12, help="of the curve; default 12")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    sys.exit(common.finish("the memory/time curve", common.rows_by_model(rows_of, options), COLUMNS, options))
