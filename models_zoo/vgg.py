"""VGG: 3x3 convolutions and ReLUs between five max pools, then three large linear layers. No batch norm.

Source: Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015, table 1, columns D (16) and E
(19); dropout 0.5 in the classifier. Like torchvision, an adaptive pool lets it take any image size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.building import default_dtype, init_normal_, init_relu_
from models_zoo.inputs import labelled_images
from models_zoo.size import Size

CONVS_PER_STAGE = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
CHANNEL_MULTIPLES = (1, 2, 4, 8, 8)
POOLED = 7  # side of the last feature map


class VGG(nn.Module):
    """Images in, class logits (or their loss) out."""

    def __init__(self, *, depth: int, width: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        if depth not in CONVS_PER_STAGE:
            raise ValueError(f"unknown depth {depth}; accepted: {', '.join(map(str, CONVS_PER_STAGE))}")
        layers: list[nn.Module] = []
        channels = 3
        for convs, multiple in zip(CONVS_PER_STAGE[depth], CHANNEL_MULTIPLES, strict=True):
            for _ in range(convs):
                layers += [nn.Conv2d(channels, multiple * width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = multiple * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED)
        self.classifier = nn.Sequential(
            nn.Linear(channels * POOLED**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        init_relu_(self.features)
        init_normal_(self.classifier, std=0.01)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes], or with labels the mean cross-entropy (0-d, fp32).

        Args:
            images: [batch, 3, h, w], h and w at least 32.
            labels: int64 class indices [batch].
        """
        logits: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def training_step(
    *,
    depth: int,
    width: int = 64,
    hidden: int = 4096,
    image: int = 224,
    batch: int = 64,
    classes: int = 1000,
    dropout: float = 0.5,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of image classification on a fixed batch; the loss is inside the model.

    `width` is the channels of the first convolution, with which the others scale; `hidden` is the
    classifier's width.
    """
    with default_dtype(dtype):
        model = VGG(depth=depth, width=width, hidden=hidden, classes=classes, dropout=dropout)
        return TrainingStep(model, args=labelled_images(batch, image, image, classes))


SIZES = [
    Size(
        "vgg16-mini",
        "narrow VGG-16",
        training_step,
        depth=16,
        width=16,
        hidden=128,
        image=96,
        batch=16,
        classes=10,
    ),
    Size("vgg16", "VGG-16", training_step, depth=16),
    Size("vgg19", "VGG-19", training_step, depth=19),
]
