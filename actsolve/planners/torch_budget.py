"""What PyTorch's own partitioner saves, at the largest of its memory budgets that fits.

Source:
    `torch._functorch.partitioners.min_cut_rematerialization_partition` with `activation_memory_budget` (He, Yu, 2022 on; a
    min-cut at 1.0, a knapsack below it). Its budget is a share of the bytes saved between "save what the min-cut saves"
    and "save only the inputs"; it knows no peak. The partitioner takes a traced model, so that it runs elsewhere
    (`capture.torch_partitioner`), and what it saves comes here. What it drops is replayed, unless it must not be.
"""

from __future__ import annotations

import time
from dataclasses import replace

from actsolve.errors import ActsolveError
from actsolve.plan import Plan, Status
from actsolve.planners.best import best_of
from actsolve.planners.keep_all import pins_note
from actsolve.planners.options import PlannerOptions
from actsolve.planners.required import required
from actsolve.problem import Problem
from actsolve.simulate import timeline_of

MEMORY_BUDGETS = (1.0, 0.85, 0.7, 0.5, 0.3, 0.15, 0.0)


def torch_budget(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan of the largest memory budget of PyTorch that fits; else the one of lowest peak.

    One after the other, for the peak does not fall with the memory budget: where all is dropped, all is replayed at once. No
    further one is tried once the time limit is over: on a large model each takes a minute.
    """
    options = options or PlannerOptions()
    saved = options.torch_saved
    if saved is None:
        return Plan("torch_budget", status=Status.UNKNOWN, note="needs the traced model")
    deadline = time.perf_counter() + options.time_limit_s
    plans: list[Plan] = []
    for memory_budget in MEMORY_BUDGETS:
        if plans and time.perf_counter() > deadline:
            break
        try:
            kept = required(problem.graph, saved(memory_budget))
        except ActsolveError as error:
            return Plan("torch_budget", status=Status.UNKNOWN, note=f"{error.what}: {error.why}")
        notes = (f"activation_memory_budget {memory_budget:g}", pins_note(problem))
        plans.append(Plan("torch_budget", kept, note="; ".join(note for note in notes if note)))
        if timeline_of(problem, plans[-1]).fits:
            return plans[-1]
    best = best_of(problem, plans)
    assert best is not None
    return best if len(plans) == len(MEMORY_BUDGETS) else replace(best, note=f"{best.note}; time is up")
