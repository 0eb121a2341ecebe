"""ResNet: residual convolution blocks with batch norm, in four stages that halve the image.

Source: He et al., Deep Residual Learning, CVPR 2016, table 1; like torchvision, bottlenecks put their stride
on the 3x3 convolution ("ResNet v1.5", Goyal et al., 2017).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.building import batch_norm, default_dtype, init_relu_
from models_zoo.inputs import labelled_images
from models_zoo.size import Size


def conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, padded so that stride 1 keeps the image size."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, 3, stride)
        self.bn1 = batch_norm(channels)
        self.conv2 = conv(channels, channels, 3)
        self.bn2 = batch_norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, in_channels, h, w] to [batch, channels, h / stride, w / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 that narrow and widen, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, 1)
        self.bn1 = batch_norm(channels)
        self.conv2 = conv(channels, channels, 3, stride)
        self.bn2 = batch_norm(channels)
        self.conv3 = conv(channels, 4 * channels, 1)
        self.bn3 = batch_norm(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(in_channels, 4 * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, in_channels, h, w] to [batch, 4 * channels, h / stride, w / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        out = self.relu(out)
        return out


def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the identity where the shapes agree, else a 1x1 projection."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, out_channels, 1, stride), batch_norm(out_channels))


DEPTHS: dict[int, tuple[type[BasicBlock | Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Images in, class logits (or their loss) out."""

    def __init__(self, *, depth: int, width: int, classes: int) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"unknown depth {depth}; accepted: {', '.join(map(str, DEPTHS))}")
        block, (n1, n2, n3, n4) = DEPTHS[depth]

        def stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
            out_channels = channels * block.expansion
            rest = (block(out_channels, channels, 1) for _ in range(blocks - 1))
            return nn.Sequential(block(in_channels, channels, stride), *rest)

        self.conv1 = conv(3, width, 7, stride=2)
        self.bn1 = batch_norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stage1 = stage(width, width, n1, stride=1)
        self.stage2 = stage(width * block.expansion, 2 * width, n2, stride=2)
        self.stage3 = stage(2 * width * block.expansion, 4 * width, n3, stride=2)
        self.stage4 = stage(4 * width * block.expansion, 8 * width, n4, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * block.expansion, classes)
        init_relu_(self)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes], or with labels the mean cross-entropy (0-d, fp32).

        Args:
            images: [batch, 3, h, w].
            labels: int64 class indices [batch].
        """
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def training_step(
    *,
    depth: int,
    width: int = 64,
    image: int = 224,
    batch: int = 64,
    classes: int = 1000,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of image classification on a fixed batch; the loss is inside the model.

    `width` is the channels of the first convolution; every other layer scales with it.
    """
    with default_dtype(dtype):
        model = ResNet(depth=depth, width=width, classes=classes)
        return TrainingStep(model, args=labelled_images(batch, image, image, classes))


SIZES = [
    Size("resnet18-mini", "ResNet-18 on small images", training_step, depth=18, image=64, batch=16),
    Size("resnet18", "ResNet-18", training_step, depth=18),
    Size(
        "resnet50-mini", "narrow ResNet-50", training_step, depth=50, width=16, image=64, batch=32, classes=10
    ),
    Size("resnet50", "ResNet-50", training_step, depth=50),
    Size("resnet152", "ResNet-152", training_step, depth=152),
]
