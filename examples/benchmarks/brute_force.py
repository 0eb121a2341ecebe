"""How conservative the planner is: 500 random small training graphs against brute force over exact memory.

Brute force tries every set of kept values, replays on demand, and simulates each schedule exactly. A budget that it meets
and the planner calls infeasible counts as a miss; where both find a plan, the excess is the planner's extra time over brute
force's. The planner can be cheaper, for it replays early, and an op more than once: `all_schedules.py` is brute force over that
too. Each row switches on one oddity of the graphs, so that a miss has a cause.

    python examples/benchmarks/brute_force.py [--graphs 500]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests")]

from strategies import PLAIN, Oddities, random_problem  # noqa: E402

from actsolve.errors import ScheduleError  # noqa: E402
from actsolve.plan_schedule import schedule_of  # noqa: E402
from actsolve.planners import PlannerOptions, plan  # noqa: E402
from actsolve.problem import Problem  # noqa: E402
from actsolve.schedule import build_schedule  # noqa: E402
from actsolve.simulate import simulate  # noqa: E402

MOST_DECIDABLE = 8
EXACT = PlannerOptions(gap=0.0, threads=1)
CAUSES: dict[str, tuple[Oddities, PlannerOptions]] = {
    "plain graphs": (PLAIN, EXACT),
    "several outputs": (replace(PLAIN, multi_output=0.4), EXACT),
    "in-place ops": (replace(PLAIN, in_place=0.5), EXACT),
    "workspace": (replace(PLAIN, workspace=0.5), EXACT),
    "no replay of some": (replace(PLAIN, not_replayable=0.2, update=0.1), EXACT),
    "random ops": (replace(PLAIN, random_op=0.4), EXACT),
    "all of these": (Oddities(), EXACT),
    "all, window 1 first": (Oddities(), replace(EXACT, window=1)),
}


@dataclass
class Tally:
    """What was counted over the graphs of one row."""

    tight: int = 0  # budgets that brute force meets, and keep-all does not
    missed: int = 0  # of these, called infeasible or not found
    excess: float = 0.0  # sum of relative excess over those found
    worst: float = 0.0
    dearer: int = 0
    cheaper: int = 0  # below brute force: replays before they are demanded, or more than once


def peaks_and_times(problem: Problem) -> list[tuple[int, float]]:
    """The exact peak and the extra time of every set of kept values, replayed on demand."""
    decidable = problem.graph.decidable
    found = []
    for bits in itertools.product((True, False), repeat=len(decidable)):
        try:
            schedule = build_schedule(problem.graph, frozenset(v for v, bit in zip(decidable, bits, strict=True) if bit))
        except ScheduleError:
            continue
        timeline = simulate(problem, schedule)
        found.append((timeline.peak_bytes, timeline.recompute_s))
    return found


def measure(odd: Oddities, options: PlannerOptions, graphs: int) -> Tally:
    """Compare on the first ``graphs`` random problems that are not too large, at the least budget and at a middling one."""
    tally = Tally()
    seen = seed = 0
    while seen < graphs:
        seed += 1
        problem = random_problem(seed, odd=odd)
        if len(problem.graph.decidable) > MOST_DECIDABLE:
            continue
        seen += 1
        known = peaks_and_times(problem)
        peaks = sorted({peak for peak, _ in known if peak < min(p for p, extra_s in known if extra_s == 0.0)})
        for budget in sorted({peaks[0], peaks[len(peaks) // 2]}) if peaks else ():
            least_s = min(extra_s for peak, extra_s in known if peak <= budget)
            compare(tally, replace(problem, budget_bytes=budget), options, least_s)
    return tally


def compare(tally: Tally, problem: Problem, options: PlannerOptions, least_s: float) -> None:
    """Count one problem, of which brute force finds a plan of ``least_s`` extra seconds."""
    tally.tight += 1
    found = plan(problem, "milp", options)
    if not found.found:
        tally.missed += 1
        return
    timeline = simulate(problem, schedule_of(problem.graph, found))
    if not timeline.fits:
        raise AssertionError(f"over budget: {timeline.peak_bytes} > {problem.budget_bytes}")
    excess = (timeline.recompute_s - least_s) / least_s
    tally.dearer += excess > 1e-9
    tally.cheaper += excess < -1e-9
    tally.excess += max(0.0, excess)
    tally.worst = max(tally.worst, excess)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=500)
    graphs = parser.parse_args().graphs
    table = Table(title=f"The planner against brute force over exact memory, {graphs} random training graphs a row")
    for column in ("graphs", "budgets", "missed", "dearer", "cheaper", "mean excess", "worst excess"):
        table.add_column(column, justify="left" if column == "graphs" else "right")
    for cause, (odd, options) in CAUSES.items():
        tally = measure(odd, options, graphs)
        found = max(1, tally.tight - tally.missed)
        table.add_row(
            cause,
            str(tally.tight),
            f"{tally.missed} ({tally.missed / max(1, tally.tight):.1%})",
            str(tally.dearer),
            str(tally.cheaper),
            f"{tally.excess / found:.2%}",
            f"{tally.worst:.2%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
