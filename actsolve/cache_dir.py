"""Where what was found once is kept: measured costs, plans of least memory."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Return ``$ACTSOLVE_CACHE_DIR``, or else the user's cache directory for actsolve."""
    named = os.environ.get("ACTSOLVE_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("actsolve"))
