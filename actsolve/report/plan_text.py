"""A plan as text for a person."""

from __future__ import annotations

from actsolve.planned import Planned


def plan_text(planned: Planned) -> str:
    """Return the summary of a plan."""
    return str(planned.as_json())
