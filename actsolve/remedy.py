"""One thing that would help where nothing fits, and what is needed with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actsolve.units import format_bytes


@dataclass(frozen=True)
class Remedy:
    """One thing to try.

    Attributes:
        what: The flag or the change, as text.
        needs_bytes: The smallest budget that was found with it; None if that is not known.
        fits: Whether that is within the budget that was asked for.
        note: What else is to be said: how many bytes are at stake, and what was assumed.
        at_best: The figure is a lower estimate, not that of a plan.
    """

    what: str
    needs_bytes: int | None = None
    fits: bool = False
    note: str = ""
    at_best: bool = False

    def __str__(self) -> str:
        if self.needs_bytes is None:
            figure = ""
        elif self.at_best:
            figure = f"at best {format_bytes(self.needs_bytes)} {'fits' if self.fits else 'is still needed'}"
        else:
            # In bytes too, for what changes static memory changes what a share is of.
            needs = f"--mem-budget {self.needs_bytes} ({format_bytes(self.needs_bytes)})"
            figure = f"needs {needs}, {'which fits' if self.fits else 'not enough alone'}"
        return ": ".join(part for part in (self.what, "; ".join(p for p in (self.note, figure) if p)) if part)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of one entry of ``remedies`` in ``optimize --json``."""
        return {
            "what": self.what,
            "needs_bytes": self.needs_bytes,
            "fits": self.fits,
            "at_best": self.at_best,
            "note": self.note or None,
        }
