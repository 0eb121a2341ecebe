"""Vision Transformer: GPT-like blocks without a causal mask over image patches and a class token.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021: sizes in table 1; dropout 0.1 (table 3,
training on ImageNet) on the embeddings and after every dense layer but the query, key and value projections
(appendix B.1). Here the classifier starts from small weights, not from zero, so that the first step has
gradients everywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.attention import SelfAttention
from models_zoo.building import default_dtype, init_normal_
from models_zoo.inputs import labelled_images
from models_zoo.size import Size

NORM_EPS = 1e-6


class Block(nn.Module):
    """Pre-norm attention and MLP, each on a residual branch with dropout."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = SelfAttention(width, heads, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, tokens, width] to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        h = self.dropout(self.gelu(self.expand(self.norm2(x))))
        x = x + self.dropout(self.project(h))
        return x


class VisionTransformer(nn.Module):
    """Images in, class logits (or their loss) out."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        patch: int,
        image: int,
        classes: int,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image {image} is not a multiple of patch {patch}")
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention_dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, classes)
        init_normal_(self)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes], or with labels the mean cross-entropy (0-d, fp32).

        Args:
            images: [batch, 3, image, image].
            labels: int64 class indices [batch].
        """
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(images.shape[0], -1, -1), patches), dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


def training_step(
    *,
    layers: int,
    width: int,
    heads: int,
    patch: int = 16,
    image: int = 224,
    batch: int = 64,
    classes: int = 1000,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of image classification on a fixed batch; the loss is inside the model."""
    with default_dtype(dtype):
        model = VisionTransformer(
            layers=layers,
            width=width,
            heads=heads,
            patch=patch,
            image=image,
            classes=classes,
            dropout=dropout,
            attention_dropout=attention_dropout,
        )
        return TrainingStep(model, args=labelled_images(batch, image, image, classes))


SIZES = [
    Size(
        "vit-mini",
        "small Vision Transformer",
        training_step,
        layers=6,
        width=192,
        heads=6,
        patch=8,
        image=64,
        batch=16,
        classes=10,
    ),
    Size("vit-b16", "ViT-B/16, 87M", training_step, layers=12, width=768, heads=12),
    Size("vit-l16", "ViT-L/16, 304M", training_step, layers=24, width=1024, heads=16),
]
