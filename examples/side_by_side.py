"""Train the same model twice, as it is and within a memory budget, and compare: what all examples print."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import actsolve
from actsolve.runtime.memory_events import MemoryRecorder, measure_peak, peak_of
from actsolve.units import format_bytes, format_seconds

Batch = tuple[torch.Tensor, ...]
PROFILED_STEP = 1  # the first step at which the optimizer has its state


@dataclass(frozen=True)
class Run:
    """What one training run gave.

    Attributes:
        losses: One for each step.
        peak_bytes: Measured over one whole step: forward, backward and optimizer step, with all that is held between steps.
        step_s: Median seconds of a step; those that compile or are profiled are left out.
        setup_s: Seconds of planning before the first step.
    """

    losses: list[float]
    peak_bytes: int
    step_s: float
    setup_s: float = 0.0


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], setup_s: float = 0.0) -> Run:
    """Train ``model``, whose call returns the loss, on ``batches``: an ordinary loop, with one step profiled."""
    losses, times, peak_bytes = [], [], 0
    for i, batch in enumerate(batches):

        def step(batch: Batch = batch) -> float:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            return loss.item()

        optimizer.zero_grad()
        if i == PROFILED_STEP:
            measured = measure_peak(step)
            losses.append(measured.result)
            peak_bytes = held_bytes(model, optimizer, batch) + measured.peak_bytes
            continue
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    return Run(losses, peak_bytes, median(times[1:] or times), setup_s)


class Watch:
    """Keeps the loss and the time of each step of a loop that is another library's, and the peak of one step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._times: list[float] = []
        self._peak_bytes = 0
        self._recorder = MemoryRecorder()
        self._recording = contextlib.ExitStack()

    def begin(self, step: int, held_bytes: int) -> None:
        """Tell that ``step``, counted from 0, begins, while so many bytes are held between steps."""
        self._step, self._held_bytes, self._start = step, held_bytes, time.perf_counter()
        if step == PROFILED_STEP:
            self._recording.enter_context(self._recorder)
            self._recording.enter_context(self._recorder.region())

    def end(self) -> None:
        """Tell that the step has ended."""
        if self._step == PROFILED_STEP:
            self._recording.close()
            self._peak_bytes = self._held_bytes + peak_of(self._recorder.timelines()[0])
        else:
            self._times.append(time.perf_counter() - self._start)

    def run(self) -> Run:
        """Return what was seen. The first step is where it is planned."""
        return Run(self.losses, self._peak_bytes, median(self._times[1:]), self._times[0])


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    """Return what is held between steps: parameters, buffers, optimizer state, and the batch."""
    state = [t for per_parameter in optimizer.state.values() for t in per_parameter.values() if isinstance(t, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *state, *batch]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def parser(about: str | None, *, budget: str, steps: int, batch: int, lr: float) -> argparse.ArgumentParser:
    """Return the flags that all examples have, with an example's defaults."""
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--mem-budget", default=budget, help="8GiB, 7500MB, bytes, a share of what the step needs, or min")
    flags.add_argument("--steps", type=int, default=steps)
    flags.add_argument("--batch", type=int, default=batch)
    flags.add_argument("--lr", type=float, default=lr)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--time-limit", type=float, default=20.0, help="seconds for the solver")
    return flags


def compare(run: Callable[[argparse.Namespace, str | None], tuple[Run, torch.nn.Module]], options: argparse.Namespace) -> int:
    """Run an example within its budget and without one, and print both; return the exit code: 0 if they learn the same."""
    try:
        budgeted, optimized = run(options, options.mem_budget)
    except actsolve.ActsolveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    plain, model = run(options, None)
    return 0 if show(plain, budgeted, optimized.plan.budget_bytes, same_state(model, optimized)) else 1


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return whether all parameters and buffers are bitwise equal."""
    theirs = b.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in a.state_dict().items())


def show(plain: Run, budgeted: Run, budget_bytes: int, same_weights: bool, console: Console | None = None) -> bool:
    """Print both loss curves and what they cost; return whether they are bitwise equal."""
    console = console or Console()
    curves = Table("step", "loss as it is", "loss within the budget", "equal", title="Loss curves")
    n = len(plain.losses)
    for i in sorted({0, n - 1, *range(0, n, max(1, n // 10))}):
        a, b = plain.losses[i], budgeted.losses[i]
        curves.add_row(str(i + 1), f"{a:.9f}", f"{b:.9f}", "yes" if a == b else "NO")
    console.print(curves)
    costs = Table("", "as it is", "within the budget", "ratio", title=f"Cost, budget {format_bytes(budget_bytes)}")
    costs.add_row("peak memory", *_pair(plain.peak_bytes, budgeted.peak_bytes, format_bytes))
    costs.add_row("median step", *_pair(plain.step_s, budgeted.step_s, format_seconds))
    costs.add_row("planning, once", "-", format_seconds(budgeted.setup_s), "")
    console.print(costs)
    equal = sum(a == b for a, b in zip(plain.losses, budgeted.losses, strict=True))
    weights = "bitwise equal" if same_weights else "DIFFER"
    fits = "within" if budgeted.peak_bytes <= budget_bytes else "OVER"
    console.print(f"losses bitwise equal at {equal} of {n} steps; trained weights and buffers {weights}; peak {fits} the budget")
    return equal == n and same_weights


def _pair(plain: float, budgeted: float, form: object) -> Sequence[str]:
    assert callable(form)
    return form(plain), form(budgeted), f"{budgeted / plain:.2f}"
