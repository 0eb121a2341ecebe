"""On a CUDA device: exact under deterministic algorithms, within the budget, costs measured there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

import models_zoo
from actsolve.api import module_of, plan_training_step
from actsolve.cost.optimizers import new_optimizer
from actsolve.runtime.exactness import largest_difference
from actsolve.runtime.measure_step import measured_peak
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ADAMW = partial(new_optimizer, "adamw")
MODELS = ["gpt-mini", "llama-mini", "bert-mini", "vit-mini", "resnet18-mini", "unet-mini"]


@pytest.fixture(autouse=True)
def _deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_device(name: str) -> TrainingStep:
    torch.manual_seed(0)
    step = models_zoo.get(name)()
    args, kwargs = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, (step.args, step.kwargs))
    return replace(step, model=step.model.cuda(), args=args, kwargs=kwargs)


@pytest.mark.parametrize("budget", ["100%", "60%", "min"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_eager_does_within_the_budget(name: str, budget: str) -> None:
    step = on_device(name)
    if name == "resnet18-mini" and budget == "60%":
        pytest.skip("its gradients and the optimizer's step alone need more")
    captured, planned = plan_training_step(step, budget, Settings())
    twin = replace(step, model=copy.deepcopy(step.model))
    trainer = Trainer(step, ADAMW, module=module_of(step, captured, planned))
    assert largest_difference(Trainer(twin, ADAMW), trainer) is None
    peak_bytes = measured_peak(trainer.step, trainer.static_bytes(), before=trainer.drop_gradients, device="cuda")
    assert peak_bytes <= planned.problem.budget_bytes


def test_ops_are_measured_on_the_device() -> None:
    _, planned = plan_training_step(on_device("gpt-mini"), "100%", Settings())
    costs = planned.problem.costs
    assert torch.cuda.get_device_name() in costs.source
    assert all(seconds > 0 for op, seconds in zip(planned.problem.graph.ops, costs.seconds, strict=True) if not op.optional)
