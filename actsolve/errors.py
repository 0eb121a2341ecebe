"""Every error that a user can cause: what, where, why, and what to try.

One root, `ActsolveError`; a subclass where a caller would act differently. Each has the exit code that the command line
ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NEXT_LINE = "\n" + " " * 9  # below the text beside a label


class ActsolveError(Exception):
    """Root of all errors that actsolve raises on purpose.

    Args:
        what: One line: what went wrong.
        where: The op, file or argument that it concerns.
        why: The reason, with numbers; lines after the first are set below it.
        try_: What to do about it; likewise.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, try_: str | None = None) -> None:
        self.what, self.where, self.why, self.try_ = what, where, why, try_
        super().__init__(self._text())

    def add_reason(self, reason: str, try_: str | None) -> None:
        """Add a line to the reasons, and one to what may be tried."""
        self.why = "\n".join(filter(None, (self.why, reason)))
        self.try_ = "\nor ".join(filter(None, (self.try_, try_)))
        self.args = (self._text(),)

    def _text(self) -> str:
        labelled = (("where", self.where), ("why", self.why), ("try", self.try_))
        lines = [f"{type(self).__name__}: {self.what}", *(f"  {label:<5}  {text}" for label, text in labelled if text)]
        return "\n".join(line.replace("\n", _NEXT_LINE) for line in lines)


class UsageError(ActsolveError):
    """An argument or a target that cannot be used as given."""

    exit_code = 2


class FileFormatError(UsageError):
    """A graph or plan file that is malformed, of another version, or of another model."""


class CaptureError(UsageError):
    """A training step that cannot be traced.

    Attributes:
        module: Name of the part of the step whose Python no trace can follow, if one is to blame.
        around: Names of those around it, from the inside.
        draws: Whether it is Python's or NumPy's global generator that the step goes on with.
    """

    module: str | None = None
    around: tuple[str, ...] = ()
    draws: bool = False

    def blame(self, parts: Sequence[str]) -> None:
        """Note the names of the parts of the step that were running, the innermost first."""
        self.module, self.around = (parts[0], tuple(parts[1:])) if parts else (None, ())


class ForwardError(CaptureError):
    """The model itself raises for these inputs, run for real."""


class InfeasibleBudget(ActsolveError):
    """No plan fits the budget, or none was found in time.

    Attributes:
        smallest_bytes: The smallest budget that a plan was found for, or None.
        attempt: What is known of the step all the same (an `actsolve.planned.Attempt`), or None.
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        try_: str | None = None,
        smallest_bytes: int | None = None,
    ) -> None:
        super().__init__(what, where=where, why=why, try_=try_)
        self.smallest_bytes = smallest_bytes
        self.attempt: Any = None


class ScheduleError(ActsolveError):
    """A schedule that reads what is not live, frees what is needed, or exceeds its budget. Always a fault of ours."""


class SolverError(ActsolveError):
    """A solver that is missing or that failed."""

    exit_code = 2
