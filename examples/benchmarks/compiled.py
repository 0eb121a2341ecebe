"""Under torch.compile: is it better than per-layer checkpointing, and than PyTorch's own memory budget?

The step (model and loss in one graph) is compiled four ways, each on parameters of its own: by stock Inductor; by Inductor with
`torch.utils.checkpoint` around every block; by Inductor with the largest `activation_memory_budget` whose measured peak fits;
and by `actsolve.backend`. The budget is the measured peak of per-layer checkpointing; the smallest that an
`activation_memory_budget` comes to; or a share of what stock Inductor needs above static memory. Shown: our loss, gradients,
parameters, buffers and random state are bitwise those of stock Inductor over three steps; our measured peak is within the budget;
and where the others fit, our step takes no longer than theirs, all timed in turns. Ours is held against stock Inductor with its
readers kept behind its writers, as `actsolve.backend` keeps them. Whose gradients of one step, from one random state, are not
bitwise those of it is shown, with how far they are; a step that computes something else than it says nothing of ours.

On a CPU Inductor lays out a whole backward with channels last if it computes one convolution again, and not if it computes none:
gradients of convolutions are computed faster so, and round otherwise. ``--channels-last`` gives all four ways that layout.

    python examples/benchmarks/compiled.py --models gpt-mini --budgets checkpoint,torch,60% --threads 1
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from statistics import median
from types import FunctionType
from typing import Any

import common
import torch
import torch._functorch.config
import torch._inductor.config
from by_hand import checkpointed
from common import Row, interval
from torch import nn

import actsolve
import models_zoo
from actsolve.errors import InfeasibleBudget
from actsolve.runtime.exactness import bitwise_equal, largest_difference, relative_difference
from actsolve.runtime.measure_step import interleaved_times, median_ratio_ci
from actsolve.runtime.trainer import Trainer, scalar_loss
from actsolve.training_step import TrainingStep
from actsolve.units import format_bytes, format_seconds

MODELS = ("gpt-mini", "llama-mini", "vit-mini", "resnet18-mini")
BUDGETS = ("checkpoint", "torch")
MEMORY_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.15, 0.05, 0.0)  # compiled from the left, until one fits
MAX_RATIO = 1.02  # of the others' times
MAX_ERROR = 1e-2  # of a gradient: as much is no rounding
_NUMBERS = count()


class WithLoss(nn.Module):
    """A model with its loss, so that both are compiled as one graph."""

    def __init__(self, step: TrainingStep, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = step.loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        return scalar_loss(output) if self.loss_fn is None else self.loss_fn(output)


def compiled(step: TrainingStep, backend: Any = "inductor", wrap: Callable[[nn.Module], nn.Module] = copy.deepcopy) -> Trainer:
    """Return what trains a copy of the step's model, compiled; all from the state that the model is in."""
    # Dynamo keeps what it compiles by code object, whatever the backend's settings: so each gets a forward of its own.
    code = WithLoss.forward.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
    own = type("WithLoss", (WithLoss,), {"forward": FunctionType(code, globals())})
    module = torch.compile(own(step, wrap(step.model)), backend=backend, dynamic=False, fullgraph=True)
    return Trainer(replace(step, model=module, loss_fn=None), common.adamw)


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each budget."""
    torch._inductor.config.force_layout_optimization = options.channels_last
    torch.manual_seed(0)
    step = models_zoo.get(name)(**({"batch": options.batch} if options.batch else {}))
    stock = compiled(step)
    hand = compiled(step, wrap=each_block)
    peaks = {"stock": common.peak_bytes(stock), "checkpoint": peak_if_it_runs("checkpoint", hand)}
    true = gradients(compiled(step, actsolve.backend("100%")))
    differences = {
        "stock": difference_to(true, compiled(step)),
        "checkpoint": None if peaks["checkpoint"] is None else difference_to(true, compiled(step, wrap=each_block)),
    }
    own: dict[float, tuple[Trainer, int | None]] = {}
    common.tell(f"{name} peaks {peaks}")
    rows = []
    for budget in options.budgets:
        common.tell(f"{name} at {budget}")
        static_bytes = stock.static_bytes()
        if budget == "checkpoint":
            if peaks["checkpoint"] is None:
                continue
            cap = peaks["checkpoint"]
        elif budget == "torch":
            largest_fitting(step, 0, own)
            known = [peak for _, peak in own.values() if peak is not None]
            if not known:
                continue
            cap = min(known)
        else:
            cap = static_bytes + int(float(budget.rstrip("%")) / 100 * (peaks["stock"] - static_bytes))
        fitting = largest_fitting(step, cap, own)
        others = {"stock": stock, "checkpoint": hand} | ({} if fitting is None else {"torch": own[fitting][0]})
        if fitting is not None:
            with torch._functorch.config.patch(activation_memory_budget=fitting):
                differences["torch"] = difference_to(true, compiled(step))
        others = {n: trainer for n, trainer in others.items() if peaks.get(n, 0) is not None}
        rows.append(row_of(step, budget, cap, others, options, differences))
        rows[-1] |= {
            "model": name,
            "peaks": peaks,
            "differences": {name: differences[name] for name in others},
            "memory_budget": fitting,
            "own_peak_bytes": own[fitting][1] if fitting is not None else None,
        }
    return rows


def peak_if_it_runs(name: str, trainer: Trainer) -> int | None:
    """Return its peak; None if what torch compiles for it does not run."""
    try:
        return common.peak_bytes(trainer)
    except Exception as error:  # whatever torch's code raises; it is another's step, and told
        common.tell(f"{name} does not run: {type(error).__name__}: {error}")
        return None


def each_block(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with a checkpoint around every block."""
    return checkpointed(model, 1)


def difference_to(true: list[torch.Tensor], trainer: Trainer) -> float | None:
    """Return how far the gradients of its first step are from ``true`` ones, or None where all bits are equal."""
    found = gradients(trainer)
    return None if all(map(bitwise_equal, found, true)) else relative_difference(true, found)


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    """Return the gradients of one step, whose random state is the same in all calls."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trainer.step()
    return [p.grad for p in trainer.module.parameters() if p.grad is not None]


def largest_fitting(step: TrainingStep, cap: int, known: dict[float, tuple[Trainer, int | None]]) -> float | None:
    """Return the largest `activation_memory_budget` whose measured peak is within ``cap``, if any; ``known`` grows."""
    for budget in MEMORY_BUDGETS:
        if budget not in known:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                trainer = compiled(step)
                known[budget] = trainer, peak_if_it_runs(f"activation_memory_budget {budget:g}", trainer)
            common.tell(f"activation_memory_budget {budget:g}: {known[budget][1]}")
        peak = known[budget][1]
        if peak is not None and peak <= cap:
            return budget
    return None


def row_of(
    step: TrainingStep,
    budget: str,
    cap: int,
    others: dict[str, Trainer],
    options: argparse.Namespace,
    differences: dict[str, float | None],
) -> Row:
    """Return what ours needs within ``cap``, its bits, and its times beside the others'.

    Args:
        differences: Of the others' gradients to Inductor's in order.
    """
    row: Row = {"budget": budget, "budget_bytes": cap, "missed": []}
    backend = actsolve.backend(cap, time_limit_s=options.time_limit, rounds=options.rounds)
    ours = compiled(step, backend)
    fresh = compiled(step, "inductor" if differences["stock"] is None else actsolve.backend("100%"))
    try:
        row["difference"] = largest_difference(fresh, ours)
    except InfeasibleBudget as error:
        return row | {"reason": error.what, "smallest_bytes": error.smallest_bytes, "missed": [f"{error.what}: {error.why}"]}
    common.tell(backend.report())
    (graph,) = backend.graphs
    row |= {"our_peak_bytes": common.peak_bytes(ours), "predicted_extra_s": graph.extra_s, "tried": graph.tried}
    steps = {**others, "ours": ours}
    times = interleaved_times(
        {n: t.step for n, t in steps.items()}, options.pairs, before={n: t.drop_gradients for n, t in steps.items()}
    )
    row["step_s"] = {n: median(t) for n, t in times.items()}
    row["ratios"] = {n: median_ratio_ci(times["ours"], times[n]) for n in others}
    row["missed"] += missed(row, differences)
    return row


def missed(row: Row, differences: dict[str, float | None]) -> list[str]:
    """Return what does not hold of what is to be shown; a step of another that computes something else says nothing."""
    found = []
    if row["difference"] is not None:
        found.append(f"differs from stock Inductor by {row['difference']:.1e}")
    if row["our_peak_bytes"] > row["budget_bytes"]:
        found.append(f"our peak is {row['our_peak_bytes'] / row['budget_bytes']:.4f} of the budget")
    for other, ratio in row["ratios"].items():
        beside = other != "stock" and not (other == "checkpoint" and row["budget"] != "checkpoint")
        if beside and (differences[other] or 0.0) < MAX_ERROR and ratio[1] > MAX_RATIO:
            found.append(f"our step takes {interval(ratio)} of that of {other}")
    return found


def ratio_to(other: str) -> Callable[[Row], str]:
    """Return how our time over another's is shown."""
    return lambda row: interval(row["ratios"][other]) if other in row["ratios"] else "-"


COLUMNS = {
    "model": lambda row: row["model"],
    "budget": lambda row: f"{row['budget']}: {format_bytes(row['budget_bytes'])}",
    "stock peak": lambda row: format_bytes(row["peaks"]["stock"]),
    "checkpoint peak": lambda row: "fails" if row["peaks"]["checkpoint"] is None else format_bytes(row["peaks"]["checkpoint"]),
    "torch's own peak": lambda row: f"{format_bytes(row['own_peak_bytes'])} ({row['memory_budget']:g})",
    "our peak": lambda row: row.get("reason") or format_bytes(row["our_peak_bytes"]),
    "bits": lambda row: "equal" if row["difference"] is None else f"{row['difference']:.1e}",
    "others' bits": lambda row: ", ".join(
        f"{name} {'equal' if d is None else format(d, '.1e')}" for name, d in row["differences"].items()
    ),
    "stock step": lambda row: format_seconds(row["step_s"]["stock"]),
    "ours / stock": ratio_to("stock"),
    "ours / checkpoint": ratio_to("checkpoint"),
    "ours / torch's own": ratio_to("torch"),
}

if __name__ == "__main__":
    flags = common.parser(__doc__, models=MODELS, budgets=BUDGETS)
    flags.add_argument("--pairs", type=int, default=20, help="how often each step is timed; default 20")
    flags.add_argument("--batch", type=int, help="in place of the models' own")
    flags.add_argument("--rounds", type=int, default=4, help="plans that are compiled and measured at most; default 4")
    flags.add_argument("--channels-last", action="store_true", help="lay out every graph so")
    options = flags.parse_args()
    sys.exit(common.finish("compiled", common.rows_by_model(rows_of, options), COLUMNS, options))
