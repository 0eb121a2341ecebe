"""What real users do with their models: the registry of small cases, each after a public report, and how one is driven.

A case is a model of our own, the way its user drives it, and where the report is. `tests/test_field.py` drives each in eager
and optimized, and compares all that was seen: losses, outputs, gradients, parameters, buffers and the random state.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from alike import sum_of_squares
from kinds import Of
from torch import nn

from actsolve.capture.structure import take_apart
from actsolve.runtime.exactness import bitwise_equal

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Optimize = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], nn.Module]


@dataclass(frozen=True)
class Case:
    """One report.

    Attributes:
        make: Makes the model, under a fixed seed.
        inputs: The inputs of a step, by its number; must not draw from torch's own generator.
        source: Of the report.
        symptom: What it says went wrong.
        loss: Of what a call returns.
        drive: How the user drives the module: puts what is seen into a record. None for a few steps of SGD.
        refused: What a refusal says, as a pattern; None if there is to be none. To train as in eager is better than any.
        open: Why it is neither of the two yet.
        needs: Of what package it is.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    source: str
    symptom: str
    loss: Callable[[Any], torch.Tensor] = sum_of_squares
    drive: Callable[[Case, Optimize, Seen], None] | None = None
    refused: str | None = None
    open: str | None = None
    needs: str | None = None


CASES: dict[str, Case] = {}


def case(
    name: str, source: str, symptom: str, make: Callable[[], nn.Module], inputs: Callable[[int], Inputs], **more: Any
) -> None:
    """Register a case."""
    assert name not in CASES, name
    CASES[name] = Case(make, inputs, source, symptom, **more)


def model(run: Callable[..., Any], width: int = 4, **parts: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of ``run(model, *inputs)`` with two linear layers, ``a`` and ``b``, and what ``parts`` make."""
    return lambda: Of(run, a=nn.Linear(width, width), b=nn.Linear(width, width), **{k: make() for k, make in parts.items()})


def noise(*shape: int, grad: bool = False) -> Callable[[int], Inputs]:
    """Return the inputs of one tensor of normal noise."""
    return lambda number: ((randn(number, *shape, grad=grad),), {})


def randn(number: int, *shape: int, grad: bool = False) -> torch.Tensor:
    """Normal noise that is drawn from no shared generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number)).requires_grad_(grad)


@dataclass
class Seen:
    """All that a user can see of a run, by name."""

    values: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: Any) -> None:
        """Note ``value`` as it is now: its tensors, and how they are nested."""
        assert name not in self.values, name
        leaves, structure = take_apart(value)
        self.values[name] = [_now(leaf) for leaf in leaves], structure.key

    def gradients(self, tag: str, module: nn.Module, *inputs: Any) -> None:
        for name, parameter in module.named_parameters():
            self.put(f"{tag}: gradient of {name}", parameter.grad)
        for i, leaf in enumerate(take_apart(inputs)[0]):
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad:
                self.put(f"{tag}: gradient of input {i}", leaf.grad)

    def state(self, tag: str, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.put(f"{tag}: {name}", tensor)
        self.put(f"{tag}: random state", torch.get_rng_state())

    def raises(self, name: str, run: Callable[[], Any]) -> None:
        """Note whether ``run`` raises."""
        try:
            run()
        except Exception:
            self.put(name, True)
        else:
            self.put(name, False)

    def differences(self, other: Seen) -> list[str]:
        """Return the names of what is not the same in both, to the bit."""
        names = [*self.values, *(name for name in other.values if name not in self.values)]
        return [n for n in names if n not in self.values or n not in other.values or not _same(self.values[n], other.values[n])]


def _now(leaf: Any) -> Any:
    return (leaf.detach().clone(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _same(a: Any, b: Any) -> bool:
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(map(_same_leaf, a[0], b[0]))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and isinstance(a[0], torch.Tensor) and isinstance(b[0], torch.Tensor):
        return bitwise_equal(a[0], b[0]) and a[1] == b[1]
    return type(a) is type(b) and bool(a == b)


def seen_of(case: Case, optimize: Optimize) -> Seen:
    """Drive a case and return what is seen."""
    seen = Seen()
    seed(1)
    (case.drive or train)(case, optimize, seen)
    return seen


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def begin(case: Case, optimize: Optimize) -> nn.Module:
    """Return the optimized module, with the same random state afterwards as in eager."""
    made = case.make()
    args, kwargs = case.inputs(0)
    seed(2)
    return optimize(made, args, kwargs)


def step(case: Case, module: nn.Module, number: int, seen: Seen) -> Any:
    """Run one forward and backward; return the output."""
    args, kwargs = case.inputs(number)
    output = module(*args, **kwargs)
    loss = case.loss(output)
    loss.backward()
    seen.put(f"step {number}: output", output)
    seen.put(f"step {number}: loss", loss)
    seen.gradients(f"step {number}", module, args, kwargs)
    return output


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def train(case: Case, optimize: Optimize, seen: Seen, between: Callable[[nn.Module, int], None] | None = None) -> None:
    """Three steps of SGD, and what ``between`` does to the module after each."""
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(3):
        step(case, module, number, seen)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(module, number)
    seen.state("end", module)
