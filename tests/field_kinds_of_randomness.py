"""Field cases of randomness: drawn where and by what."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from field import Case, Optimize, Seen, begin, case, model, noise, sgd, step
from torch import nn
from torch.utils.checkpoint import checkpoint


def keeps_some_tokens(m: Any, h: torch.Tensor) -> torch.Tensor:
    order = torch.rand(h.shape[:2]).argsort(1)[:, :3]
    kept = m.a(h).gather(1, order[..., None].expand(-1, -1, h.shape[2]))
    return m.b(kept.tanh())


case(
    "a permutation from sorted noise",
    "pytorch/pytorch#143431",
    "The order that is drawn is another one once the function is compiled for the CPU generator.",
    model(keeps_some_tokens),
    noise(2, 6, 4, grad=True),
)


def two_branches(m: Any, h: torch.Tensor) -> torch.Tensor:
    wide = F.dropout(m.a(h.repeat(1, 8).view(-1, 4)).tanh(), 0.4).view(3, 8, 4).sum(1)
    narrow = F.dropout(m.b(h).tanh(), 0.4)
    return wide * narrow


case(
    "dropout in two branches of unequal size",
    "pytorch/pytorch#192635",
    "A scheduler that lowers the peak runs the small branch first, and each dropout draws the other's mask.",
    model(two_branches),
    noise(3, 4, grad=True),
)


def drops_layers_by_tensor(m: Any, h: torch.Tensor) -> torch.Tensor:
    for layer in (m.a, m.b):
        if torch.rand(()) > 0.5:
            h = layer(h).tanh()
    return m.a(h)


case(
    "layers dropped by torch's numbers",
    "pytorch/pytorch#95425",
    "The layers that the first call dropped stay dropped for ever.",
    model(drops_layers_by_tensor),
    noise(3, 4),
    refused="cannot trace Of.*where  .*field_kinds_of_randomness.py.*without data-dependent Python",
)


def drops_layers_by_sample(m: Any, h: torch.Tensor) -> torch.Tensor:
    for layer in random.sample([m.a, m.b, m.c], 2):
        h = layer(h).tanh()
    return h


case(
    "layers in the order of a sample",
    "pytorch/pytorch#197085",
    "random.sample returns at each call what it returned in the trace.",
    model(drops_layers_by_sample, c=lambda: nn.Linear(4, 4)),
    noise(3, 4),
    refused="draws from Python's random",
)


class OwnGenerator(nn.Module):
    """Draws a number at each call from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 4), generator

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h) * self.generator.random()


case(
    "a random.Random of the model's own",
    "pytorch/pytorch#196437",
    "A persistent generator object hands out the number of the trace again, and does not advance.",
    lambda: OwnGenerator(random.Random(7)),
    noise(3, 4),
    refused="draws from generator, a ",
)

case(
    "a NumPy generator of the model's own",
    "pytorch/pytorch#136559",
    "Numbers drawn by NumPy in a compiled function.",
    lambda: OwnGenerator(np.random.default_rng(7)),
    noise(3, 4),
    refused="draws from generator, a ",
)


OF_THE_FILE = np.random.default_rng(7)


def jitter() -> float:
    return float(OF_THE_FILE.random())


def scales_by_a_helper(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.a(h).tanh() * jitter()


def beside_a_fresh_generator() -> nn.Module:
    OF_THE_FILE.bit_generator.state = np.random.default_rng(7).bit_generator.state
    return model(scales_by_a_helper)()


case(
    "a NumPy generator of the file, in a function that the forward calls",
    "pytorch/pytorch#136559",
    "The same, where no attribute holds the generator.",
    beside_a_fresh_generator,
    noise(3, 4),
    refused="draws from jitter, a Generator",
)


class OwnTorchGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(h.shape, generator=self.generator) > 0.3
        noisy = self.a(h) + torch.randn(h.shape, generator=self.generator) + torch.randn(h.shape)
        return self.b((noisy * mask).tanh())


def train_and_look_at_generator(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(3):
        step(case, module, number, seen)
        optimizer.step()
        seen.put(f"generator after step {number}", module.generator.get_state())
    seen.state("end", module)


case(
    "a torch.Generator of the model's own",
    "pytorch/pytorch#169635",
    "Random functions work only with, or only without, a generator that the user passes.",
    OwnTorchGenerator,
    noise(3, 4, grad=True),
    drive=train_and_look_at_generator,
)


def samples_with_gradients(m: Any, h: torch.Tensor) -> torch.Tensor:
    concentration = F.softplus(m.a(h)) + 0.1
    mixture = torch.distributions.Dirichlet(concentration).rsample()
    scale = torch.distributions.Gamma(concentration, torch.ones(())).rsample()
    return m.b(mixture * scale)


case(
    "samples of Gamma and Dirichlet with gradients",
    "pytorch/pytorch#4319",
    "The gradient of a Gamma sample is not computed any more.",
    model(samples_with_gradients),
    noise(3, 4, grad=True),
    refused="cannot trace Of.*where  .*field_kinds_of_randomness.py.*without data-dependent Python",
)


def samples_unchecked(m: Any, h: torch.Tensor) -> torch.Tensor:
    concentration = F.softplus(m.a(h)) + 0.1
    mixture = torch.distributions.Dirichlet(concentration, validate_args=False).rsample()
    scale = torch.distributions.Gamma(concentration, torch.ones(()), validate_args=False).rsample()
    return m.b(mixture * scale)


case(
    "samples of Gamma and Dirichlet, arguments not checked",
    "pytorch/pytorch#165751",
    "Sampling from a Gamma distribution cannot be captured in one graph.",
    model(samples_unchecked),
    noise(3, 4, grad=True),
)


def draws_anew(m: Any, h: torch.Tensor) -> torch.Tensor:
    def block(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(m.a(h).tanh(), 0.5)

    return m.b(checkpoint(block, h, use_reentrant=False, preserve_rng_state=False))


case(
    "a checkpoint that draws anew in the backward",
    "allenai/OLMo-core#828",
    "With preserve_rng_state off the backward drops other values than the forward, and the loss gets worse.",
    model(draws_anew),
    noise(3, 4, grad=True),
    refused="preserve_rng_state",
)


class OwnCheckpoint(torch.autograd.Function):
    """Runs a function again in its backward, and leaves the random state as it is."""

    @staticmethod
    def forward(ctx: Any, run: Any, h: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(h)
        with torch.no_grad():
            return run(h)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        h = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(h)
        return None, *torch.autograd.grad(output, (h, *ctx.parameters), gradient)


def runs_again(p: float) -> Any:
    def run(m: Any, h: torch.Tensor) -> torch.Tensor:
        return m.b(OwnCheckpoint.apply(lambda h: F.dropout(m.a(h).tanh(), p), h, m.a.weight, m.a.bias))

    return run


case(
    "a checkpoint function of one's own",
    "ankanbhunia/PIDM#66",
    "A helper that runs a block again in its backward.",
    model(runs_again(0.0)),
    noise(3, 4, grad=True),
)

case(
    "a checkpoint function of one's own, with dropout",
    "openai/guided-diffusion#167",
    "The helper does not set the random state back: loss and gradients are of different masks.",
    model(runs_again(0.5)),
    noise(3, 4, grad=True),
)
