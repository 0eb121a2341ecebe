"""A layer is a child of the outermost ModuleList or Sequential (DESIGN section 7)."""

from __future__ import annotations

import re

_CHILD = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")


class LayerNumbers:
    """Numbers layers in the order in which they first run: ``layer1.0``, ``layer1.1``, ``layer2.0`` are 0, 1, 2."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, module_path: str) -> int | None:
        """Return the number of the layer that ``module_path`` lies in; None outside all of them."""
        match = _CHILD.match(module_path)
        return self._numbers.setdefault(match.group(0), len(self._numbers)) if match else None
