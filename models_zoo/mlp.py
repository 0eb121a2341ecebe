"""A deep multilayer perceptron with equal hidden layers: the simplest chain of matrix products.

Source: Rumelhart et al., Nature 1986, with the rectifiers of Glorot et al., AISTATS 2011. Inputs have the
size of an MNIST digit.
"""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.building import default_dtype, init_relu_
from models_zoo.inputs import floats, integers
from models_zoo.size import Size

FEATURES = 28 * 28


class MLP(nn.Module):
    """Feature vectors in, class logits out."""

    def __init__(self, *, layers: int, width: int, classes: int) -> None:
        super().__init__()
        ins = [FEATURES] + [width] * (layers - 1)
        self.hidden = nn.Sequential(*(nn.Sequential(nn.Linear(i, width), nn.ReLU()) for i in ins))
        self.head = nn.Linear(width, classes)
        init_relu_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] for x [batch, 784]."""
        logits: Tensor = self.head(self.hidden(x))
        return logits


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy (0-d, fp32) of logits [batch, classes] against class indices [batch]."""
    return F.cross_entropy(logits.float(), labels)


def training_step(
    *, layers: int, width: int, batch: int, classes: int = 10, dtype: str = "fp32"
) -> TrainingStep:
    """Return one step of classification on a fixed batch; the loss, outside the model, holds the labels."""
    with default_dtype(dtype):
        model = MLP(layers=layers, width=width, classes=classes)
        x = floats((batch, FEATURES))
    loss_fn = functools.partial(cross_entropy, labels=integers((batch,), classes))
    return TrainingStep(model, args=(x,), loss_fn=loss_fn)


SIZES = [
    Size("mlp-mini", "narrow deep MLP", training_step, layers=12, width=256, batch=4096),
    Size("mlp", "wide deep MLP", training_step, layers=24, width=2048, batch=16384),
]
