"""GPT-2: a decoder-only transformer with learned positions and tied input and output embeddings.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019. Dropout as in its released
code: 0.1 on the embeddings and on each residual branch. Attention dropout is 0 here, not 0.1, so that the
fused kernels are used; set `attention_dropout` for the published value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.attention import SelfAttention
from models_zoo.building import default_dtype, init_normal_
from models_zoo.inputs import integers
from models_zoo.size import Size


class Block(nn.Module):
    """Pre-norm attention and MLP, each on a residual branch with dropout."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=True, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.project(self.gelu(self.expand(self.norm2(x)))))
        return x


class GPT(nn.Module):
    """Token ids in, next-token logits (or their loss) out."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        seq: int,
        vocab: int,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention_dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

        init_normal_(self)
        for (
            name,
            weight,
        ) in self.named_parameters():  # GPT-2 scales the ends of its 2 x layers residual branches
            if name.endswith("project.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, seq, vocab], or with targets the mean cross-entropy (0-d, fp32).

        Args:
            idx: int64 token ids [batch, seq], seq at most that of the model.
            targets: int64 next tokens [batch, seq].
        """
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def character_model(
    *,
    vocab: int,
    block_size: int = 256,
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    dropout: float = 0.2,
) -> GPT:
    """Return a small GPT to be trained on characters, `vocab` being how many distinct ones the text has.

    Dropout is on the attention weights too.

    Source:
        The settings of nanoGPT's Shakespeare example, github.com/karpathy/nanoGPT,
        config/train_shakespeare_char.py.
    """
    return GPT(
        layers=layers,
        width=width,
        heads=heads,
        seq=block_size,
        vocab=vocab,
        dropout=dropout,
        attention_dropout=dropout,
    )


def training_step(
    *,
    layers: int,
    width: int,
    heads: int,
    batch: int = 8,
    seq: int = 1024,
    vocab: int = 50257,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of next-token prediction on a fixed batch; the loss is inside the model."""
    with default_dtype(dtype):
        model = GPT(
            layers=layers,
            width=width,
            heads=heads,
            seq=seq,
            vocab=vocab,
            dropout=dropout,
            attention_dropout=attention_dropout,
        )
    text = integers((batch, seq + 1), vocab)
    return TrainingStep(model, args=(text[:, :-1].contiguous(), text[:, 1:].contiguous()))


SIZES = [
    Size(
        "gpt-mini", "byte-level GPT", training_step, layers=6, width=256, heads=8, batch=4, seq=256, vocab=256
    ),
    Size("gpt-small", "GPT-2, 124M", training_step, layers=12, width=768, heads=12),
    Size("gpt-medium", "GPT-2 medium, 355M", training_step, layers=24, width=1024, heads=16),
    Size("gpt-large", "GPT-2 large, 774M", training_step, layers=36, width=1280, heads=20),
    Size("gpt-xl", "GPT-2 XL, 1.56B", training_step, layers=48, width=1600, heads=25),
]
