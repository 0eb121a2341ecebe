"""U-Net: a contracting and an expanding path of double convolutions, with a skip connection at every scale.

Source: Ronneberger et al., U-Net, MICCAI 2015, figure 1. Convolutions are padded, so that the output has the
image's size, and batch norm is optional; the paper has neither, and dropout at the bottom, which is left out
here. The image size is that of Checkmate's U-Net (Jain et al., MLSys 2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.building import batch_norm as batch_norm_2d
from models_zoo.building import default_dtype, init_relu_
from models_zoo.inputs import floats, integers
from models_zoo.size import Size


def double_conv(in_channels: int, channels: int, batch_norm: bool) -> nn.Sequential:
    """Return two padded 3x3 convolutions, each with an optional batch norm and a ReLU."""
    layers: list[nn.Module] = []
    for i in range(2):
        layers.append(nn.Conv2d(channels if i else in_channels, channels, 3, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(batch_norm_2d(channels))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class Up(nn.Module):
    """Double the image, join the skip connection, convolve twice."""

    def __init__(self, channels: int, batch_norm: bool) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * channels, channels, kernel_size=2, stride=2)
        self.convs = double_conv(2 * channels, channels, batch_norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map x [batch, 2 * channels, h / 2, w / 2] and skip [batch, channels, h, w] to the shape of skip."""
        out: Tensor = self.convs(torch.cat((skip, self.up(x)), dim=1))
        return out


class UNet(nn.Module):
    """Images in, per-pixel class logits (or their loss) out."""

    def __init__(self, *, layers: int, width: int, classes: int, batch_norm: bool) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(layers + 1)]
        ins = [3, *channels]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(
            double_conv(ins[level], channels[level], batch_norm) for level in range(layers + 1)
        )
        self.up = nn.ModuleList(Up(channels[level], batch_norm) for level in reversed(range(layers)))
        self.head = nn.Conv2d(width, classes, 1)
        init_relu_(self)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes, h, w], or with labels the mean cross-entropy of all pixels (fp32).

        Args:
            images: [batch, 3, h, w], h and w multiples of 2**layers.
            labels: int64 class indices [batch, h, w].
        """
        x = self.down[0](images)
        skips = []
        for down in self.down[1:]:
            skips.append(x)
            x = down(self.pool(x))
        for up in self.up:
            x = up(x, skips.pop())
        logits: Tensor = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def training_step(
    *,
    layers: int = 4,
    width: int = 64,
    image: int | tuple[int, int] = (416, 608),
    batch: int = 16,
    classes: int = 2,
    batch_norm: bool = True,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of segmentation on a fixed batch; the loss is inside the model.

    `layers` is how often the image is halved, `width` the channels at full size, doubled at every halving;
    `image` is (height, width) or one number for both.
    """
    height, breadth = (image, image) if isinstance(image, int) else image
    if height % 2**layers or breadth % 2**layers:
        raise ValueError(f"image {height}x{breadth} is not a multiple of {2**layers}, for {layers} halvings")
    with default_dtype(dtype):
        model = UNet(layers=layers, width=width, classes=classes, batch_norm=batch_norm)
        args = (floats((batch, 3, height, breadth)), integers((batch, height, breadth), classes))
        return TrainingStep(model, args=args)


SIZES = [
    Size("unet-mini", "narrow U-Net on small images", training_step, width=8, image=(96, 128), batch=8),
    Size("unet", "U-Net, 31M", training_step),
]
