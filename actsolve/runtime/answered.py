"""Answers that a plan relies on, held against what a forward gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actsolve.capture.answers import Answer, answer_of
from actsolve.capture.eager_regions import called


class AnswerChanged(Exception):
    """A forward comes to an answer that its plan was not made for: it ends there, and nothing has changed but random state.

    Attributes:
        position: Of the question in the forward.
        found: The answer.
    """

    def __init__(self, position: int, found: Answer) -> None:
        super().__init__(f"question {position} of a planned forward is answered {found}")
        self.position = position
        self.found = found


def confirmed(position: int, expected: Answer, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``target(*args, **kwargs)``, of which Python goes on with ``expected``.

    Raises:
        AnswerChanged: it is another.
    """
    result = called(target)(*args, **kwargs)
    found = answer_of(target, args, result)
    if not same(found, expected):
        raise AnswerChanged(position, found)
    return result


def same(a: Answer, b: Answer) -> bool:
    """Whether two answers are equal to the bit of their sign, NaN to itself."""
    return repr(a) == repr(b)
