"""Law: every plan's module trains as the original does, bit for bit: outputs, gradients, buffers and random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alike import assert_trains_alike
from torch import nn

import models_zoo
from actsolve.capture.captured import capture
from actsolve.errors import CaptureError
from actsolve.training_step import TrainingStep

SMALL: dict[str, dict[str, Any]] = {
    "gpt-mini": {"layers": 2, "width": 32, "heads": 2, "seq": 16, "batch": 2},
    "llama-mini": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "seq": 16, "batch": 2},
    "bert-mini": {"layers": 2, "width": 32, "heads": 2, "seq": 16, "batch": 2},
    "vit-mini": {"layers": 2, "width": 32, "heads": 2, "image": 16, "patch": 8, "batch": 2},
    "resnet18-mini": {"image": 32, "batch": 2, "width": 8},
    "mobilenet_v2-mini": {"image": 32, "batch": 2},
    "unet-mini": {"image": 32, "batch": 2},
    "conv-chain-mini": {"layers": 4, "batch": 2},
    "mlp-mini": {"layers": 3, "width": 16, "batch": 8},
    "vgg16-mini": {"batch": 2, "image": 32},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SMALL)
def test_zoo(name: str) -> None:
    torch.manual_seed(0)
    assert_trains_alike(models_zoo.get(name)(**SMALL[name]), seeds=1, steps=2)


class _Model(nn.Module):
    """A module of a function of (self, x), with what it needs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def _x(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def _ema(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    m.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return m.b(torch.tanh(h - m.mean)).sum()


def _unused_dropout(m: Any, x: torch.Tensor) -> torch.Tensor:
    F.dropout(x, 0.5)
    return m.b(F.dropout(torch.relu(m.a(x)), 0.3)).square().sum()


def _in_place_chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h = h.clone()
    h.mul_(2).add_(1)
    h[:, 0] = 3.0
    return m.b(F.hardswish(h.sin_(), inplace=True).relu_()).sum()


def _split_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = m.a(x).clone().chunk(2, dim=-1)
    return (torch.sigmoid(left) * F.gelu(right)).sum() + m.b(x).mean()


def _shared_block(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.dropout(torch.relu(m.a(x)), 0.2)
    return x.pow(2).mean()


def _aliased_outputs(m: Any, x: torch.Tensor) -> Any:
    h = torch.tanh(m.a(x))
    return {"loss": m.b(h).sum(), "hidden": h, "view": h[:, :2], "input": x, "count": 7, "none": None, "ids": h.argmax(-1)}


def _masked(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = m.a(x) @ m.a(x).t()
    mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return (scores.masked_fill(mask, float("-inf")).softmax(-1) @ m.b(x)).sum()


def _complex(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(m.a(x)).abs().sum() + m.b(x).square().mean()


def _index(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    rows = torch.tensor([0, 2, 1, 0])
    out = torch.zeros(4, h.shape[1]).index_put((rows,), h[:4], accumulate=True)
    return (out.expand(3, *out.shape) * h[rows]).sum() + m.b(h).std()


def _autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = F.gelu(m.a(x))
    return m.b(h.float()).square().sum()


def _pair(run: Callable[..., Any], *inputs: torch.Tensor, width: int = 6, **parts: Any) -> TrainingStep:
    inputs = inputs or (_x(8, width),)
    return TrainingStep(_Model(run, a=nn.Linear(width, width), b=nn.Linear(width, width), **parts).train(), inputs)


def _frozen() -> TrainingStep:
    step = _pair(_shared_block)
    step.model.a.bias.requires_grad_(False)  # type: ignore[union-attr]
    return step


def _norms() -> TrainingStep:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=8), nn.Dropout(0.1), nn.SiLU(inplace=True), nn.MaxPool2d(2), nn.InstanceNorm2d(8, affine=True),
    )  # fmt: skip
    return TrainingStep(model, (_x(4, 3, 12, 12).to(memory_format=torch.channels_last),), loss_fn=lambda y: y.square().mean())


def _recurrent() -> TrainingStep:
    lstm = nn.LSTM(5, 6, num_layers=2, dropout=0.2, batch_first=True)
    return TrainingStep(_Model(lambda m, x: m.lstm(x)[0].square().sum(), lstm=lstm), (_x(3, 4, 5),))


def _attention_dropout() -> TrainingStep:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return TrainingStep(layer, (_x(2, 5, 8),), loss_fn=lambda y: y.square().mean())


def _half() -> TrainingStep:
    return TrainingStep(
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.15), nn.Linear(16, 4)).to(torch.bfloat16),
        (torch.randn(8, 8).to(torch.bfloat16),),
        loss_fn=lambda y: y.float().square().mean(),
    )


def _embedding() -> TrainingStep:
    model = _Model(
        lambda m, i: m.out(m.table(i).tanh(), m.bag(m.table(i))).sum(),
        table=nn.Embedding(9, 6, padding_idx=0),
        bag=nn.Linear(6, 6),
        out=nn.Bilinear(6, 6, 2),
    )
    return TrainingStep(model, (torch.randint(0, 9, (4, 3)),))


KINDS: dict[str, Callable[[], TrainingStep]] = {
    "buffer updated by hand": lambda: _pair(_ema, mean=torch.zeros(6)),
    "dropout whose result is not used": lambda: _pair(_unused_dropout),
    "in-place chain": lambda: _pair(_in_place_chain),
    "chunks of one storage": lambda: _pair(_split_in_place),
    "one block run three times": lambda: _pair(_shared_block),
    "outputs that alias, and are no tensors": lambda: _pair(_aliased_outputs),
    "masked attention by hand": lambda: _pair(_masked),
    "complex": lambda: _pair(_complex),
    "index_put and expand": lambda: _pair(_index),
    "autocast region": lambda: _pair(_autocast),
    "gradient of the input": lambda: _pair(_shared_block, _x(8, 6, grad=True)),
    "input that is not contiguous": lambda: _pair(_shared_block, torch.randn(6, 8).t()),
    "frozen parameter": _frozen,
    "norms, channels last": _norms,
    "LSTM with dropout": _recurrent,
    "attention dropout": _attention_dropout,
    "bfloat16": _half,
    "embedding with padding_idx": _embedding,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    torch.manual_seed(0)
    assert_trains_alike(KINDS[kind]())


def test_python_that_depends_on_data_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(CaptureError, match="cannot trace Sequential"):
        capture(TrainingStep(model, (_x(3, 4),), loss_fn=lambda y: y.sum()))


@pytest.mark.parametrize("layer", [nn.Dropout(0.15), nn.Dropout(0.5, inplace=True)])
def test_dropout_that_a_trace_would_change_is_refused(layer: nn.Module) -> None:
    x = _x(2, 3, 4, 4).to(memory_format=torch.channels_last)
    step = TrainingStep(nn.Sequential(nn.Conv2d(3, 3, 1), layer), (x,), loss_fn=lambda y: y.sum())
    with pytest.raises(CaptureError, match="not contiguous"):
        capture(step)
