"""How long copies take: the formula against a fluid that flows both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actsolve.links import Links

SPEED = st.floats(1.0, 100.0)
SHARE = st.floats(0.05, 1.0)
BYTES = st.floats(0.0, 1000.0)


def flowing(links: Links, out_bytes: float, back_bytes: float) -> float:
    """Both directions at once until one is empty, then the other alone."""
    out_s, back_s = out_bytes / links.out(beside=True), back_bytes / links.back(beside=True)
    first_s = min(out_s, back_s)
    out_left = out_bytes - first_s * links.out(beside=True)
    back_left = back_bytes - first_s * links.back(beside=True)
    return first_s + (out_left / links.out(beside=False) if out_s > back_s else back_left / links.back(beside=False))


@given(SPEED, SPEED, SHARE, SHARE, BYTES, BYTES)
def test_the_least_time_is_that_of_a_fluid(
    d2h: float, h2d: float, out_share: float, back_share: float, out_bytes: float, back_bytes: float
) -> None:
    links = Links(d2h, h2d, d2h * out_share, h2d * back_share)
    if out_share + back_share >= 1:  # else the two together are slower than one after the other, and one would wait
        assert links.least_s(out_bytes, back_bytes) == pytest.approx(flowing(links, out_bytes, back_bytes), rel=1e-6, abs=1e-9)


@given(SPEED, SPEED, BYTES, BYTES)
def test_directions_of_which_nothing_is_known_share_the_link(d2h: float, h2d: float, out_bytes: float, back_bytes: float) -> None:
    assert Links(d2h, h2d).least_s(out_bytes, back_bytes) == pytest.approx(out_bytes / d2h + back_bytes / h2d, abs=1e-9)


def test_the_a100_of_the_table() -> None:
    """25 GB/s out and 24.8 in alone, 24 and 11 beside each other: 12 GB each way take 1.09 s in, not 0.48."""
    links = Links(d2h=25e9, h2d=24.8e9, d2h_both=24e9, h2d_both=11e9)
    assert links.least_s(12e9, 0) == pytest.approx(0.48)
    assert links.least_s(12e9, 12e9) == pytest.approx(0.5 + (12e9 - 0.5 * 11e9) / 24.8e9)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_speeds_are_positive(speed: float) -> None:
    with pytest.raises(ValueError, match="h2d"):
        Links(1.0, speed)
