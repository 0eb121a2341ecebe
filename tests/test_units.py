"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actsolve.errors import UsageError
from actsolve.static_memory import parse_budget
from actsolve.units import format_bytes, format_seconds, format_speed, parse_bytes, parse_speed


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("7500MB", 7_500_000_000),
        ("  1.5gib ", 3 * 2**29),
        ("1KB", 1000),
        ("1kib", 1024),
        ("2TiB", 2 * 2**40),
        ("2tb", 2 * 10**12),
        ("3B", 3),
        (".5KiB", 512),
        ("1.KiB", 1024),
        ("0.3B", 0),
        ("4611686018427387904", 2**62),
        ("9007199254740993", 2**53 + 1),  # a float would lose the last byte
        ("9007199254740993.0B", 2**53 + 1),
    ],
)
def test_sizes_that_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1",
        "+1",
        "1e9",
        "1 000",
        "\uff19GB",
        "\u0663",
        "1\u0660GB",
        "1,5GB",
        "0x10",
        "nan",
        "inf",
        "1GiBB",
        "1 G i B",
        "8G",
        "8 GB",
        "8 GiB",
        "8 GiB budget",
        "1..5",
        ".",
    ],
)
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read budget"):
        parse_bytes(text, what="budget")


@pytest.mark.parametrize("text", ["4611686018427387905", "5000000TiB", "9" * 400, "9" * 400 + "TiB"])
def test_sizes_that_are_too_large(text: str) -> None:
    with pytest.raises(UsageError, match=r"more than 2\*\*62 bytes"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert 0 <= parse_bytes(text) <= 2**62
    except UsageError as error:
        assert error.exit_code == 2


@given(st.integers(0, 2**62))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_bytes(str(size)) == size


@given(st.integers(0, 2**52))
def test_what_is_shown_is_near_what_it_was(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size).replace(" ", "")) - size) <= 0.0051 * size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-2048, "-2.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (5_497_558_139, "5.12 GiB"),
        (2**40 - 1, "1.00 TiB"),
        (3 * 2**50, "3072.00 TiB"),
    ],
)
def test_sizes_as_shown(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (1e-9, "0.001 us"),
        (12.3e-6, "12.3 us"),
        (0.99999e-3, "1 ms"),
        (1.234e-3, "1.23 ms"),
        (0.99999, "1 s"),
        (1.5, "1.5 s"),
        (99.94, "99.9 s"),
        (3600.0, "3600 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_as_shown(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("25GB/s", 25e9),
        (" 25gb/S ", 25e9),
        ("25GiB/s", 25 * 2.0**30),
        ("800MB/s", 800e6),
        ("0.5TB/s", 5e11),
        ("1000", 1000.0),
        ("1000B/s", 1000.0),
        ("1000/s", 1000.0),
    ],
)
def test_speeds_that_are_read(text: str, speed: float) -> None:
    assert parse_speed(text) == speed and isinstance(parse_speed(text), float)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not a number with a unit per second"),
        ("fast", "it is not a number with a unit per second"),
        ("-5GB/s", "it is negative"),
        ("nan", "it is not a number with a unit per second"),
        ("25GB/h", "it is not a number with a unit per second"),
        ("25GB/", "it is not a number with a unit per second"),
        ("25GB/s/s", "it is not a number with a unit per second"),
        ("25GBps", "'GBps' is not a unit of bytes"),
        ("25GB", "(?s)it is a size, and no time is named.*25GB/s"),
        ("25Gbit/s", "(?s)'Gbit' counts bits.*8 bits are a byte"),
        ("25 GB/s", "(?s)a space stands before the unit.*25GB"),
        ("0", "nothing would ever arrive"),
        ("0GB/s", "nothing would ever arrive"),
        ("0.4B/s", "nothing would ever arrive"),
        ("9" * 400 + "GB/s", "more than"),
    ],
)
def test_speeds_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match="cannot read --h2d") as raised:
        parse_speed(text, what="--h2d")
    assert re.search(why, str(raised.value)) and len(str(raised.value)) < 400


@given(st.text(max_size=12))
def test_any_text_is_a_speed_or_refused(text: str) -> None:
    try:
        assert 0 < parse_speed(text) <= 2**62
    except UsageError as error:
        assert error.exit_code == 2


@given(st.floats(1.0, 9e14))
def test_speeds_as_shown_are_near_what_they_were(speed: float) -> None:
    assert parse_speed(format_speed(speed).replace(" ", "")) == pytest.approx(speed, rel=0.0051, abs=0.5)


@pytest.mark.parametrize(
    ("speed", "text"),
    [(1.0, "1 B/s"), (999.0, "999 B/s"), (999.6, "1 KB/s"), (24.8e9, "24.8 GB/s"), (999.9e6, "1 GB/s"), (1.2e12, "1.2 TB/s")],
)
def test_speeds_as_shown(speed: float, text: str) -> None:
    assert format_speed(speed) == text


def test_a_budget_of_thousands_of_digits_is_cut() -> None:
    for budget in (10**5000, -(10**5000), "9" * 5000, "9" * 5000 + "%", "-" + "9" * 5000, "0." + "9" * 5000):
        with pytest.raises(UsageError) as raised:
            parse_budget(budget)
        assert len(str(raised.value)) < 400


def test_a_share_as_text_has_its_sign() -> None:
    assert parse_budget(0.6) == parse_budget("60%") == parse_budget(" 60 % ")
    for text, try_ in (("0.6", "60%"), (".125", "12.5%"), ("1.", "100%"), ("1.5", "60%")):
        with pytest.raises(UsageError, match="a share is written with %") as raised:
            parse_budget(text)
        assert raised.value.try_ is not None and try_ in raised.value.try_
    assert parse_budget("1.5GiB").size_bytes == 3 * 2**29


@pytest.mark.parametrize("text", ["-1", "-3GB", " -.5KiB "])
def test_a_negative_size_is_called_that(text: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)why    it is negative.*0 or more"):
        parse_bytes(text, what="--host-budget")


@pytest.mark.parametrize("text", ["-", "--1", "-x", "- 1 GB GB"])
def test_what_is_no_number_is_not_called_negative(text: str) -> None:
    with pytest.raises(UsageError, match="it is not a number with a unit"):
        parse_bytes(text)
