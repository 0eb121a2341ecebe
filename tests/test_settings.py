"""Python values that a forward depends on: seen when they change between steps, refused when the forward changes them."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import actsolve
from actsolve.capture.settings import settings_key, value_key
from actsolve.errors import CaptureError


class Config:
    """Plain data, as the configs of model libraries are."""

    def __init__(self) -> None:
        self.scale, self.act, self.sizes, self.dtype = 1.0, "sin", {"hidden": [1, 2]}, torch.float32


class Holder:
    """No data: it holds what is no data."""

    def __init__(self) -> None:
        self.lock, self.n = iter(()), 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weights, self.nested, self.factors = [1.0, 2.0], {"loss": {"w": [1.0]}}, (torch.ones(8), 2.0)
        self.act, self.config, self.array, self.gain = torch.sin, Config(), np.ones(8, dtype=np.float32), np.float64(1.5)
        self.holder, self.hooks_of_mine = Holder(), {"f": torch.tanh}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.act(self.layer(h)) * self.weights[0] * self.nested["loss"]["w"][0] * self.factors[0] * self.config.scale
        return (self.hooks_of_mine["f"](h) * float(self.array[0]) * float(self.gain) * self.config.sizes["hidden"][0]).sum()


def replaced_forward(net: Net) -> None:
    net.layer.forward = types.MethodType(lambda self, h: nn.functional.linear(h, self.weight) * 2, net.layer)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "an item of a list": lambda net: net.weights.__setitem__(0, 3.0),
    "an item of a nested list": lambda net: net.nested["loss"]["w"].__setitem__(0, 4.0),
    "a function": lambda net: setattr(net, "act", torch.cos),
    "a function in a dict": lambda net: net.hooks_of_mine.__setitem__("f", torch.sigmoid),
    "a tuple": lambda net: setattr(net, "factors", (torch.ones(8) * 2, 2.0)),
    "a config": lambda net: setattr(net.config, "scale", 0.5),
    "a list in a config": lambda net: net.config.sizes["hidden"].__setitem__(0, 7),
    "an array": lambda net: net.array.__setitem__(0, 5),
    "a numpy scalar": lambda net: setattr(net, "gain", np.float64(2.5)),
    "a submodule's forward": replaced_forward,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_steps_is_seen(change: Callable[[Net], Any]) -> None:
    torch.manual_seed(0)
    ours, eager, inputs = Net(), Net(), torch.randn(4, 8)
    eager.load_state_dict(ours.state_dict())
    module = actsolve.optimize(ours, (inputs,), mem_budget=1.0, hardware="a100")
    for _ in range(2):
        for each in (module, eager):
            each.zero_grad()
            each(inputs).backward()
        assert torch.equal(ours.layer.weight.grad, eager.layer.weight.grad)
        change(ours)
        change(eager)


def test_a_loss_function_s_data_is_seen() -> None:
    layer, inputs, weights = nn.Linear(4, 4), torch.randn(3, 4), {"w": [1.0]}
    module = actsolve.optimize(
        layer, (inputs,), loss_fn=lambda out: weights["w"][0] * out.square().mean(), mem_budget=1.0, hardware="a100"
    )
    first, _ = module(inputs)
    weights["w"][0] = 3.0
    second, _ = module(inputs)
    assert torch.equal(second, 3.0 * first)


def counts_in_a_config(net: Net) -> None:
    net.config.scale += 1


def counts_in_a_nested_dict(net: Net) -> None:
    net.nested["loss"]["n"] = net.nested["loss"].get("n", 0) + 1


def remembers_in_a_deque(net: Net) -> None:
    net.memory.append(1)  # type: ignore[union-attr, operator]


def remembers_in_a_set(net: Net) -> None:
    net.met.add(3)  # type: ignore[union-attr, operator]


LOST: dict[str, tuple[Callable[[Net], None], str]] = {
    "a counter in a config": (counts_in_a_config, "config"),
    "a nested dict": (counts_in_a_nested_dict, "nested"),
    "a deque": (remembers_in_a_deque, "memory"),
    "a set": (remembers_in_a_set, "met"),
}


@pytest.mark.parametrize(("change", "name"), LOST.values(), ids=LOST)
def test_a_forward_that_changes_them_is_refused_and_they_are_put_back(change: Callable[[Net], None], name: str) -> None:
    class Changing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.met = collections.deque([0], maxlen=2), {1}

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            change(self)
            return super().forward(h)

    net = Changing()
    before = settings_key(copy.deepcopy(net))
    with pytest.raises(CaptureError, match=f"changes {name}"):
        actsolve.optimize(net, (torch.randn(4, 8),), mem_budget=1.0, hardware="a100")
    after = settings_key(net)
    assert [k for k in before if "Same" not in repr(k)] == [k for k in after if "Same" not in repr(k)]


def test_what_is_no_data_counts_as_the_same_object() -> None:
    holder = Holder()
    key = value_key(holder)
    holder.n = 5
    assert value_key(holder) == key
    assert value_key(Holder()) != key


def test_data_that_refers_to_itself_has_a_key() -> None:
    config = Config()
    config.itself = [config]  # type: ignore[attr-defined]
    assert value_key(config) == value_key(config)
    assert hash(value_key(config)) == hash(value_key(config))


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), ([1], (1,)), ({"a": 1}, {"a": 2}), ({1}, {2})])
def test_different_data_has_different_keys(a: Any, b: Any) -> None:
    assert value_key(a) != value_key(b)


def test_zeros_of_either_sign_and_the_names_of_scalars_are_told_apart() -> None:
    assert value_key(0.0) != value_key(-0.0) and value_key(float("nan")) == value_key(float("nan"))
    assert value_key([1.0, 0.0]) != value_key([1.0, -0.0])
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first.t, first.u = 2.0, 3.0  # type: ignore[assignment]
    second.u, second.t = 2.0, 3.0  # type: ignore[assignment]
    assert settings_key(first) != settings_key(second)
