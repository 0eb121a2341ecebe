"""Where what was found once is kept: measured costs, and plans."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Return ``$ACTSOLVE_CACHE_DIR``, or else the user's cache directory for actsolve."""
    named = os.environ.get("ACTSOLVE_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("actsolve"))


def plans_are_kept() -> bool:
    """Whether a plan that was found before serves, and one that is found is kept: unless ``$ACTSOLVE_PLAN_CACHE`` is ``off``."""
    return os.environ.get("ACTSOLVE_PLAN_CACHE", "").lower() != "off"
