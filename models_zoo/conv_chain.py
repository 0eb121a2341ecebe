"""A plain deep chain of equal convolutions: the textbook case for recomputation.

Source: the linear chains of Griewank and Walther, Revolve, TOMS 2000, and Chen et al., Training Deep Nets
with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.building import default_dtype, init_relu_
from models_zoo.inputs import floats
from models_zoo.size import Size


class ConvChain(nn.Module):
    """`layers` times a 3x3 convolution and a ReLU, every one of the same shape."""

    def __init__(self, *, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(layers))
        )
        init_relu_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, width, h, w] to the same shape."""
        out: Tensor = self.layers(x)
        return out


def mean_square(output: Tensor) -> Tensor:
    """Return the mean of the squares (0-d, fp32)."""
    return output.float().square().mean()


def training_step(
    *, layers: int = 100, width: int = 64, image: int = 56, batch: int = 32, dtype: str = "fp32"
) -> TrainingStep:
    """Return one step that shrinks the output of a fixed batch; the loss is outside the model."""
    with default_dtype(dtype):
        model = ConvChain(layers=layers, width=width)
        return TrainingStep(model, args=(floats((batch, width, image, image)),), loss_fn=mean_square)


SIZES = [
    Size(
        "conv-chain-mini",
        "24 equal small convolutions",
        training_step,
        layers=24,
        width=16,
        image=32,
        batch=32,
    ),
    Size("conv-chain", "100 equal convolutions", training_step),
]
