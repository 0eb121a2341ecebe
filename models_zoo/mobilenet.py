"""MobileNetV2: inverted residual blocks, wide and depthwise inside and narrow between.

Source: Sandler et al., MobileNetV2, CVPR 2018, table 2; dropout 0.2 before the classifier as in torchvision.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.building import batch_norm, default_dtype, init_normal_, init_relu_
from models_zoo.inputs import labelled_images
from models_zoo.size import Size

STAGES = (  # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def scaled(channels: int, width_mult: float) -> int:
    """Return the channels times the multiplier, as the nearest multiple of 8 that loses at most a tenth."""
    wanted = channels * width_mult
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8


def conv_bn_relu(
    in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return a convolution, its batch norm, and a ReLU that is cut off at 6."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        batch_norm(channels),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Widen (1x1), filter each channel (3x3), narrow (1x1); a residual where the shapes agree."""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        widen = [conv_bn_relu(in_channels, hidden, 1)] if expansion > 1 else []
        self.residual = stride == 1 and in_channels == channels
        self.conv = nn.Sequential(
            *widen,
            conv_bn_relu(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            batch_norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, in_channels, h, w] to [batch, channels, h / stride, w / stride]."""
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """Images in, class logits (or their loss) out."""

    def __init__(self, *, width_mult: float, classes: int, dropout: float) -> None:
        super().__init__()
        channels = scaled(32, width_mult)
        layers: list[nn.Module] = [conv_bn_relu(3, channels, 3, stride=2)]
        for expansion, stage_channels, blocks, stride in STAGES:
            for i in range(blocks):
                out_channels = scaled(stage_channels, width_mult)
                layers.append(InvertedResidual(channels, out_channels, stride if i == 0 else 1, expansion))
                channels = out_channels
        last = scaled(1280, max(1.0, width_mult))
        layers.append(conv_bn_relu(channels, last, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))
        init_relu_(self.features)
        init_normal_(self.classifier, std=0.01)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes], or with labels the mean cross-entropy (0-d, fp32).

        Args:
            images: [batch, 3, h, w].
            labels: int64 class indices [batch].
        """
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def training_step(
    *,
    width_mult: float = 1.0,
    image: int = 224,
    batch: int = 64,
    classes: int = 1000,
    dropout: float = 0.2,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of image classification on a fixed batch; the loss is inside the model.

    `width_mult` multiplies the channels of every layer (the paper's alpha), except that the last never has
    fewer.
    """
    with default_dtype(dtype):
        model = MobileNetV2(width_mult=width_mult, classes=classes, dropout=dropout)
        return TrainingStep(model, args=labelled_images(batch, image, image, classes))


SIZES = [
    Size("mobilenet_v2-mini", "MobileNetV2 on small images", training_step, image=64, batch=16, classes=10),
    Size("mobilenet_v2", "MobileNetV2", training_step),
]
