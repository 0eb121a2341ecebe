"""A real model whose smallest plans need a replay in the forward: they train bitwise as eager does, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from alike import assert_equal_training, made, planned_module
from kinds import step
from torch import nn

from actsolve.api import module_of
from actsolve.capture.captured import Captured
from actsolve.cost.optimizers import new_optimizer
from actsolve.dag import dag_of
from actsolve.plan_file import load_plan
from actsolve.planned import Planned
from actsolve.planners import PlannerOptions
from actsolve.planners.dag_search import plan_dag
from actsolve.planning import plan_training_step
from actsolve.replays import replays_in_forward
from actsolve.runtime.exactness import bitwise_equal
from actsolve.runtime.measure_step import measured_peak
from actsolve.runtime.trainer import Trainer
from actsolve.schedule import StepKind
from actsolve.settings import Settings
from actsolve.split import first_backward_step
from actsolve.training_step import TrainingStep

Make = Callable[[], TrainingStep]

BATCH, WIDTH, CODES = 64, 256, 4096


class Quantized(nn.Module):
    """A large skip connection over a wide place that only the forward has: distances to a codebook, for their argmin."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.up, self.down, self.over = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(0.25)
        self.register_buffer("codes", torch.randn(CODES, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.drop(torch.sigmoid(self.norm(self.up(x))))
        small = self.down(skip)
        with torch.no_grad():
            nearest = (small @ self.codes.T).argmax(1)  # type: ignore[operator]
        return (self.over(small + self.codes[nearest]) * skip).square().mean()  # type: ignore[index]


def quantized(*, norm: bool) -> TrainingStep:
    return step(Quantized(norm=norm), torch.randn(BATCH, 8))


@pytest.fixture(scope="module", params=[False, True], ids=["dropout", "batch norm and dropout"])
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Make, Captured, Planned]]:
    """How to make the step, and its plan at the smallest budget, of costs that are measured here."""
    make = partial(quantized, norm=request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        yield make, *plan_training_step(made(make), "min", Settings())
    torch.set_num_threads(threads)


def test_it_needs_replays_in_the_forward(planned: tuple[Make, Captured, Planned]) -> None:
    """Of dropout, too; without them, nothing fits."""
    _, captured, found = planned
    graph = captured.graph
    assert replays_in_forward(graph, found.plan) and found.plan.bounds_forward
    forward = found.schedule.steps[: first_backward_step(graph, found.schedule)]
    replayed = [graph.ops[s.op] for s in forward if s.kind is StepKind.REPLAY and s.op is not None]
    assert any(op.random for op in replayed)
    assert any("batch_norm" in op.target for op in replayed) == any("batch_norm" in op.target for op in graph.ops)
    without = plan_dag(dag_of(found.problem), PlannerOptions(time_limit_s=10))
    assert without.sequence is None and without.infeasible


def test_it_trains_alike_within_the_budget(planned: tuple[Make, Captured, Planned]) -> None:
    make, captured, found = planned
    training, optimizer = made(make), partial(new_optimizer, "adamw")
    trainer = Trainer(training, optimizer, module=module_of(training, captured, found))
    trainer.step()  # the optimizer's state exists
    peak = measured_peak(trainer.step, trainer.static_bytes(), before=trainer.drop_gradients)
    assert peak <= found.problem.budget_bytes
    assert abs(found.timeline.peak_bytes - peak) <= 0.02 * peak
    reference, ours = made(make), made(make)
    assert_equal_training(reference, ours, module_of(ours, captured, found), lambda y: y, 3, nullcontext, "smallest")


def test_backwards_again_and_forwards_that_wait(planned: tuple[Make, Captured, Planned]) -> None:
    make, captured, found = planned
    pair = made(make), made(make)
    calls = pair[0].model, module_of(pair[1], captured, found)
    states = []
    for training, call in zip(pair, calls, strict=True):
        torch.manual_seed(5)
        first, second = call(*training.args), call(*training.args)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for theirs, ours in zip(*(training.model.parameters() for training in pair), strict=True):
        assert bitwise_equal(theirs.grad, ours.grad)


def test_the_saved_plan_is_carried_out(planned: tuple[Make, Captured, Planned], tmp_path: Path) -> None:
    make, captured, found = planned
    found.plan_file.save(tmp_path / "plan.json")
    schedule, kept = load_plan(tmp_path / "plan.json").decode(captured.graph)
    assert (schedule, kept) == (found.schedule, found.plan.kept)
    reference, ours = made(make), made(make)
    module = planned_module(ours, captured, schedule)
    assert_equal_training(reference, ours, module, lambda y: y, 2, nullcontext, "loaded")
