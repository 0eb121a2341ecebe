"""Public architectures at their real size, trained on this CPU with 55% of their activation memory.

GPT-2 small (124M, batch 2 x 256, called with labels), ViT-B/16 (batch 4) and timm's ResNet-50 (batch 8), random
weights, AdamW with ``fused=True``. Gradients stay from step to step and are zeroed, so that what a step needs above
static memory are activations and temporaries: of GPT-2's gradients alone there is more than 55% of all that it needs
otherwise. For each: the budget, the predicted and the measured peak (allocator level), the predicted and the measured
step as a ratio to keeping everything (interleaved runs; median and 95% interval), and whether all of 5 steps is bitwise
eager's. Needs transformers and timm.

    python examples/benchmarks/real_sizes.py --models gpt2
"""

from __future__ import annotations

import argparse
import copy
import importlib
import pydoc_data.topics
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import common
import torch
from common import Row, interval, percent

from actsolve.api import module_of
from actsolve.planned import Planned
from actsolve.planning import planned_by, prepare, with_budget
from actsolve.runtime.exactness import largest_difference
from actsolve.runtime.measure_step import interleaved_times, median_ratio_ci
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes, format_seconds

STEPS = 5
PAIRS = 6
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def gpt2() -> TrainingStep:
    """GPT-2 small on the bytes of real text, called as a user of transformers does."""
    transformers = imported("transformers")
    text = " ".join(pydoc_data.topics.topics.values()).encode()
    ids = torch.tensor(list(text[: 2 * 256])).view(2, 256)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return TrainingStep(model.train(), (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def vit_b16() -> TrainingStep:
    """ViT-B/16 of timm on images of noise."""
    return classified(imported("timm").create_model("vit_base_patch16_224", drop_rate=0.1, drop_path_rate=0.1), batch=4)


def resnet50() -> TrainingStep:
    """ResNet-50 of timm on images of noise."""
    return classified(imported("timm").create_model("resnet50"), batch=8)


def classified(model: torch.nn.Module, batch: int) -> TrainingStep:
    labels = torch.arange(batch) % 1000
    return TrainingStep(
        model.train(), (torch.randn(batch, 3, 224, 224),), loss_fn=lambda y: torch.nn.functional.cross_entropy(y, labels)
    )


def imported(package: str) -> Any:
    """Import a package that may import torchvision, whose wheel for CUDA declares its ops only where CUDA is."""
    try:
        return importlib.import_module(package)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", package)]:
        del sys.modules[name]
    declared = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        declared.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    imported.keep = declared  # type: ignore[attr-defined]  # for as long as the process lives
    return importlib.import_module(package)


MODELS = {"gpt2": gpt2, "vit_b16": vit_b16, "resnet50": resnet50}


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget."""
    torch.manual_seed(0)
    step = MODELS[name]()
    settings = Settings(time_limit_s=options.time_limit, optimizer=adamw(list(step.model.parameters())), grads="accumulate")
    prepared = prepare(step, "100%", settings, target=name)
    keep_all = planned_by(prepared, settings, "keep_all")
    rows = []
    for budget in options.budgets:
        common.tell(f"{name} at {budget}")
        planned = planned_by(with_budget(prepared, budget, settings), settings)
        row: Row = {
            "model": name,
            "budget": budget,
            "budget_bytes": planned.problem.budget_bytes,
            "capture_s": prepared.capture_s,
        }
        row.update(measured(step, prepared.captured, planned, keep_all))
        row["missed"] = missed(row)
        rows.append(row)
    return rows


def measured(step: TrainingStep, captured: Any, planned: Planned, keep_all: Planned) -> Row:
    """Train in eager, keeping everything, and as planned."""
    module = module_of(step, captured, planned)
    eager = Trainer(replace(step, model=copy.deepcopy(step.model)), adamw, accumulate=True)
    difference = largest_difference(eager, Trainer(step, adamw, module=module, accumulate=True), STEPS)
    del eager
    modules = {"planned": module, "keep_all": module_of(step, captured, keep_all)}
    trainers = {name: Trainer(step, adamw, module=module, accumulate=True) for name, module in modules.items()}
    peaks = {name: common.peak_bytes(trainer) for name, trainer in trainers.items()}
    before = {name: trainer.drop_gradients for name, trainer in trainers.items()}
    times = interleaved_times({name: t.step for name, t in trainers.items()}, PAIRS, before=before, warmup=1)
    return {
        "difference": difference,
        "predicted_peak_bytes": planned.timeline.peak_bytes,
        "peak_bytes": peaks["planned"],
        "keep_all_bytes": peaks["keep_all"],
        "predicted_ratio": planned.timeline.step_s / planned.keep_all.step_s,
        "predicted_s": planned.timeline.step_s,
        "ratio": median_ratio_ci(times["planned"], times["keep_all"]),
        "step_s": sorted(times["planned"])[len(times["planned"]) // 2],
        "status": planned.plan.status.value,
        "solve_s": planned.plan.solve_s,
    }


def missed(row: Row) -> list[str]:
    """Return what does not hold of what is to be shown."""
    found = [] if row["difference"] is None else [f"differs from eager by {row['difference']:.1e}"]
    if row["peak_bytes"] > row["budget_bytes"]:
        found.append(f"measured peak {row['peak_bytes'] / row['budget_bytes']:.4f} of the budget")
    return found


COLUMNS = {
    "model": lambda row: row["model"],
    "budget": lambda row: f"{row['budget']} = {format_bytes(row['budget_bytes'])}",
    f"{STEPS} steps": lambda row: "bitwise" if row["difference"] is None else f"{row['difference']:.1e}",
    "peak, keep all": lambda row: format_bytes(row["keep_all_bytes"]),
    "peak, predicted": lambda row: format_bytes(row["predicted_peak_bytes"]),
    "peak, measured": lambda row: format_bytes(row["peak_bytes"]),
    "step, predicted": lambda row: f"{format_seconds(row['predicted_s'])} ({percent(row['predicted_ratio'])})",
    "step, measured": lambda row: f"{format_seconds(row['step_s'])} ({interval(row['ratio'])})",
    "capture, solve": lambda row: f"{row['capture_s']:.1f} s, {row['solve_s']:.1f} s",
    "status": lambda row: row["status"],
}

if __name__ == "__main__":
    options = common.parser(__doc__, models=list(MODELS), budgets=("55%",)).parse_args()
    sys.exit(common.finish("real sizes", common.rows_by_model(rows_of, options), COLUMNS, options))
