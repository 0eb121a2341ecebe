"""Peaks and times of whole steps."""

from __future__ import annotations

import math

import pytest
import torch

from actsolve.runtime.measure_step import interleaved_times, measured_peak, median_ratio_ci


def test_a_steps_peak_is_what_it_allocates_above_static() -> None:
    weight = torch.ones(256, 256, requires_grad=True)

    def drop() -> None:
        weight.grad = None

    def step() -> None:
        (weight * 2).sum().backward()

    # The product, 256 KiB, is gone before the gradient, as large, is made.
    once = measured_peak(step, 1000, before=drop)
    assert 1000 + 256 * 1024 <= once < 1000 + 257 * 1024
    assert measured_peak(step, 1000, before=drop) == once


def test_steps_take_turns() -> None:
    calls: list[str] = []
    times = interleaved_times(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        pairs=3,
        before={"b": lambda: calls.append("before b")},
        warmup=1,
    )
    b = ["before b", "b"]
    assert calls == ["a", *b, "a", *b, *b, "a", "a", *b]
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert all(t >= 0 for found in times.values() for t in found)


def test_the_interval_of_a_median_ratio() -> None:
    b = [2.0] * 40
    ratio, low, high = median_ratio_ci([2.0 * i for i in range(1, 41)], b)
    assert ratio == 20.5
    # The 14th and the 27th of 40, as tables of the sign test have it.
    assert (low, high) == (14, 27)
    assert median_ratio_ci([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]) == (2, 1, 3)
    assert median_ratio_ci([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        ratios = torch.rand(40, generator=generator).exp().tolist()
        _, low, high = median_ratio_ci(ratios, [1.0] * 40)
        covered += low <= math.exp(0.5) <= high
    assert covered >= 370


def test_what_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        median_ratio_ci([1.0, 2.0, 3.0], [1.0, 2.0])
