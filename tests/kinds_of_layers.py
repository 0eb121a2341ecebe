"""Kinds of layers: normalization, dropout, activations in place, convolutions, recurrence, attention, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kinds import Of, kind, of, step, x
from torch import nn

from actsolve.training_step import TrainingStep

CHANNELS_LAST = torch.channels_last


def image(grad: bool = False) -> torch.Tensor:
    return x(2, 3, 8, 8, grad=grad)


def conv(inside: int, outside: int, size: int = 3, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, **settings)


# -- norms -------------------------------------------------------------------------------------------------------------


@kind("batch norm without running statistics, without scale")
def _() -> TrainingStep:
    return step(
        nn.Sequential(
            conv(3, 4), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4, affine=False)
        ),
        image(),
    )


@kind("a batch norm in eval mode inside a model in training")
def _() -> TrainingStep:
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4))
    model[1].eval()
    return step(model, image())


@kind("one batch norm run twice")
def _() -> TrainingStep:
    return of(lambda m, h: m.norm(m.a(m.norm(m.a(h)))), norm=nn.BatchNorm1d(4))


@kind("batch norm's new statistics read in the forward")
def _() -> TrainingStep:
    return of(lambda m, h: m.b(m.norm(m.a(h)) * m.norm.running_mean.add(1)), norm=nn.BatchNorm1d(4))


@kind("batch norm of a transposed input, then relu in place")
def _() -> TrainingStep:
    return of(lambda m, h: m.a(F.relu_(m.norm(h.transpose(1, 2))).transpose(1, 2)), x(3, 5, 4, grad=True), norm=nn.BatchNorm1d(4))


@kind("instance, group, layer, RMS and local response norms")
def _() -> TrainingStep:
    norms = [
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.PReLU(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(6),
        nn.RMSNorm(6),
        nn.LocalResponseNorm(2),
    ]
    return step(nn.Sequential(conv(3, 4), *norms), image())


# -- dropout -----------------------------------------------------------------------------------------------------------


def _dropout(p: float, in_place: bool) -> Callable[[], TrainingStep]:
    def make() -> TrainingStep:
        layers = (nn.Linear(6, 8), nn.Dropout(p, in_place), nn.Linear(8, 8), nn.GELU(), nn.Dropout(p, in_place), nn.Linear(8, 2))
        return step(nn.Sequential(*layers), x(5, 6, grad=True))

    return make


for probability in (0.0, 0.1, 0.15, 0.33, 0.5, 0.9, 1.0):
    kind(f"dropout of {probability}")(_dropout(probability, False))
for probability in (0.1, 0.15):
    kind(f"dropout of {probability} in place")(_dropout(probability, True))


def _dropout_in_layout(p: float, layout: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], TrainingStep]:
    return lambda: of(lambda m, h: F.dropout(layout(m.a(h)), p, inplace=p == 0.15).sin(), x(2, 3, 4, 4))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda h: h.to(memory_format=CHANNELS_LAST),
    "transposed": lambda h: h.transpose(0, 3) * 2,
    "sliced": lambda h: h[..., 1:] * 2,
}
for layout_name, in_layout in LAYOUTS.items():
    for probability in (0.15, 0.5):
        kind(f"dropout of {probability}, {layout_name}")(_dropout_in_layout(probability, in_layout))


@kind("dropout of channels, alpha dropout")
def _() -> TrainingStep:
    drops = (nn.Dropout2d(0.3), conv(4, 4), nn.AlphaDropout(0.2), conv(4, 4, 1), nn.FeatureAlphaDropout(0.4), conv(4, 2, 1))
    return step(nn.Sequential(conv(3, 4), *drops), image())


@kind("a dropout whose result is not used")
def _() -> TrainingStep:
    return of(lambda m, h: (F.dropout(m.a(h), 0.5), m.b(F.dropout(h, 0.2)))[1])


# -- other random numbers ----------------------------------------------------------------------------------------------


@kind("random functions")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(h) * 0.1 + torch.rand(3, 4) + torch.normal(0.0, 1.0, (3, 4)) + torch.randint(0, 3, (3, 4))
        return m.b(F.gelu(m.a(h)) + noise + torch.bernoulli(torch.full((3, 4), 0.3)))[torch.randperm(3)]

    return of(run)


@kind("random functions in place")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        noise = torch.empty(3, 4).uniform_() + torch.empty(3, 4).normal_() + torch.empty(3, 4).exponential_()
        return m.b(F.gelu(m.a(h)) + noise + torch.empty(3, 4).bernoulli_(0.4))

    return of(run)


@kind("random relu, Gumbel softmax, draws by weight, fractional pooling")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        picked = m.b(F.gumbel_softmax(m.relu(m.a(h)), hard=True))[torch.multinomial(torch.ones(3), 3)]
        return picked.sum() + m.pool(m.a(torch.ones(1, 2, 4, 4) * h.sum())).sum()

    return of(run, relu=nn.RReLU(inplace=True), pool=nn.FractionalMaxPool2d(2, output_size=2))


# -- activations, convolutions, pools ----------------------------------------------------------------------------------


@kind("activations in place after convolutions")
def _() -> TrainingStep:
    acts = (nn.BatchNorm2d(4), nn.ReLU(True), conv(4, 4), nn.ReLU6(True), conv(4, 4), nn.Hardswish(True), conv(4, 2, 1))
    return step(nn.Sequential(conv(3, 4), *acts, nn.SiLU(True)), image())


@kind("activations in place after linear layers")
def _() -> TrainingStep:
    acts = [nn.LeakyReLU(0.1, True), nn.ELU(inplace=True), nn.SELU(True), nn.Hardsigmoid(True), nn.CELU(inplace=True)]
    acts += [nn.Mish(True), nn.Hardtanh(inplace=True), nn.Threshold(0.1, 0.0, True)]
    layers = [layer for act in acts for layer in (nn.Linear(6, 6), act)]
    return step(nn.Sequential(*layers), x(5, 6))


@kind("convolutions: transposed, dilated, reflected, grouped, of 1 and 3 dimensions")
def _() -> TrainingStep:
    layers = (nn.ConvTranspose2d(3, 4, 2, 2), nn.GELU("tanh"), conv(4, 4, dilation=2, padding_mode="reflect", padding=1))
    model = Of(
        lambda m, i, s, v: (m.flat(i), m.line(s), m.cube(v)),
        flat=nn.Sequential(*layers, conv(4, 8, groups=4)),
        line=nn.Conv1d(3, 4, 3),
        cube=nn.Conv3d(1, 2, 2),
    )
    return step(model, image(), x(2, 3, 8), x(1, 1, 4, 4, 4))


@kind("channels last, model and input")
def _() -> TrainingStep:
    layers = (conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), conv(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return step(nn.Sequential(*layers, nn.Linear(4, 2)).to(memory_format=CHANNELS_LAST), image().to(memory_format=CHANNELS_LAST))


@kind("channels last input, interpolation, output in another layout")
def _() -> TrainingStep:
    layers = (conv(3, 4), nn.BatchNorm2d(4), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"), conv(4, 2, 1))
    return step(nn.Sequential(*layers), image().to(memory_format=CHANNELS_LAST).requires_grad_())


@kind("pools and interpolations")
def _() -> TrainingStep:
    pools = (nn.MaxPool2d(3, 2, 1), conv(4, 4, 1), nn.AvgPool2d(2), nn.Upsample(size=(7, 7), mode="bicubic"), conv(4, 4, 1))
    return step(
        nn.Sequential(conv(3, 4), *pools, nn.Upsample(scale_factor=2), nn.PixelShuffle(2), nn.AdaptiveMaxPool2d(1)), image()
    )


@kind("losses")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        y, classes = m.a(h), torch.tensor([0, 1, 2])
        loss = F.cross_entropy(y, classes, label_smoothing=0.1) + F.mse_loss(y, h) + F.smooth_l1_loss(y, h) + F.huber_loss(y, h)
        loss = loss + F.kl_div(y.log_softmax(-1), h.softmax(-1), reduction="batchmean")
        loss = loss + F.binary_cross_entropy_with_logits(y, (h > 0).float()) + F.cosine_embedding_loss(y, h, torch.ones(3))
        return loss + F.nll_loss(y.log_softmax(-1), torch.tensor([0, 1, -100])) + F.triplet_margin_loss(y, h, h + 1)

    return of(run)


# -- recurrence and attention ------------------------------------------------------------------------------------------


@kind("LSTM of two layers, with dropout")
def _() -> TrainingStep:
    return step(nn.LSTM(6, 5, 2, dropout=0.2), x(4, 3, 6, grad=True))


@kind("LSTM in both directions, batch first")
def _() -> TrainingStep:
    return step(nn.LSTM(6, 5, bidirectional=True, batch_first=True), x(4, 3, 6))


@kind("GRU with a given state, RNN, cells")
def _() -> TrainingStep:
    model = Of(
        lambda m, s, state: (m.gru(s, state), m.rnn(s), m.lstm_cell(s[1], m.lstm_cell(s[0])), m.gru_cell(s[1], m.gru_cell(s[0]))),
        gru=nn.GRU(6, 5, 2, dropout=0.3),
        rnn=nn.RNN(6, 5, nonlinearity="relu"),
        lstm_cell=nn.LSTMCell(6, 5),
        gru_cell=nn.GRUCell(6, 5),
    )
    return step(model, x(4, 3, 6, grad=True), x(2, 3, 5))


@kind("attention with dropout")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(h).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return m.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).reshape(2, 6, 8))

    return step(Of(run, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)), x(2, 6, 8, grad=True))


@kind("transformer layers and multi-head attention with weights")
def _() -> TrainingStep:
    model = Of(
        lambda m, s, memory: m.attend(m.decode(m.encode(s), memory), memory, memory, need_weights=True),
        encode=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1),
        decode=nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2),
        attend=nn.MultiheadAttention(8, 2, dropout=0.1),
    )
    return step(model, x(5, 2, 8), x(4, 2, 8))


# -- precision ---------------------------------------------------------------------------------------------------------


@kind("bfloat16")
def _() -> TrainingStep:
    layers = (nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 8), nn.Softmax(-1))
    return step(nn.Sequential(*layers).bfloat16(), x(4, 8, dtype=torch.bfloat16))


@kind("bfloat16 convolutions, dropout of 0.3")
def _() -> TrainingStep:
    layers = (conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(True), nn.Dropout(0.3), conv(4, 4))
    return step(nn.Sequential(*layers).bfloat16(), image().bfloat16())


@kind("float16, float64")
def _() -> TrainingStep:
    model = Of(
        lambda m, h, d: (m.low(h), m.high(d)),
        low=nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).half(),
        high=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.15)).double(),
    )
    return step(model, x(4, 8, dtype=torch.float16), x(4, 8, dtype=torch.float64))


@kind("an autocast region in which a layer is run twice")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.b(F.gelu(m.a(h))) + m.a(h)
        return m.c(h.float())

    return of(run, c=nn.Linear(4, 3))


@kind("two autocast regions with one layer")
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = m.a(h).float()
        return m.b(h) + F.linear(h.bfloat16(), m.a.weight.bfloat16())

    return of(run)


@kind("autocast around", context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
def _() -> TrainingStep:
    return step(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Dropout(0.1)), x(4, 8)
    )


@kind("a region without autocast inside of it", context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
def _() -> TrainingStep:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        h = m.a(h)
        with torch.autocast("cpu", enabled=False):
            h = m.b(h.float())
        return m.c(h)

    return of(run, c=nn.Linear(4, 3))
