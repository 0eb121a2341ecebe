"""Texts that are reviewed like code: tests/golden/<name>. ``UPDATE_GOLDEN=1 pytest`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Fail unless ``text`` is what the golden file says."""
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
