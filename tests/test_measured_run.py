"""What running an optimized module beside the original tells, and that it would tell if they differed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actsolve.cost.optimizers import new_optimizer
from actsolve.errors import UsageError
from actsolve.runtime.exactness import bitwise_equal, largest_difference, relative_difference
from actsolve.runtime.measured_run import measure_runs
from actsolve.runtime.trainer import Trainer, scalar_loss
from actsolve.training_step import TrainingStep

adamw = partial(new_optimizer, "adamw")


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5, self.training)
        out: torch.Tensor = self.second(hidden) * self.factor
        return out


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def a_step(factor: float = 1.0) -> TrainingStep:
    return TrainingStep(Net(factor), (torch.linspace(0, 1, 512).view(32, 16),), loss_fn=mean_square)


def test_equal_modules_train_alike_to_the_bit() -> None:
    assert largest_difference(Trainer(a_step(), adamw), Trainer(a_step(), adamw)) is None


def test_a_small_difference_is_seen_and_measured() -> None:
    sgd = partial(new_optimizer, "sgd")
    difference = largest_difference(Trainer(a_step(), sgd), Trainer(a_step(1 + 1e-5), sgd), steps=1)
    assert difference is not None and 1e-5 < difference < 1e-4


def test_another_random_state_is_seen() -> None:
    class Draws(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            torch.rand(1)
            return out

    other = a_step()
    other.model = Draws()
    assert largest_difference(Trainer(a_step(), adamw), Trainer(other, adamw), steps=1) == 1.0


def test_bits_are_compared_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(torch.tensor(0.0), torch.tensor(-0.0))
    assert relative_difference([torch.tensor(0.0)], [torch.tensor(-0.0)]) == 0
    assert not bitwise_equal(torch.ones(2), torch.ones(2, 1)) and not bitwise_equal(torch.ones(2), None)
    assert bitwise_equal(None, None)
    assert relative_difference([torch.ones(2)], [nan]) == 1
    assert relative_difference([nan, None], [nan.clone(), None]) == 1  # equal, but no number says so
    assert relative_difference([torch.tensor([4.0, 2.0]), torch.ones(0)], [torch.tensor([4.0, 3.0]), torch.ones(0)]) == 0.25
    assert relative_difference([torch.tensor([1])], [torch.tensor([2])]) == 1
    assert relative_difference([torch.tensor([1]), torch.ones(1)], [torch.tensor([1]), torch.ones(1)]) == 0
    assert relative_difference([torch.ones(1)], [None]) == 1


def test_a_run_measures_both_sides() -> None:
    step = a_step()
    twin = Trainer(a_step(), adamw)

    class WithLoss(nn.Module):
        """Stands for an optimized module: the original's parameters, and a call returns the loss too."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = step.model

        def forward(self, x: torch.Tensor) -> Any:
            y = self.inner(x)
            return mean_square(y), y

    [(name, measured)] = measure_runs(step, {"twin": WithLoss()}, adamw, timing_s=0.05).items()
    assert (name, measured.gradients) == ("twin", "bitwise")
    assert measured.peak_bytes == measured.eager_peak_bytes
    assert measured.step_s > 0 and measured.eager_step_s > 0 and measured.pairs >= 5
    assert measured.step_ratio[1] <= measured.step_ratio[0] <= measured.step_ratio[2]
    twin.step()
    # Parameters and their AdamW state, buffers, inputs; above them at least the gradients.
    parameters = sum(p.nbytes for p in step.model.parameters())
    assert twin.static_bytes() == 3 * parameters + 6 * 4 + 2 * 64 * 4 + 8 + 32 * 16 * 4
    assert measured.peak_bytes >= twin.static_bytes() + parameters
    assert measured.as_json()["step_ratio"] == list(measured.step_ratio)


def test_gradients_that_accumulate_are_static() -> None:
    trainer = Trainer(a_step(), partial(new_optimizer, "none"), accumulate=True)
    before = trainer.static_bytes()
    for _ in range(2):
        trainer.drop_gradients()
        trainer.step()
    assert trainer.optimizer is None
    assert trainer.static_bytes() == before + sum(p.nbytes for p in trainer.module.parameters())


def test_where_the_loss_is() -> None:
    loss = torch.ones((), requires_grad=True)
    for output in (loss, (loss, 1), [loss], {"loss": loss, "logits": None}, SimpleNamespace(loss=loss)):
        assert scalar_loss(output) is loss
    for output in (loss.detach(), loss.expand(2), (), {"logits": loss}, "loss"):
        with pytest.raises(UsageError, match="it has no loss"):
            scalar_loss(output)


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "adamw", "adagrad", "rmsprop"])
def test_every_named_optimizer_can_be_made(name: str) -> None:
    trainer = Trainer(a_step(), partial(new_optimizer, name))
    before = [p.detach().clone() for p in trainer.module.parameters()]
    trainer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.module.parameters(), strict=True))


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(UsageError, match="no optimizer is called 'adamx'"):
        new_optimizer("adamx", [])
