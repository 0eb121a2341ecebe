"""What offloading gives on a real device, beside what people use today.

On one device, in turns: eager; eager within `torch.autograd.graph.save_on_cpu` from pinned memory; every layer recomputed; and
plans for shares of keep-all's memory, with offloading and without. Shown: the measured peak, the step as a ratio to keeping
everything, predicted and measured, whether gradients are bitwise eager's (under deterministic algorithms), and how much of the
copies' time ran while a kernel ran, from the profiler. Holds if every plan is within its budget and exact, and what is
offloaded overlaps.

    PYTHONPATH=. python examples/benchmarks/on_gpu.py
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import common
import torch
from common import Row, percent
from torch.utils._pytree import tree_map

import models_zoo
from actsolve.api import module_of
from actsolve.errors import InfeasibleBudget
from actsolve.planned import Planned
from actsolve.planning import planned_by, prepare, with_budget
from actsolve.runtime.exactness import largest_difference
from actsolve.runtime.measure_step import interleaved_times, measured_peak, median_ratio_ci
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes, format_seconds

UNLIMITED = 1 << 62
MIN_OVERLAP = 0.5


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each way to train."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    step = on_device(models_zoo.get(name)(), options.device)
    links = {} if options.device == "cuda" else {"h2d": 1e9, "d2h": 1e9}
    settings = Settings(time_limit_s=options.time_limit, optimizer="none", **links)
    prepared = prepare(step, "100%", settings, target=name)
    plans: dict[str, Planned] = {}
    unlimited = replace(prepared, problem=replace(prepared.problem, budget_bytes=UNLIMITED))
    for baseline in ("keep_all", "per_layer"):
        plans[baseline] = planned_by(unlimited, settings, baseline)
    for budget in options.budgets:
        for label, links_of in (("", prepared.problem.links), (", no offload", None)):
            one = replace(prepared, problem=replace(prepared.problem, links=links_of))
            try:
                plans[f"{budget}{label}"] = planned_by(with_budget(one, budget, settings), settings)
            except InfeasibleBudget as error:
                common.tell(f"{name} at {budget}{label}: {error.what}")
    trainers = {"eager": Trainer(step, no_optimizer), "save_on_cpu": Trainer(step, no_optimizer, module=saved_on_cpu(step))}
    trainers |= {n: Trainer(step, no_optimizer, module=module_of(step, prepared.captured, p)) for n, p in plans.items()}
    before = {n: t.drop_gradients for n, t in trainers.items()}
    times = interleaved_times({n: t.step for n, t in trainers.items()}, options.pairs, before=before)
    return [row_of(name, how, trainers, plans.get(how), times, step) for how in trainers]


def no_optimizer(_: list[torch.nn.Parameter]) -> None:
    """Only forward and backward are compared."""


def on_device(step: TrainingStep, device: str) -> TrainingStep:
    """Return the step with its model and inputs on ``device``."""
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, (step.args, step.kwargs))
    return replace(step, model=step.model.to(device), args=moved[0], kwargs=moved[1])


def saved_on_cpu(step: TrainingStep) -> torch.nn.Module:
    """Return the step's module under `save_on_cpu`, called as an optimized one is."""

    class Saved(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                output = step.model(*args, **kwargs)
                return output if step.loss_fn is None else (step.loss_fn(output), output)

    saved = Saved()
    saved.inner = step.model
    return saved


def row_of(
    name: str,
    how: str,
    trainers: dict[str, Trainer],
    planned: Planned | None,
    times: dict[str, list[float]],
    step: TrainingStep,
) -> Row:
    """Return what was measured of one way to train."""
    trainer = trainers[how]
    row: Row = {"model": name, "budget": how, "missed": [], "step_s": median(times[how])}
    row["measured"] = median_ratio_ci(times[how], times["keep_all"])
    row["peak_bytes"] = measured_peak(trainer.step, trainer.static_bytes(), before=trainer.drop_gradients, warmup=1)
    if how == "save_on_cpu" or planned is None:
        return row
    row["budget_bytes"] = planned.problem.budget_bytes
    row["predicted"] = planned.timeline.step_s / planned.keep_all.step_s
    row["moved_bytes"] = planned.timeline.d2h_bytes
    row["difference"] = largest_difference(common.trainer(step), Trainer(step, common.adamw, module=trainer.module))
    if row["difference"] is not None:
        row["missed"].append(f"differs from eager by {row['difference']:.1e}")
    if row["peak_bytes"] > row["budget_bytes"]:
        row["missed"].append(f"peak of {row['peak_bytes']} bytes over the budget of {row['budget_bytes']}")
    if row["moved_bytes"] and torch.cuda.is_available():
        row["overlap"] = overlap(trainer)
        if row["overlap"] < MIN_OVERLAP:
            row["missed"].append(f"only {row['overlap']:.0%} of the copies' time beside a kernel")
    return row


def overlap(trainer: Trainer) -> float:
    """Return the share of the time of copies between host and device in which a kernel ran, too."""
    trainer.drop_gradients()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.step()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["Memcpy" in event.name].append((event.time_range.start, event.time_range.end))
    return beside(spans[True], spans[False])


def beside(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return the share of the length of ``some`` spans that ``others`` cover."""
    total = sum(end - start for start, end in some)
    merged: list[tuple[float, float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    covered = sum(max(0.0, min(end, b) - max(start, a)) for start, end in some for a, b in merged)
    return covered / total if total else 0.0


COLUMNS = {
    "model": lambda row: row["model"],
    "trained as": lambda row: row["budget"],
    "peak": lambda row: format_bytes(row["peak_bytes"]),
    "budget": lambda row: format_bytes(row["budget_bytes"]) if row["budget_bytes"] < UNLIMITED else "",
    "offloaded": lambda row: format_bytes(row["moved_bytes"]),
    "step": lambda row: format_seconds(row["step_s"]),
    "predicted / keep-all": lambda row: percent(row["predicted"]),
    "measured / keep-all": lambda row: common.interval(row["measured"]),
    "copies beside kernels": lambda row: f"{row['overlap']:.0%}",
    "against eager": lambda row: "bitwise" if row["difference"] is None else f"{row['difference']:.1e}",
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=("gpt-small", "unet"), budgets=("60%", "40%"))
    flags.add_argument("--device", default="cuda", help="default cuda; cpu emulates a link, to try the script")
    flags.add_argument("--pairs", type=int, default=10, help="how often each step is timed; default 10")
    options = flags.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu tries the script over an emulated link")
    sys.exit(common.finish("on a device", common.rows_by_model(rows_of, options), COLUMNS, options))
