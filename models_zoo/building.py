"""What several families share when they are built: the dtype, and the initial weights.

Models are built under fake tensors too, so nothing here may look at a tensor's values.
`nn.init.trunc_normal_` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Create floating-point tensors in this dtype ("fp32", "bf16" or "fp16") inside the block.

    Building in the dtype, rather than `module.to(dtype)` afterwards, never holds the weights twice, and works
    for fake tensors on the meta device, where `module.to` raises.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; accepted: {', '.join(DTYPES)}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def init_normal_(model: nn.Module, std: float = 0.02) -> None:
    """Draw every linear and embedding weight from N(0, std^2), zero every linear bias.

    Source:
        Devlin et al., BERT, 2018, and Radford et al., GPT-2, 2019 use this with std 0.02.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def init_relu_(model: nn.Module) -> None:
    """Draw weights so that ReLU layers keep the variance of what passes through them; zero the biases.

    Source:
        He et al., Delving Deep into Rectifiers, ICCV 2015 (fan-out for convolutions, as torchvision; fan-in
        for linear layers).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm whose weights and statistics are fp32 whatever the default dtype.

    Its running averages move by less than a bf16 rounding step, so in bf16 they would stand still. The
    kernels take bf16 and fp16 inputs with fp32 weights.
    """
    return nn.BatchNorm2d(channels, dtype=torch.float32)
