"""Sample inputs: noise that is the same on every device and leaves the random state alone.

A seeded generator would be bound to one device, and reseeding the global one disturbs the caller, so both
kinds of input come from a hash of the element's index. This works on fake tensors too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def integers(shape: Sequence[int], below: int, seed: int = 0) -> Tensor:
    """Return int64 noise of this shape, uniform in [0, below) for below << 2**32, on the default device.

    Source:
        Thomas Mueller's 32-bit integer hash, https://stackoverflow.com/a/12996028. Its multiplier is below
        2**31, so no product overflows int64.
    """
    count = math.prod(shape)
    x = torch.arange(seed * count + 1, (seed + 1) * count + 1) & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) % below).view(*shape)


def floats(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Return noise in the default dtype, uniform with mean 0 and variance 1, on the default device."""
    uniform = integers(shape, 2**24, seed).float() / 2**23 - 1  # in fp32, for 2**24 is infinite in fp16
    return (uniform * math.sqrt(3)).to(torch.get_default_dtype())


def labelled_images(batch: int, height: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return RGB images [batch, 3, height, width] and a class index for each [batch]."""
    return floats((batch, 3, height, width)), integers((batch,), classes)
