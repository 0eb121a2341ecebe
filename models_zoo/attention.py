"""Multi-head self-attention as GPT-2, BERT and ViT share it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def head_width(width: int, heads: int) -> int:
    """Return the channels of one head; raise ValueError where heads do not divide the width."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    return width // heads


class SelfAttention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values.

    Source:
        Vaswani et al., Attention Is All You Need, NeurIPS 2017, section 3.2.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_width = head_width(width, heads)
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.project(heads.transpose(1, 2).flatten(2))
        return out
