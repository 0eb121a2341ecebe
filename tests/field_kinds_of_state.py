"""Field cases of state: what a forward keeps, and where."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from field import Case, Optimize, Seen, begin, case, model, noise, sgd, step, train
from torch import nn

case(
    "batch norm with a cumulative average",
    "pytorch/pytorch#194504",
    "With momentum=None the factor is read from the counter of batches, which no graph can.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
    noise(5, 4),
    refused=r"cannot trace Sequential.*the module 1 \(BatchNorm1d\).*without data-dependent Python",
)


class Queue(nn.Module):
    """Compares with keys of earlier batches, of which a ring buffer holds the latest."""

    def __init__(self, pointer_as_tensor: bool) -> None:
        super().__init__()
        self.layer, self.pointer_as_tensor = nn.Linear(4, 4), pointer_as_tensor
        self.register_buffer("keys", torch.eye(4).repeat(2, 1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.layer(h), dim=1)
        similar = query @ self.keys.clone().detach().t()
        with torch.no_grad():
            if self.pointer_as_tensor:
                places = (self.pointer + torch.arange(len(h))) % 8
                self.keys.index_copy_(0, places, query)
            else:
                start = int(self.pointer)
                self.keys[start : start + len(h)] = query
            self.pointer.copy_((self.pointer + len(h)) % 8)
        return similar


case(
    "a queue of keys whose place is a tensor",
    "facebookresearch/moco#21",
    "The queue is edited in the forward after it was read, and the backward needs what was read.",
    lambda: Queue(True),
    noise(4, 4, grad=True),
)

case(
    "a queue of keys whose place is a number",
    "facebookresearch/moco#21",
    "As above, with the place read from its buffer as a number.",
    lambda: Queue(False),
    noise(4, 4, grad=True),
    refused="cannot trace Queue.*field_kinds_of_state.py.*without data-dependent Python",
)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.loss = nn.Linear(4, 3), torch.zeros(())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        shares = self.score(h).softmax(-1)
        self.loss = shares.mean(0).square().sum()
        return shares


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ne,edf,nd->nf", self.gate(h), self.experts, h)


def train_with_auxiliary_loss(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(3):
        output = module(*case.inputs(number)[0])
        (output.square().mean() + 0.1 * module.gate.loss).backward()
        seen.put(f"auxiliary loss {number}", module.gate.loss)
        seen.gradients(f"step {number}", module)
        optimizer.step()
        optimizer.zero_grad()


case(
    "an auxiliary loss that the trainer picks up from a layer",
    "pytorch/torchtitan#2061",
    "A loss that is kept in the layer and added by the trainer breaks the compiler.",
    Gated,
    noise(5, 4),
    drive=train_with_auxiliary_loss,
)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache, self.place = nn.Linear(4, 4), torch.zeros(4, 4), torch.zeros((), dtype=torch.long)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        y = self.layer(h)
        self.cache[self.place] = y.detach().mean(0)
        return y @ self.cache.clone()


def resets_cache(module: Any, number: int) -> None:
    module.cache, module.place = torch.full((4, 4), float(number)), torch.tensor(number)


case(
    "a cache in an attribute that is replaced between calls",
    "pytorch/pytorch#115774",
    "A cache that was set anew still has what the first call wrote into it.",
    Cache,
    noise(3, 4, grad=True),
    drive=lambda case, optimize, seen: train(case, optimize, seen, resets_cache),
    refused="cannot trace Cache.*without data-dependent Python",
)


def registers_in_forward(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.register_buffer("mask", torch.tril(torch.ones(len(h), len(h))))
    return m.mask @ m.a(h)


case(
    "a buffer that is registered in the forward",
    "pytorch/pytorch#57740",
    "register_buffer in a forward cannot be compiled.",
    model(registers_in_forward),
    noise(3, 4, grad=True),
)


class Flat(nn.Module):
    """All weights are slices of one parameter, made once and kept in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(36) * 0.3)
        self.first, self.second = self.flat[:16].view(4, 4), self.flat[16:32].view(4, 4).t()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (h @ self.first).tanh() @ self.second


case(
    "views of one flat parameter in attributes",
    "NVIDIA/apex#1148",
    "Flat views of parameters are made once and used at each step.",
    Flat,
    noise(3, 4, grad=True),
)


class Stale(nn.Module):
    """Keeps what it computed from a parameter, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(4))
        self.scale = self.log.exp()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale


def train_until_it_raises(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(2):
        output = module(*case.inputs(number)[0])
        seen.raises(f"backward {number} raises", output.square().sum().backward)
        seen.gradients(f"step {number}", module)


case(
    "a tensor computed once from a parameter",
    "IceLab-X/MiniGP#13",
    "The second backward goes through a graph that is freed; eager says so.",
    Stale,
    noise(3, 4),
    drive=train_until_it_raises,
)


class Recurrent(nn.Module):
    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.layer, self.detach = nn.Linear(8, 4), detach
        self.register_buffer("hidden", torch.zeros(3, 4))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.hidden = self.layer(torch.cat([h, self.hidden], 1)).tanh()
        output = self.hidden * 2
        if self.detach:
            self.hidden.detach_()
        return output


case(
    "a recurrent state in a buffer, detached by the trainer",
    "pytorch/pytorch#186111",
    "A buffer that holds the graph of the step before is differentiated a second time.",
    lambda: Recurrent(False),
    noise(3, 4),
    drive=lambda case, optimize, seen: train(case, optimize, seen, lambda module, _: module.hidden.detach_()),  # type: ignore[operator, union-attr]
)

case(
    "a state that is detached in place in the forward",
    "pytorch/pytorch#176854",
    "detach_() in a compiled function has no effect on requires_grad.",
    lambda: Recurrent(True),
    noise(3, 4),
)


class Rotary(nn.Module):
    """Makes its table at the first call, whatever mode that is in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0).cos()
        return self.layer(h) * self.table


def infer_then_train(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = case.make()
    args, kwargs = case.inputs(0)
    with torch.inference_mode():
        module(*args)
    module = optimize(module, args, kwargs)
    seen.raises("training raises", lambda: module(*args).sum().backward())


case(
    "a table that was made in inference mode",
    "Dao-AILab/flash-attention#299",
    "Training after an evaluation fails, since a cached table is an inference tensor; eager says so.",
    Rotary,
    noise(3, 4),
    drive=infer_then_train,
)


def evaluate_first(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(2):
        module.eval()
        with torch.inference_mode():
            seen.put(f"evaluation {number}", module(*case.inputs(9)[0]).clone())
        module.train()
        step(case, module, number, seen)
        optimizer.step()
        optimizer.zero_grad()
    seen.state("end", module)


case(
    "an evaluation in inference mode before each step",
    "huggingface/diffusers#1658",
    "Training goes wrong after a preview was made in inference mode.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4)),
    noise(5, 4),
    drive=evaluate_first,
)


class Fake(nn.Module):
    """Rounds to eight bits of a moving range, if a buffer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.low.lerp_(h.detach().amin(), 0.1)
        self.high.lerp_(h.detach().amax(), 0.1)
        if self.enabled[0] == 1:
            scale = (self.high - self.low).clamp_min(1e-3) / 255
            return torch.fake_quantize_per_tensor_affine(h, scale, torch.zeros((), dtype=torch.int32), -128, 127)
        return h


case(
    "fake quantization that a buffer switches",
    "pytorch/ao#114",
    "Whether to quantize is read from a buffer at each call.",
    lambda: nn.Sequential(nn.Linear(4, 4), Fake(), nn.Linear(4, 4)),
    noise(5, 4),
    refused=r"cannot trace Sequential.*without data-dependent Python",
)
