"""Bytes, seconds and bytes per second, as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from actsolve.errors import UsageError

_SUFFIX = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SUFFIX[_letter + "b"] = 1000**_power
    _SUFFIX[_letter + "ib"] = 1024**_power

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(\s*)([a-zA-Z]*)\s*")
_MAX_TEXT = 40
MAX_BYTES = 2**62


def parse_bytes(text: str, *, what: str = "size", also: str = "") -> int:
    """Return the bytes that ``text`` names: ``8GiB``, ``8GB``, ``7500MB`` or plain bytes.

    Args:
        text: A non-negative decimal number and an optional unit. ``KB`` is 1,000 bytes and ``KiB``
            1,024; the case of the unit does not matter.
        what: What is being read, for the message.
        also: What else may stand here, for the message.

    Raises:
        UsageError: not a number, an unknown unit, a space between the two, or more than 2**62 bytes.
    """
    match = _NUMBER.fullmatch(text)
    unread, others = f"cannot read {what} {cut(text)!r}", f"; or {also}" if also else ""
    if match is None and _is_negative(text):
        raise UsageError(unread, why="it is negative", try_=f"8GiB, 7500MB or plain bytes, 0 or more{others}")
    if match is None:
        raise UsageError(unread, why="it is not a number with a unit", try_=f"8GiB, 7500MB or plain bytes{others}")
    number, space, unit = match.groups()
    factor = _SUFFIX.get(unit.lower())
    if factor is None:
        why = f"{cut(unit)!r} is not a unit of bytes"
        raise UsageError(unread, why=why, try_=f"KB, MB, GB, TB, KiB, MiB, GiB or TiB{others}")
    if space and unit:  # a shell would split it: what was meant to be one argument may be two
        raise UsageError(unread, why="a space stands before the unit", try_=cut(f"{number}{unit}"))
    size = round(Decimal(number) * factor)
    if size > MAX_BYTES:
        raise UsageError(unread, why="it is more than 2**62 bytes", try_="a smaller number")
    return size


def parse_speed(text: str, *, what: str = "speed") -> float:
    """Return the bytes per second that ``text`` names: ``25GB/s``, ``25GiB/s``, ``800MB/s`` or a plain number of bytes.

    Args:
        text: A size as `parse_bytes` reads it, above 0, and ``/s``, which a plain number may go without.
        what: What is being read, for the message.

    Raises:
        UsageError: not a size per second, one of 0, or one in bits.
    """
    size, slash, per = text.strip().partition("/")
    unread, match = f"cannot read {what} {cut(text)!r}", _NUMBER.fullmatch(size)
    if match is None and _is_negative(size):
        raise UsageError(unread, why="it is negative", try_="25GB/s")
    if match is None or (slash and per.lower() != "s"):
        try_ = "25GB/s, 800MB/s or plain bytes per second"
        raise UsageError(unread, why="it is not a number with a unit per second", try_=try_)
    number, _, unit = match.groups()
    if unit.lower().endswith("bit") or (len(unit) > 1 and unit.endswith("b") and not unit.islower()):  # Gb: as links are sold
        raise UsageError(unread, why=f"{cut(unit)!r} counts bits", try_="bytes per second, such as 25GB/s: 8 bits are a byte")
    speed = float(parse_bytes(size, what=what))
    if unit and not slash:
        raise UsageError(unread, why="it is a size, and no time is named", try_=cut(f"{number}{unit}/s"))
    if speed <= 0:
        raise UsageError(unread, why="nothing would ever arrive", try_="25GB/s")
    return speed


def _is_negative(text: str) -> bool:
    """Whether ``text`` is a size but for a minus."""
    return text.strip().startswith("-") and _NUMBER.fullmatch(text.strip()[1:]) is not None


def cut(text: str) -> str:
    """Return ``text``, shortened to what a message has room for."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def format_bytes(size_bytes: int) -> str:
    """Return ``size_bytes`` with a binary unit and three significant places: ``5.12 GiB``."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1023.995:  # what rounds to 1024.00 goes on to the next unit
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def format_speed(bytes_per_s: float) -> str:
    """Return ``bytes_per_s`` with a decimal unit, as links are rated: ``24.8 GB/s``."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "KB/s")):
        if bytes_per_s >= 0.9995 * factor:  # what rounds to 1000 of a unit is 1 of the next
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` in the unit that keeps it readable: ``1.23 ms``."""
    if abs(seconds) >= 999.5:
        return f"{seconds:.0f} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(seconds) * factor >= 0.9995 or unit == "us":  # what rounds to 1000 of a unit is 1 of the next
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("the last unit always returns")
