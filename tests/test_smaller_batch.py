"""The largest batch that fits: found in few tries, and never one that does not."""

from __future__ import annotations

import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actsolve.cli.main import app
from actsolve.smaller_batch import Largest, largest_fitting


@given(
    batch=st.integers(2, 300),
    fixed=st.integers(0, 10**6),
    each=st.integers(1, 10**4),
    wave=st.integers(0, 3000),
    share=st.floats(0, 1),
)
def test_it_is_the_largest(batch: int, fixed: int, each: int, wave: int, share: float) -> None:
    def needed(b: int) -> int:
        return fixed + each * b + int(wave * math.isqrt(b))

    budget = int(share * needed(batch))
    tried: list[int] = []

    def counted(b: int) -> int:
        tried.append(b)
        return needed(b)

    found = largest_fitting(counted, min(budget, needed(batch) - 1), (batch, needed(batch)), time.monotonic() + 60)
    fitting = [b for b in range(1, batch) if needed(b) <= min(budget, needed(batch) - 1)]
    assert found.batch == max(fitting, default=None)
    assert found.next == (found.batch or 0) + 1
    assert len(tried) == len(set(tried))


def test_a_nearly_linear_need_takes_few_tries() -> None:
    tried: list[int] = []

    def needed(b: int) -> int:
        tried.append(b)
        return 5000 + 317 * b + 50 * (b % 3)

    assert largest_fitting(needed, 100_000, (1000, needed(1000)), time.monotonic() + 60).batch == 299
    assert len(tried) <= 6


def test_after_the_deadline_the_best_so_far_is_taken() -> None:
    assert largest_fitting(lambda b: b, 50, (100, 100), deadline=0.0) == Largest(1, 1, 100)


@pytest.mark.parametrize(
    ("target", "budget", "hint"),
    [
        (
            ("gpt-mini", "layers=1", "width=32", "vocab=64", "seq=64", "batch=32"),
            "2MB",
            r"or --set batch=\d+: the largest that fits \(\d+ does not; it is assumed that a larger batch never needs less\)",
        ),
        (
            ("gpt-mini", "layers=1", "width=32", "vocab=64", "seq=64", "batch=4"),
            "320KB",
            r"a smaller model: not even --set batch=1 fits, which",
        ),
        (("gpt-mini", "layers=1", "width=256", "vocab=64", "seq=8", "batch=2"), "1MB", r"or --optimizer sgd: it keeps no state"),
        (
            ("gpt-mini", "layers=1", "width=32", "vocab=8192", "seq=64", "batch=2"),
            "6MB",
            r"or the loss in chunks of the batch or sequence: its values \(logits\) take 12.00 MiB at the peak",
        ),
    ],
)
def test_what_would_help(target: tuple[str, ...], budget: str, hint: str) -> None:
    name, *overrides = target
    given_ = [word for override in overrides for word in ("--set", override)]
    command = ["optimize", name, *given_, "--mem-budget", budget, "--hardware", "h200", "--reserve", "0", "--time-limit", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3, result.stderr
    assert re.search(hint, result.stderr), result.stderr
    if "the largest that fits" in result.stderr:
        fits = result.stderr.partition("--set batch=")[2].partition(":")[0]
        again = [w if not w.startswith("batch=") else f"batch={fits}" for w in command]
        assert CliRunner().invoke(app, again).exit_code == 0
