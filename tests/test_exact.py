"""Law: every plan's module trains as the original does, bit for bit: outputs, gradients, buffers and random state."""

from __future__ import annotations

from typing import Any

import kinds_of_autograd  # noqa: F401  # they register themselves
import kinds_of_data  # noqa: F401
import kinds_of_layers  # noqa: F401
import kinds_of_state  # noqa: F401
import pytest
import torch
from alike import assert_trains_alike
from kinds import KINDS

import models_zoo
from actsolve.capture.captured import Captured
from actsolve.cost.layout_check import capture_as_laid_out
from actsolve.training_step import TrainingStep

SMALL: dict[str, dict[str, Any]] = {
    "gpt-mini": {"layers": 2, "width": 32, "heads": 2, "seq": 16, "batch": 2},
    "llama-mini": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "seq": 16, "batch": 2},
    "bert-mini": {"layers": 2, "width": 32, "heads": 2, "seq": 16, "batch": 2},
    "vit-mini": {"layers": 2, "width": 32, "heads": 2, "image": 16, "patch": 8, "batch": 2},
    "resnet18-mini": {"image": 32, "batch": 2, "width": 8},
    "mobilenet_v2-mini": {"image": 16, "batch": 2},
    "unet-mini": {"image": 32, "batch": 2},
    "conv-chain-mini": {"layers": 4, "batch": 2},
    "mlp-mini": {"layers": 3, "width": 16, "batch": 8},
    "vgg16-mini": {"batch": 2, "image": 32},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


DEEP = pytest.param("mobilenet_v2-mini", marks=pytest.mark.slow)  # 52 convolutions


@pytest.mark.parametrize("name", [DEEP if name in DEEP.values else name for name in SMALL])
def test_zoo(name: str) -> None:
    assert_trains_alike(lambda: models_zoo.get(name)(**SMALL[name]), seeds=1)


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str) -> None:
    kind = KINDS[name]
    assert_trains_alike(kind.make, loss=kind.loss, context=kind.context, seeds=1)


WORDS = ("tied", "frozen", "autocast", "twice", "None", "batch norm")


@pytest.mark.parametrize("name", [name for name in KINDS if any(word in name for word in WORDS)])
def test_gradients_that_are_added_as_they_are_made(name: str) -> None:
    """To those that are there or, where there are none yet, by autograd: the harness zeroes them and drops them in turns."""
    kind = KINDS[name]

    def capture(step: TrainingStep) -> Captured:
        return capture_as_laid_out(step).accumulating()

    assert_trains_alike(kind.make, loss=kind.loss, context=kind.context, seeds=1, capture=capture)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-mini", "resnet18-mini", "bert-mini"])
def test_zoo_that_accumulates(name: str) -> None:
    capture = lambda step: capture_as_laid_out(step).accumulating()  # noqa: E731
    assert_trains_alike(lambda: models_zoo.get(name)(**SMALL[name]), seeds=1, capture=capture)
