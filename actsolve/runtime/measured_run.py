"""An optimized module beside the original, run here: peaks, times, and whether they train alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from actsolve.runtime.exactness import largest_difference
from actsolve.runtime.measure_step import interleaved_times, measured_peak, median_ratio_ci
from actsolve.runtime.trainer import MakeOptimizer, Trainer
from actsolve.training_step import TrainingStep

Stage = Callable[[str], None]

EAGER = "eager"
_TIMING_S = 10.0
_LEAST_PAIRS, _MOST_PAIRS = 5, 40


@dataclass(frozen=True)
class Measured:
    """What running an optimized module here gave, beside the original.

    Attributes:
        peak_bytes: Static bytes that exist, and the most that the allocator held above them over one whole step.
        step_s: Median seconds of a whole step.
        eager_peak_bytes: Likewise of the original.
        eager_step_s: Likewise of the original, in turns with the other.
        step_ratio: Median of the paired ratios of the times, this over eager, and the ends of its 95% interval.
        pairs: How many pairs that is of.
        gradients: ``"bitwise"`` where loss, outputs, gradients, parameters, buffers and random state were equal to eager's
            over 3 steps, or else the largest relative difference.
    """

    peak_bytes: int
    step_s: float
    eager_peak_bytes: int
    eager_step_s: float
    step_ratio: tuple[float, float, float]
    pairs: int
    gradients: str | float

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``measured`` in ``optimize --json``."""
        return {**asdict(self), "step_ratio": list(self.step_ratio)}


def measure_runs(
    step: TrainingStep,
    modules: Mapping[str, torch.nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    accumulate: bool = False,
    timing_s: float = _TIMING_S,
    stage: Stage = lambda _: None,
) -> dict[str, Measured]:
    """Run each module and the original; return what was measured, by name.

    The modules share the parameters of ``step.model``, which are trained by this; the original runs on a copy.

    Args:
        step: The original.
        modules: Optimized modules of it.
        make_optimizer: Makes an optimizer of the parameters, or None for none.
        accumulate: Gradients stay from step to step.
        timing_s: About how long to take times for each module.
        stage: Told what is being done.
    """

    def trainer(module: torch.nn.Module | None = None) -> Trainer:
        original = step if module is not None else replace(step, model=copy.deepcopy(step.model))
        return Trainer(original, make_optimizer, module=module, accumulate=accumulate)

    differences = {}
    for name, module in modules.items():
        stage(f"comparing {name} with eager")
        differences[name] = largest_difference(trainer(), trainer(module))
    trainers = {EAGER: trainer(), **{name: trainer(module) for name, module in modules.items()}}
    peaks = {}
    for name, runner in trainers.items():
        stage(f"measuring the peak of {name}")
        peaks[name] = _peak(runner)
    stage("taking times")
    times = _times(trainers, timing_s)
    return {
        name: Measured(
            peak_bytes=peaks[name],
            step_s=median(times[name]),
            eager_peak_bytes=peaks[EAGER],
            eager_step_s=median(times[EAGER]),
            step_ratio=median_ratio_ci(times[name], times[EAGER]),
            pairs=len(times[name]),
            gradients="bitwise" if (difference := differences[name]) is None else difference,
        )
        for name in modules
    }


def _peak(trainer: Trainer) -> int:
    """The peak of the second step, for which the optimizer's state exists."""
    trainer.drop_gradients()
    trainer.step()
    return measured_peak(trainer.step, trainer.static_bytes(), before=trainer.drop_gradients, device=trainer.device, warmup=0)


def _times(trainers: Mapping[str, Trainer], timing_s: float) -> dict[str, list[float]]:
    steps = {name: t.step for name, t in trainers.items()}
    before = {name: t.drop_gradients for name, t in trainers.items()}
    device = trainers[EAGER].device
    first = interleaved_times(steps, 1, before=before, device=device, warmup=1)
    once_s = sum(t for times in first.values() for t in times)
    pairs = max(_LEAST_PAIRS, min(_MOST_PAIRS, int(timing_s * (len(steps) - 1) / max(once_s, 1e-9))))
    return interleaved_times(steps, pairs, before=before, device=device, warmup=0)
