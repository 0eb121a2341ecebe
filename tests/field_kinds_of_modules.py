"""Field cases of modules: their classes, and what becomes of them between steps."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import torch
from field import Case, Optimize, Seen, begin, case, noise, sgd, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Counting(nn.Module):
    """Counts its calls in a place that ``count`` knows, and scales by them."""

    calls = 0
    seen: ClassVar[list[Any]] = []

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.meter = nn.Linear(4, 4), how, collections.Counter()
        type(self).calls = 0
        type(self).seen.clear()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.how == "class":
            type(self).calls += 1
            return self.layer(h) * type(self).calls
        if self.how == "class list":
            self.seen.append(len(h))
            return self.layer(h) * len(self.seen)
        self.meter.update(calls=1)
        return self.layer(h) * self.meter["calls"]


case(
    "a counter in the class",
    "pytorch/pytorch#176851",
    "A class attribute that changes between calls keeps the value of the trace.",
    lambda: Counting("class"),
    noise(3, 4),
    refused="changes Counting.calls",
)

case(
    "a list in the class",
    "pytorch/pytorch#169253",
    "What is appended to a list of the class is lost.",
    lambda: Counting("class list"),
    noise(3, 4),
    refused="changes Counting.seen",
)

case(
    "a counter in an attribute",
    "pytorch/pytorch#197896",
    "A helper object that counts calls stays as it was.",
    lambda: Counting("counter"),
    noise(3, 4),
    refused="changes meter",
)


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        type(self).scale = 1.0
        self.layer = nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h) * self.scale


def sets_scale(module: Any, number: int) -> None:
    Scaled.scale = 2.0 + number


case(
    "a setting in the class, changed between calls",
    "pytorch/pytorch#176851",
    "The compiled graph goes on with the class attribute of the first call.",
    Scaled,
    noise(3, 4),
    drive=lambda case, optimize, seen: train(case, optimize, seen, sets_scale),
)


case(
    "a module that is initialized at its first call",
    "pytorch/pytorch#97946",
    "A lazy module has no shapes before it has run.",
    lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)),
    noise(3, 4),
    drive=lambda case, optimize, seen: begin(case, optimize)(*case.inputs(0)[0]),
    refused=r"0 \(LazyLinear\) has no parameters yet.*call the module once",
)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


def parametrizes(module: Any, number: int) -> None:
    if number == 0:
        parametrize.register_parametrization(module[0], "weight", Symmetric())
        parametrizations.weight_norm(module[2])


case(
    "a parametrization that comes between two steps",
    "pytorch/pytorch#115744",
    "register_parametrization and compiled modules do not go together.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    noise(3, 4, grad=True),
    drive=lambda case, optimize, seen: train(case, optimize, seen, parametrizes),
)

case(
    "a module that is parametrized itself, after optimizing",
    "pytorch/pytorch#121304",
    "weight_norm as a parametrization cannot be compiled.",
    lambda: nn.Linear(4, 4),
    noise(3, 4, grad=True),
    drive=lambda case, optimize, seen: train(
        case, optimize, seen, lambda module, number: parametrizations.weight_norm(module) if number == 0 else None
    ),
    refused="this module is a ParametrizedLinear now",
)


class Delegating(nn.Module):
    """Looks attributes up in a configuration, and notes what is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(4, 4), {"scale": 1.5}

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings", {})
        return settings[name] if name in settings else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "scale":
            self.__dict__["settings"][name] = value
        else:
            super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return {"output": super().__call__(*args, **kwargs)}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h) * self.scale

    def loss(self, h: torch.Tensor) -> torch.Tensor:
        return self(h)["output"].square().mean() + self.forward(h).sum()


def train_by_methods(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(3):
        loss = module.loss(*case.inputs(number)[0])
        loss.backward()
        seen.put(f"loss {number}", loss)
        seen.gradients(f"step {number}", module)
        optimizer.step()
        optimizer.zero_grad()
        module.scale = 1.0 / (number + 1)
        seen.put(f"scale {number}", module.scale)


case(
    "a module with __getattr__, __setattr__ and __call__ of its own",
    "pytorch/pytorch#107460",
    "A module that overrides how attributes are set cannot be compiled.",
    Delegating,
    noise(3, 4, grad=True),
    drive=train_by_methods,
)
