"""BERT: a bidirectional post-norm encoder trained to fill in masked tokens.

Source: Devlin et al., BERT, 2018: sizes in section 3, dropout 0.1 everywhere in appendix A.2; the
masked-token head with its tied decoder as in the released code. Next-sentence prediction and the pooler are
left out, and sequences are packed to full length, so there is no padding mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.attention import SelfAttention
from models_zoo.building import default_dtype, init_normal_
from models_zoo.inputs import integers
from models_zoo.size import Size

NORM_EPS = 1e-12
MASK = 103  # [MASK] in the published vocabulary
IGNORED = -100  # a target that the loss skips


class Block(nn.Module):
    """Attention and MLP, each with dropout, a residual and then its norm."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout=attention_dropout)
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.project = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        x = self.norm2(x + self.dropout(self.project(self.gelu(self.expand(x)))))
        return x


class Bert(nn.Module):
    """Token ids in, logits of the token at every position (or their loss) out."""

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
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention_dropout) for _ in range(layers))
        self.transform = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.transform_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.tokens.weight
        init_normal_(self)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, seq, vocab], or with targets the mean cross-entropy (0-d, fp32).

        All tokens are taken to be in the first segment.

        Args:
            idx: int64 token ids [batch, seq], seq at most that of the model.
            targets: int64 original tokens [batch, seq], -100 where the token was not masked.
        """
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.tokens(idx) + self.positions(positions) + self.segments(torch.zeros_like(positions))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.decoder(self.transform_norm(self.gelu(self.transform(x))))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def training_step(
    *,
    layers: int,
    width: int,
    heads: int,
    batch: int = 16,
    seq: int = 512,
    vocab: int = 30_522,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    dtype: str = "fp32",
) -> TrainingStep:
    """Return one step of masked-token prediction on a fixed batch; the loss is inside the model.

    15% of the tokens are masked. The paper leaves or swaps a fifth of these; here all become [MASK].
    """
    with default_dtype(dtype):
        model = Bert(
            layers=layers,
            width=width,
            heads=heads,
            seq=seq,
            vocab=vocab,
            dropout=dropout,
            attention_dropout=attention_dropout,
        )
    text = integers((batch, seq), vocab)
    masked = integers((batch, seq), 100, seed=1) < 15
    idx = text.masked_fill(masked, min(MASK, vocab - 1))
    return TrainingStep(model, args=(idx, text.masked_fill(~masked, IGNORED)))


SIZES = [
    Size(
        "bert-mini",
        "byte-level BERT",
        training_step,
        layers=6,
        width=256,
        heads=8,
        batch=8,
        seq=128,
        vocab=256,
    ),
    Size("bert-base", "BERT base, 110M", training_step, layers=12, width=768, heads=12),
    Size("bert-large", "BERT large, 335M", training_step, layers=24, width=1024, heads=16),
]
