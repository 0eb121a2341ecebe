"""One named size of a model family: what the registry hands out as a factory."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from actsolve.training_step import TrainingStep


class Size:
    """A factory of training steps: a family's function with one size's settings filled in.

    Args:
        name: What the registry and the command line call it.
        about: What it is, in a few words.
        family: Builds a training step from keyword-only settings.
        settings: The settings of this size. The family's own defaults fill in the rest.
    """

    def __init__(self, name: str, about: str, family: Callable[..., TrainingStep], **settings: Any) -> None:
        self.name = name
        self.about = about
        self._build = functools.partial(family, **settings)
        # Where inspect.signature(size) looks.
        self.__signature__ = inspect.signature(self._build)

    @property
    def settings(self) -> dict[str, Any]:
        """Every accepted override with its default in this size."""
        return {name: parameter.default for name, parameter in self.__signature__.parameters.items()}

    def describe(self) -> str:
        """Return one line: what it is and its default settings."""
        return f"{self.about}: " + ", ".join(f"{name}={value}" for name, value in self.settings.items())

    def __call__(self, **overrides: Any) -> TrainingStep:
        """Build the training step, its model in train mode.

        Raises:
            TypeError: an override is not a setting of this family; the message names those that are.
        """
        accepted = self.settings
        for name in overrides:
            if name in accepted:
                continue
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(f"{self.name}: unknown override {name!r}{hint}; accepted: {', '.join(accepted)}")
        return self._build(**overrides)
