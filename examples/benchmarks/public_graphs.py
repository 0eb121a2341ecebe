"""Graphs of published work on optimal recomputation: overhead, proven bound and time, beside what others published.

    python examples/benchmarks/public_graphs.py DIRECTORY [--budgets 90%,80%] [--json]

Plans every actsolve-dag-1 file of the directory by the global planner, as `actsolve plan` does; none is shipped with the project.
Overheads are shares of the time of running every node once; the bound holds for every schedule with the file's order of first
runs, whatever runs again. PASS if each budget has a schedule, or the proof that it has none; if that of a network is within 0.1
points of the bound; and if none is above what others have. How far random graphs are from their bound is shown.

Others' figures: Checkmate's MILP and Moccasin, as published with the latter (Bartan et al., Moccasin: Efficient Tensor
Rematerialization for Neural Networks, ICML 2023), with commercial or 16-worker solvers on hardware of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from actsolve.dag_file import load_dag
from actsolve.dag_planning import DagTask, plan_dag_within
from actsolve.errors import ActsolveError, InfeasibleBudget
from actsolve.planners import PlannerOptions
from actsolve.report.table import aligned

Row = dict[str, Any]

# (graph, budget) -> planner -> (overhead in %, seconds); rounded to 0.1 points there.
PUBLISHED: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("fcn8_train", "90%"): {"Checkmate": (0.0, 6), "Moccasin": (0.0, 3)},
    ("fcn8_train", "80%"): {"Checkmate": (0.1, 6), "Moccasin": (0.1, 3)},
    ("random_layered_100", "90%"): {"Checkmate": (0.8, 18.5), "Moccasin": (0.8, 9.3)},
    ("random_layered_100", "80%"): {"Checkmate": (2.3, 22.7), "Moccasin": (2.3, 9.5)},
    ("random_layered_250", "90%"): {"Checkmate": (0.9, 685), "Moccasin": (0.9, 55)},
    ("random_layered_250", "80%"): {"Moccasin": (4.9, 640)},
}
_ROUNDED = 0.05  # points: what rounding to one place hides
_NEAR = 0.1  # points between schedule and bound


def planned(path: Path, budget: str, time_limit_s: float) -> Row:
    """Return the figures of one graph within one budget."""
    name, dag = load_dag(path)
    row: Row = {"graph": name, "nodes": dag.n_nodes, "edges": sum(map(len, dag.reads)), "budget": budget}
    try:
        found = plan_dag_within(DagTask(name, dag, PlannerOptions(time_limit_s=time_limit_s)), budget)
    except InfeasibleBudget as error:
        return row | {"status": error.attempt.status.value, "why": error.why, "solve_s": error.attempt.solve_s}
    assert found.overhead is not None and found.lower_bound is not None
    bound = found.lower_bound / found.base_time - 1 if found.base_time else 0.0
    figures = {"overhead": 100 * found.overhead, "bound": 100 * bound, "difference": max(0.0, 100 * (found.overhead - bound))}
    return row | figures | {"status": found.status.value, "solve_s": found.solve_s}


def missed(row: Row) -> list[str]:
    """Return what a row falls short of."""
    if row["status"] == "infeasible":
        return []
    if row["status"] == "unknown":
        return ["nothing found, nothing proven"]
    is_network = not row["graph"].startswith("random")
    found = [f"{row['difference']:.2f} points above its bound"] if is_network and row["difference"] > _NEAR else []
    for other, (overhead, _) in PUBLISHED.get((row["graph"], row["budget"]), {}).items():
        if row["overhead"] > overhead + _ROUNDED:
            found.append(f"above {other}'s {overhead} %")
    return found


def table(rows: list[Row]) -> list[str]:
    cells = [("graph", "nodes", "edges", "budget", "overhead %", "bound %", "points", "seconds", "")]
    for row in rows:
        if "overhead" in row:
            figures = tuple(f"{row[key]:.3f}" for key in ("overhead", "bound", "difference"))
            others = PUBLISHED.get((row["graph"], row["budget"]), {})
            note = "; ".join(f"{name} {overhead} % in {seconds:g} s" for name, (overhead, seconds) in others.items())
        else:
            figures, note = ("-", "-", "-"), f"proven infeasible: {row['why']}" if row["status"] == "infeasible" else "unknown"
        graph = (row["graph"], str(row["nodes"]), str(row["edges"]), row["budget"])
        cells.append((*graph, *figures, f"{row['solve_s']:.1f}", note))
    return aligned(cells, numbers=range(1, 8), indent="")


def main() -> None:
    about, _, _ = (__doc__ or "").partition("\n\nOthers'")
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("directory", type=Path, help="all its *.json are planned")
    flags.add_argument("--graphs", default="", help="only these, by their files' names without .json, with commas")
    flags.add_argument("--budgets", default="90%,80%,70%,60%,50%", help="default 90%%,80%%,70%%,60%%,50%% of the plain order")
    flags.add_argument("--time-limit", type=float, default=60.0, help="seconds for each; default 60")
    flags.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    given = flags.parse_args()
    wanted = [name for name in given.graphs.split(",") if name]
    paths = [p for p in sorted(given.directory.glob("*.json")) if not wanted or p.stem in wanted]
    rows = []
    try:
        for path in paths:
            for budget in given.budgets.split(","):
                print(f"{path.stem} within {budget}", file=sys.stderr)
                rows.append(planned(path, budget, given.time_limit))
    except ActsolveError as error:
        sys.exit(str(error))
    if not rows:
        sys.exit(f"there is no such graph file in {given.directory}")
    short = {f"{row['graph']} {row['budget']}": found for row in rows if (found := missed(row))}
    if given.json:
        print(json.dumps({"rows": rows, "missed": short}, allow_nan=False))
    else:
        print("\n".join(table(rows)))
        print("PASS" if not short else "FAIL: " + "; ".join(f"{name}: {', '.join(found)}" for name, found in short.items()))
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
