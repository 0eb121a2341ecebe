"""Columns of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], numbers: Collection[int] = (), indent: str = "  ") -> list[str]:
    """Return a line per row, its cells padded to the widest of their column; ``numbers`` are columns aligned to the right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            indent
            + "  ".join(c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        ).rstrip()
        for row in rows
    ]
