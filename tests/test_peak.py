"""What is predicted is what runs: the allocator's peak over whole steps, against the plan and its budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from alike import made
from kinds import step, x
from test_exact import SMALL
from torch import nn

import models_zoo
from actsolve.api import module_of
from actsolve.cost.optimizers import new_optimizer
from actsolve.planning import plan_training_step
from actsolve.runtime.exactness import largest_difference
from actsolve.runtime.measure_step import measured_peak
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recurrent() -> TrainingStep:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(16, 32, 2, dropout=0.15), nn.Linear(32, 5)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.out(self.rnn(h)[0]).flatten(0, 1), torch.arange(64 * 8) % 5)

    return step(Tagger(), x(64, 8, 16))


def transposed_norms() -> TrainingStep:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms, self.layers = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(3)), nn.Linear(64, 64)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                h = self.layers(F.gelu(norm(h.transpose(1, 2))).transpose(1, 2).transpose(1, 2).contiguous()).transpose(1, 2)
            return h.square().mean()

    return step(Mixer(), x(8, 64, 32))


STEPS = {
    "gpt-mini": partial(models_zoo.get("gpt-mini"), **SMALL["gpt-mini"]),
    "conv-chain-mini": partial(models_zoo.get("conv-chain-mini"), **SMALL["conv-chain-mini"]),
    "an LSTM": recurrent,
    "batch norms of transposed inputs": transposed_norms,
}
OTHERS = {name: partial(models_zoo.get(name), **settings) for name, settings in SMALL.items() if name not in STEPS}
PARAMETERS = [*STEPS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_measured_peak_is_the_predicted_one(name: str) -> None:
    make = (STEPS | OTHERS)[name]
    smallest = keep_all = 0
    for budget in ("min", "between", "100%"):
        training = made(make)
        size = (smallest + keep_all) // 2 if budget == "between" else budget
        captured, planned = plan_training_step(training, size, Settings())
        smallest, keep_all = smallest or planned.problem.budget_bytes, planned.keep_all.peak_bytes
        optimizer = partial(new_optimizer, "adamw")
        trainer = Trainer(training, optimizer, module=module_of(training, captured, planned))
        trainer.step()  # the optimizer's state exists
        peak = measured_peak(trainer.step, trainer.static_bytes(), before=trainer.drop_gradients)
        assert peak <= planned.problem.budget_bytes, budget
        assert abs(planned.timeline.peak_bytes - peak) <= 0.02 * peak, budget
        twins = Trainer(made(make), optimizer), made(make)
        ours = Trainer(twins[1], optimizer, module=module_of(twins[1], captured, planned))
        assert largest_difference(twins[0], ours) is None, budget
