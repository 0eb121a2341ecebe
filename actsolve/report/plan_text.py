"""A plan as text for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actsolve.planned import Planned


def plan_text(planned: Planned) -> str:
    """Return the summary of a plan."""
    return str(planned.as_json())
