"""What holds a peak, in words: for the message of exit code 3."""

from __future__ import annotations

from actsolve.peak import LiveValue, Peak
from actsolve.units import format_bytes

_VISIBLE = 0.001  # of the peak: kinds and values below it are left to the JSON
_MOST_VALUES = 3


def place_of(peak: Peak) -> str:
    """The op at the peak, with its source line."""
    if not peak.op:
        return peak.target
    return f"{peak.target}{_at(peak.source)} ({'replayed' if peak.phase == 'replay' else peak.phase})"


def _at(source: str) -> str:
    return f" at {source}" if source else ""


def kinds_of(peak: Peak) -> str:
    """The bytes in use at the peak, by kind."""
    kinds = {kind.replace("_", " "): size for kind, size in peak.static.items() if size}
    inside = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1]))
    total = sum(kinds.values())
    parts = [f"static {format_bytes(total)}" + (f" ({inside})" if inside != f"given {format_bytes(total)}" else "")]
    parts += [f"{kind} {format_bytes(size)}" for kind, size in peak.live.items() if size >= _VISIBLE * peak.size_bytes]
    return " + ".join(parts)


def largest_of(peak: Peak) -> list[str]:
    """The largest values at the peak, a line each."""
    largest = [v for v in peak.largest[:_MOST_VALUES] if v.size_bytes >= _VISIBLE * peak.size_bytes]
    return [f"{'largest:' if i == 0 else '':<8} {_named(v)}" for i, v in enumerate(largest)]


def _named(value: LiveValue) -> str:
    """A value with its size, kind, shape and source line."""
    made = f", made by {value.op}{_at(value.source)}" if value.op else ""
    return f"{value.name} {format_bytes(value.size_bytes)} ({value.kind}), {value.dtype}{list(value.shape)}{made}"
