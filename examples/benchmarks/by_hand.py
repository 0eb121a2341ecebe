"""Is it better than checkpointing by hand?

The original module with `torch.utils.checkpoint` around every block, and around segments of sqrt(L) blocks, is run for real.
Its measured peak becomes our budget. Then our measured peak is no higher, and our measured step takes at most 0.98 of its time
with the upper end of the ratio's 95% interval below 1, all steps interleaved in one process; and the smallest budget that we
find a plan for is no higher than its peak.

Checkpointing by hand updates the statistics of a batch norm twice in a step, so it does not train as eager does; ours does.

    python examples/benchmarks/by_hand.py --models gpt-mini --pairs 40
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import common
import torch
from common import Row, interval
from torch import nn
from torch.utils.checkpoint import checkpoint

from actsolve.api import module_of
from actsolve.errors import InfeasibleBudget
from actsolve.planning import Prepared, planned_by, with_budget
from actsolve.runtime.measure_step import interleaved_times, median_ratio_ci
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes, format_seconds

MODELS = ("gpt-mini", "llama-mini", "vit-mini", "resnet18-mini")
MAX_RATIO = 0.98
RULES = ("per block", "sqrt(L)")


class Segment(nn.Module):
    """Consecutive layers whose inner values are recomputed as a whole in the backward."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return checkpoint(self._run, x, *rest, use_reentrant=False)

    def _run(self, x: torch.Tensor, *rest: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def checkpointed(model: nn.Module, segment: int | None = None) -> nn.Module:
    """Return a copy of ``model`` in which each ``segment`` consecutive layers are checkpointed, by default sqrt(L).

    Layers are the children of the outermost ModuleLists and Sequentials, each called with the one before's result; segments do
    not reach across these.
    """
    model = copy.deepcopy(model)
    places = outermost_lists(model)
    n_layers = sum(len(getattr(owner, name)) for owner, name in places)
    segment = segment or max(1, round(math.sqrt(n_layers)))
    for owner, name in places:
        layers = list(getattr(owner, name))
        segments = [Segment(layers[i : i + segment]) for i in range(0, len(layers), segment)]
        setattr(
            owner,
            name,
            type(getattr(owner, name))(*([segments] if isinstance(getattr(owner, name), nn.ModuleList) else segments)),
        )
    return model


def outermost_lists(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the ModuleLists and Sequentials are that are in no other, as ``(owner, name)``."""
    found = []
    for name, child in module.named_children():
        found += [(module, name)] if isinstance(child, nn.ModuleList | nn.Sequential) else outermost_lists(child)
    return found


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each rule."""
    overrides = {"batch": options.batch} if options.batch else {}
    step, prepared, settings = common.prepared_step(name, options, **overrides)
    smallest_bytes = with_budget(prepared, "min", settings).problem.budget_bytes
    rows = []
    for rule in RULES:
        common.tell(f"{name} {rule}")
        model = checkpointed(step.model, 1 if rule == "per block" else None)
        hand = Trainer(replace(step, model=model), common.adamw)
        budget_bytes = common.peak_bytes(hand)
        row: Row = {"model": name, "budget": rule, "budget_bytes": budget_bytes, "smallest_bytes": smallest_bytes, "missed": []}
        if smallest_bytes > budget_bytes:
            row["missed"].append(f"our smallest budget is {smallest_bytes / budget_bytes:.3f} of its peak")
        try:
            row.update(against_hand(step, prepared, settings, hand, budget_bytes, options.pairs))
        except InfeasibleBudget as error:
            row["missed"].append(error.what)
        else:
            row["missed"] += missed(row)
        rows.append(row)
    return rows


def against_hand(step: TrainingStep, prepared: Prepared, settings: Settings, hand: Trainer, budget_bytes: int, pairs: int) -> Row:
    """Return what our module needs at the budget, and the times of eager, the one by hand, and ours, in turns."""
    planned = planned_by(with_budget(prepared, budget_bytes, settings), settings)
    ours = common.trainer(step, module_of(step, prepared.captured, planned))
    eager = common.trainer(step)
    peak_bytes, eager_peak_bytes = common.peak_bytes(ours), common.peak_bytes(eager)
    trainers = {"eager": eager, "hand": hand, "ours": ours}
    times = interleaved_times(
        {n: t.step for n, t in trainers.items()}, pairs, before={n: t.drop_gradients for n, t in trainers.items()}
    )
    return {
        "eager_peak_bytes": eager_peak_bytes,
        "our_peak_bytes": peak_bytes,
        "predicted_ratio": planned.timeline.step_s / planned.keep_all.step_s,
        "step_s": {n: median(t) for n, t in times.items()},
        "ratio": median_ratio_ci(times["ours"], times["hand"]),
        "hand_over_eager": median_ratio_ci(times["hand"], times["eager"]),
        "ours_over_eager": median_ratio_ci(times["ours"], times["eager"]),
        "pairs": pairs,
        "gap": planned.gap,
        "status": planned.plan.status.value,
        "solve_s": planned.plan.solve_s,
    }


def missed(row: Row) -> list[str]:
    """Return what does not hold of what is to be shown."""
    found = []
    if row["our_peak_bytes"] > row["budget_bytes"]:
        found.append(f"our peak is {row['our_peak_bytes'] / row['budget_bytes']:.4f} of its peak")
    ratio, _, upper = row["ratio"]
    if ratio > MAX_RATIO or upper >= 1:
        found.append(f"our step takes {interval(row['ratio'])} of its time")
    return found


COLUMNS = {
    "model": lambda row: row["model"],
    "by hand": lambda row: row["budget"],
    "eager peak": lambda row: format_bytes(row["eager_peak_bytes"]),
    "its peak": lambda row: format_bytes(row["budget_bytes"]),
    "our peak": lambda row: f"{format_bytes(row['our_peak_bytes'])} ({row['our_peak_bytes'] / row['budget_bytes']:.3f})",
    "our smallest": lambda row: f"{format_bytes(row['smallest_bytes'])} ({row['smallest_bytes'] / row['budget_bytes']:.3f})",
    "eager step": lambda row: format_seconds(row["step_s"]["eager"]),
    "its step / eager": lambda row: f"{row['hand_over_eager'][0]:.3f}",
    "our step / eager (predicted)": lambda row: f"{row['ours_over_eager'][0]:.3f} ({row['predicted_ratio']:.3f})",
    "our step / its step": lambda row: interval(row["ratio"]),
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=MODELS)
    flags.add_argument("--pairs", type=int, default=40, help="how often each step is timed; default 40")
    flags.add_argument("--batch", type=int, help="in place of the models' own")
    options = flags.parse_args()
    sys.exit(common.finish("by hand", common.rows_by_model(rows_of, options), COLUMNS, options))
