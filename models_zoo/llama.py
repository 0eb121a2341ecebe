"""Llama 3: RMSNorm, rotary positions, SwiGLU and grouped-query attention; no dropout, no biases.

Source: Llama Team, The Llama 3 Herd of Models, 2024, table 3 (8B, 70B; context 8192), and the Llama 3.2 1B
model card. The parts: Zhang and Sennrich, RMSNorm, 2019; Su et al., RoFormer, 2021; Shazeer, GLU Variants,
2020; Ainslie et al., GQA, 2023. The rescaled rotary frequencies of Llama 3.1 and later, for contexts above
8192, are left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actsolve.training_step import TrainingStep
from models_zoo.attention import head_width
from models_zoo.building import default_dtype, init_normal_
from models_zoo.inputs import integers
from models_zoo.size import Size

ROTARY_BASE = 500_000.0
NORM_EPS = 1e-5


def rotary_tables(seq: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [seq, channels] of each position's rotation, in the default dtype.

    Angles are computed in fp32: in bf16 neighbouring positions would round to the same one.
    """
    frequencies = ROTARY_BASE ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angles = torch.arange(seq, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    dtype = torch.get_default_dtype()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + channels/2 of x [batch, heads, seq, channels] by their position's angle."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class GroupedQueryAttention(nn.Module):
    """Causal attention in which each of `kv_heads` keys and values serves heads / kv_heads queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")
        self.head_width = head_width(width, heads)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape; cos and sin are [seq, width / heads]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.project(heads.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each on a residual branch."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=NORM_EPS)
        self.attention = GroupedQueryAttention(width, heads, kv_heads)
        self.norm2 = nn.RMSNorm(width, eps=NORM_EPS)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape; cos and sin are [seq, width / heads]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x


class Llama(nn.Module):
    """Token ids in, next-token logits (or their loss) out."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        seq: int,
        vocab: int,
        tied: bool,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        cos, sin = rotary_tables(seq, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        init_normal_(self)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, seq, vocab], or with targets the mean cross-entropy (0-d, fp32).

        Args:
            idx: int64 token ids [batch, seq], seq at most that of the model.
            targets: int64 next tokens [batch, seq].
        """
        cos, sin = self.cos[: idx.shape[1]], self.sin[: idx.shape[1]]
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def training_step(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int = 8,
    hidden: int,
    batch: int = 1,
    seq: int = 8192,
    vocab: int = 128_256,
    tied: bool = False,
    dtype: str = "bf16",
) -> TrainingStep:
    """Return one step of next-token prediction on a fixed batch; the loss is inside the model."""
    with default_dtype(dtype):
        model = Llama(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            seq=seq,
            vocab=vocab,
            tied=tied,
        )
    text = integers((batch, seq + 1), vocab)
    return TrainingStep(model, args=(text[:, :-1].contiguous(), text[:, 1:].contiguous()))


SIZES = [
    Size(
        "llama-mini",
        "byte-level Llama",
        training_step,
        layers=6,
        width=256,
        heads=8,
        kv_heads=2,
        hidden=704,
        batch=4,
        seq=256,
        vocab=256,
        dtype="fp32",
    ),
    Size("llama-1b", "Llama 3.2 1B", training_step, layers=16, width=2048, heads=32, hidden=8192, tied=True),
    Size("llama-8b", "Llama 3 8B", training_step, layers=32, width=4096, heads=32, hidden=14336),
    Size("llama-70b", "Llama 3 70B", training_step, layers=80, width=8192, heads=64, hidden=28672),
]
