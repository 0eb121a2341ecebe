"""Small models after public reports, and real architectures, each driven as its user drives it: equal to eager, or refused?

DIR holds ``cases.py`` with ``CASES`` and ``run_case``, and beside it, for ``--real``, ``real_models.py`` with ``REAL``. Each case
runs at three budgets: everything kept; the smallest that a plan is found for; and halfway between. It runs in a process of its
own with a time limit: some models make rewriters hang. With ``--real`` the peak of a whole step, allocator level, is held against
the budget.

    python examples/benchmarks/field_cases.py DIR
    python examples/benchmarks/field_cases.py DIR --real --only hf_gpt2,timm_resnet18
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import torch
from common import Row

import actsolve
from actsolve.errors import ActsolveError
from actsolve.runtime.trainer import Trainer
from actsolve.training_step import TrainingStep

BUDGETS = ("roomy", "middle", "min")
SOLVE_S = 20.0
CHILD_S = 240.0
EDITED = "modified by an inplace operation"  # as torch says of what a backward reads, and a replay may read more than eager


def optimized(budget: str | int, model: torch.nn.Module, args: Any, kwargs: Any, **more: Any) -> torch.nn.Module:
    """Return a case's model within one of the three budgets."""

    def within(mem_budget: int | str) -> torch.nn.Module:
        return actsolve.optimize(model, args, kwargs, mem_budget=mem_budget, optimizer="sgd", time_limit_s=SOLVE_S, **more)

    if isinstance(budget, int) or budget == "roomy":
        return within("100%" if budget == "roomy" else budget)
    least = within("min")
    if budget == "min":
        return least
    return within((least.plan.budget_bytes + max(least.plan.keep_all.peak_bytes, least.plan.budget_bytes)) // 2)


def row_of(module: str, name: str, budget: str) -> Row:
    """Return how one case does within one budget."""
    cases = importlib.import_module("cases")
    registry = importlib.import_module(module)
    case = (registry.CASES if module == "cases" else registry.REAL)[name]
    row: Row = {"model": name, "budget": budget, "expect": case.expect, "must_raise": case.must_raise, "reason": ""}
    reference = cases.run_case(case)
    row["deterministic"] = not cases.diff(reference, cases.run_case(case), exact=True)
    made: list[torch.nn.Module] = []

    def optimize(model: torch.nn.Module, args: Any, kwargs: Any) -> torch.nn.Module:
        asked = case.budget if case.must_raise else budget  # it names the budget that nothing fits
        made.append(optimized(asked, model, args, kwargs))
        return made[-1]

    start = time.perf_counter()
    try:
        found = cases.run_case(case, optimize=optimize)
    except Exception as error:
        clear = isinstance(error, ActsolveError) or EDITED in str(error)
        row.update(outcome="refused" if clear else "raises", reason=said(error))
    else:
        differences = cases.compare(case, reference, found)
        exact = not cases.diff(reference, found, exact=True)
        row.update(outcome="bitwise" if exact else "DIFFERS" if differences else "close", reason="; ".join(differences[:3]))
        plan = getattr(made[0], "plan", None) if made else None
        row["decisions"] = dict(Counter(map(str, plan.decisions.values()))) if plan is not None else {}
        if module != "cases":
            row.update(peaks(cases, case, budget))
    row["seconds"] = time.perf_counter() - start
    return row


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def peaks(cases: Any, case: Any, budget: str) -> Row:
    """Return the budget and the measured peak of a whole SGD step whose loss is part of it."""
    model, (args, kwargs) = cases.fresh(case), case.inputs(0)
    module = optimized(budget, model, args, kwargs, loss_fn=case.loss)
    step = TrainingStep(model, args, kwargs, case.loss)
    trainer = Trainer(step, lambda p: torch.optim.SGD(p, lr=cases.LR), module=module)
    return {"budget_bytes": module.plan.budget_bytes, "peak_bytes": common.peak_bytes(trainer)}


def in_a_child(options: argparse.Namespace, module: str, name: str, budget: str) -> Row:
    """Return the row of one case at one budget, from a process of its own."""
    command = [sys.executable, __file__, str(options.directory), "--child", module, name, budget]
    row: Row = {"model": name, "budget": budget, "expect": "", "must_raise": False}
    common.tell(f"{name} at {budget}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        return {**row, "outcome": "HANGS", "reason": f"no end after {CHILD_S:g} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        lines = done.stderr.strip().splitlines()
        return {**row, "outcome": "DIES", "reason": f"exit {done.returncode}: {lines[-1] if lines else ''}"}


def missed(row: Row) -> list[str]:
    """Return what does not hold of what is to be shown."""
    outcome, found = row["outcome"], []
    if row["must_raise"]:
        found += [f"{outcome}, and an error is the only right answer"] if outcome not in ("refused", "raises") else []
    elif outcome not in ("bitwise", "close") and (outcome != "refused" or row["expect"] != "clear-error"):
        found.append(f"{outcome}: {row['reason'][:300]}")
    elif outcome == "close" and row["deterministic"] and "peak_bytes" in row:  # of the cases, README's Limits name the two kinds
        found.append("not bitwise, and eager is deterministic")
    if row.get("peak_bytes", 0) > row.get("budget_bytes", 0):
        found.append(f"measured peak {row['peak_bytes'] / row['budget_bytes']:.4f} of the budget")
    return found


def decisions(row: Row) -> str:
    return ", ".join(f"{count} {decision}" for decision, count in sorted(row["decisions"].items()))


COLUMNS = {
    "case": lambda row: row["model"],
    "budget": lambda row: row["budget"],
    "expected": lambda row: "an error" if row["must_raise"] else row["expect"],
    "outcome": lambda row: row["outcome"],
    "plan": decisions,
    "peak / budget": lambda row: f"{row['peak_bytes'] / row['budget_bytes']:.4f}",
    "time": lambda row: f"{row['seconds']:.1f} s",
    "why": lambda row: row["reason"][:120],
}


def main() -> int:
    flags = common.parser(__doc__)
    flags.add_argument("directory", type=Path, help="of cases.py")
    flags.add_argument("--real", action="store_true", help="real_models.py in place of cases.py")
    flags.add_argument("--only", help="names, separated by commas")
    flags.add_argument("--budgets", default=",".join(BUDGETS), help="of roomy,middle,min")
    flags.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    flags.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = flags.parse_args()
    sys.path.insert(0, str(options.directory.resolve()))
    if options.child:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        print(json.dumps(row_of(*options.child)))
        return 0
    module = "real_models" if options.real else "cases"
    registry = importlib.import_module(module)
    names = options.only.split(",") if options.only else registry.available() if options.real else list(registry.CASES)
    runs = [(module, name, budget) for name in names for budget in options.budgets.split(",")]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda run: in_a_child(options, *run), runs))
    for row in rows:
        row["missed"] = missed(row)
    outcomes = Counter(row["outcome"] for row in rows)
    return common.finish("field cases", rows, COLUMNS, options, **{k: outcomes[k] for k in sorted(outcomes)})


if __name__ == "__main__":
    sys.exit(main())
