"""How near the planner is to the best of *all* schedules: 200 random small training graphs against brute force.

Brute force (`tests/all_schedules.py`) is Dijkstra over exact memory: every op is replayed any number of times, in any order,
with the first runs in the order of the graph. Budgets go from the least that any schedule fits up to where nothing has to be
replayed; counted are those within which something must be. The planner is compared with two kinds of schedules: all of them, as
the checker admits them, and those that replay in the backward alone. Each difference is listed with its cause.

    python examples/benchmarks/all_schedules.py [--graphs 200] [--json]

PASS for each kind if at most 2% are called infeasible though feasible and the mean excess is at most 1%. Besides, no plan may be
below brute force, and nothing proven that is not so: a bound is at most the optimum of the schedules that it is a bound on. That
is asked of the program over segments itself, too, with and without replays in the forward, for a plan's bound is cut to what the
plan takes. The exit code is 0 if all pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]

from all_schedules import ANYWHERE, BACKWARD_ONLY, Rules, cheapest, least_budget  # noqa: E402
from strategies import random_problem  # noqa: E402

from actsolve.check import check  # noqa: E402
from actsolve.dag import Dag, dag_of  # noqa: E402
from actsolve.plan_schedule import schedule_of  # noqa: E402
from actsolve.planners import PlannerOptions, plan  # noqa: E402
from actsolve.planners.dag_search import DagSearch, too_large  # noqa: E402
from actsolve.problem import Problem  # noqa: E402
from actsolve.schedule import build_schedule  # noqa: E402
from actsolve.simulate import simulate  # noqa: E402

Row = dict[str, Any]
MOST_OPS = 14
MOST_MISSED, MOST_EXCESS = 0.02, 0.01
AGAINST = {"replayed anywhere": "anywhere_s", "replayed in the backward": "backward_s"}
NEVER = "nothing below, nothing proven that is not so"
_EPSILON_S = 1e-9


def tight_budgets(problem: Problem) -> list[int]:
    """Return the least budgets with and without replays in the forward, and some between these and keeping everything."""
    anywhere, low = least_budget(problem, ANYWHERE), least_budget(problem)
    high = simulate(problem, build_schedule(problem.graph, frozenset(problem.graph.decidable))).peak_bytes
    between = {low + (high - low) * share // 4 for share in range(1, 4)}
    return [b for b in sorted({anywhere, low, *between}) if extra_s(problem, b, ANYWHERE) > 0.0]


def extra_s(problem: Problem, budget: int, rules: Rules) -> float:
    """Return the least extra time of any schedule under ``rules``; infinite if none fits."""
    found = cheapest(replace(problem, budget_bytes=budget), rules)
    return math.inf if found is None else found.extra_s


def compared(seed: int, problem: Problem, options: PlannerOptions) -> Row:
    """Return what the planner and brute force find within one budget."""
    budget = problem.budget_bytes
    found = plan(problem, "milp", options)
    planned_s = math.inf
    if found.found:
        timeline = simulate(problem, schedule_of(problem.graph, found))
        check(problem, timeline.schedule)
        planned_s = timeline.extra_s
    row: Row = {"seed": seed, "budget": budget, "status": found.status.value, "planned_s": planned_s}
    row |= {"bound_s": found.bound_s, "global_bound_s": found.global_bound_s, "bounds_forward": found.bounds_forward}
    row |= {f"proven_{kind}": proven_s(dag_of(problem, anywhere=kind == "anywhere_s"), options) for kind in AGAINST.values()}
    row |= {"backward_s": extra_s(problem, budget, BACKWARD_ONLY), "anywhere_s": extra_s(problem, budget, ANYWHERE)}
    return row | {"cause": cause(problem, row), "wrong": wrong(row)}


def proven_s(dag: Dag, options: PlannerOptions) -> float:
    """Return the global bound that the program over segments proves; infinite if it says that nothing fits."""
    if too_large(dag):
        return math.inf
    search = DagSearch(dag, options)
    search.take(search.runner.run(np.arange(dag.n_nodes)))
    search.prove(1.0)
    return math.inf if search.infeasible else search.bound


def cause(problem: Problem, row: Row) -> str:
    """Return why the plan is not the best of all schedules; nothing if it is."""
    planned_s, budget = row["planned_s"], row["budget"]
    if _same(planned_s, row["anywhere_s"]):
        return ""
    if _same(planned_s, row["backward_s"]):
        return "it takes a replay in the forward"
    once_s = extra_s(problem, budget, Rules(forward_replays=True, once=True))
    if _same(planned_s, extra_s(problem, budget, Rules(forward_replays=True, ordered=True))):
        if _same(planned_s, once_s):
            return "an op replayed twice for one backward op"
        return "replays for one backward op in another order"
    if row["status"] == "infeasible":
        return "called infeasible"
    return "not found, nothing proven" if math.isinf(planned_s) else f"dearer, {row['status']}"


def wrong(row: Row) -> str:
    """Return what must never be."""
    if row["planned_s"] < row["anywhere_s"] - _EPSILON_S:
        return "the plan is below brute force"
    bounds = [(row[f"proven_{kind}"], row[kind]) for kind in AGAINST.values()]
    bounds += [(row["global_bound_s"], row["anywhere_s" if row["bounds_forward"] else "backward_s"])]
    bounds += [(row["bound_s"], row["planned_s"])]
    if any((bound or 0.0) > best_s + _EPSILON_S for bound, best_s in bounds):
        return "the bound is above brute force"
    return ""


def _same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _EPSILON_S


def summary(rows: list[Row], least: str) -> Row:
    """Return shares and means over the budgets that the schedules of one kind fit, and within which these must replay."""
    tight = [r for r in rows if 0.0 < r[least] < math.inf]
    found = [r["planned_s"] / r[least] - 1 for r in tight if r["planned_s"] < math.inf]
    missed = len(tight) - len(found)
    return {
        "tight": len(tight),
        "missed": missed,
        "missed_share": missed / max(1, len(tight)),
        "dearer": sum(excess > _EPSILON_S for excess in found),
        "mean_excess": sum(max(0.0, excess) for excess in found) / max(1, len(found)),
        "worst_excess": max(found, default=0.0),
    }


def too_far(of: Row) -> list[str]:
    """Return what is missed more often, or by more, than it may be."""
    found = []
    if of["missed_share"] > MOST_MISSED:
        found.append(f"{of['missed_share']:.1%} called infeasible though feasible, more than {MOST_MISSED:.0%}")
    if of["mean_excess"] > MOST_EXCESS:
        found.append(f"mean excess {of['mean_excess']:.2%}, more than {MOST_EXCESS:.0%}")
    return found


def tight_problems() -> Iterator[tuple[int, Problem, list[int]]]:
    """Yield random problems of few ops that have a tight budget, with their seeds and these budgets."""
    for seed in itertools.count(1):
        problem = random_problem(seed)
        if len(problem.graph.ops) <= MOST_OPS and (budgets := tight_budgets(problem)):
            yield seed, problem, budgets


def show(rows: list[Row], summaries: dict[str, Row], graphs: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title=f"The planner against brute force over all schedules: {graphs} random graphs of up to {MOST_OPS} ops")
    for column in ("schedules", "tight budgets", "called infeasible", "dearer", "mean excess", "worst"):
        table.add_column(column, justify="left" if column == "schedules" else "right")
    for name, s in summaries.items():
        missed = f"{s['missed']} ({s['missed_share']:.1%})"
        table.add_row(name, str(s["tight"]), missed, str(s["dearer"]), f"{s['mean_excess']:.2%}", f"{s['worst_excess']:.1%}")
    console.print(table)
    for reason, n in Counter(r["cause"] for r in rows if r["cause"]).most_common():
        console.print(f"{n} x {reason}")
        for r in rows:
            if r["cause"] == reason:
                ms = ", ".join(f"{name} {_ms(r[key])}" for name, key in (("plan", "planned_s"), *AGAINST.items()))
                console.print(f"    seed {r['seed']}, {r['budget']} bytes: {ms}", highlight=False)


def _ms(seconds: float) -> str:
    return "infeasible" if math.isinf(seconds) else f"{1e3 * seconds:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each plan; default 60")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    given = parser.parse_args()
    options = PlannerOptions(gap=0.0, threads=1, time_limit_s=given.time_limit)
    rows = []
    for number, (seed, problem, budgets) in enumerate(itertools.islice(tight_problems(), given.graphs), 1):
        if number % 20 == 0:
            print(f"{number} graphs, up to seed {seed}", file=sys.stderr, flush=True)
        rows += [compared(seed, replace(problem, budget_bytes=budget), options) for budget in budgets]
    summaries = {name: summary(rows, key) for name, key in AGAINST.items()}
    short = {name: found for name, s in summaries.items() if (found := too_far(s))}
    if wrongs := [f"seed {r['seed']}, {r['budget']} bytes: {r['wrong']}" for r in rows if r["wrong"]]:
        short[NEVER] = wrongs
    if given.json:
        finite = [{k: None if v == math.inf else v for k, v in r.items()} for r in rows]
        print(json.dumps({"rows": finite, "summaries": summaries, "missed": short}, allow_nan=False))
    else:
        show(rows, summaries, given.graphs)
        for name in (*AGAINST, NEVER):
            print(f"{name}: {'FAIL: ' + '; '.join(short[name]) if name in short else 'PASS'}")
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
