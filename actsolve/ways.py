"""The planned steps for one signature: one for each way that the Python of the forward was seen to take.

Mostly there is one. Where Python reads numbers from tensors, or sizes depend on what they hold, a planned forward holds each
answer against that which it was traced for. At the first that differs it ends, before it has changed anything but random
state, and another step begins anew: one for these answers, if there is one yet, else one that is planned now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from actsolve.capture.answers import Answer
from actsolve.capture.generators import Drawn
from actsolve.capture.randomness import put_python_states, python_states
from actsolve.compiled import CompiledStep
from actsolve.errors import UsageError
from actsolve.runtime.answered import AnswerChanged, same

MANY_WAYS = 8  # after so many, no more are planned for
FEW_WAYS = 3  # after so many, what asks for numbers or sizes, which seldom come twice, is left in eager


@dataclass
class Ways:
    """The planned steps for one signature.

    Attributes:
        steps: The latest first; none where the original is to run.
        ended: Whether nothing can be left in eager instead.
    """

    steps: list[CompiledStep] = field(default_factory=list)
    ended: bool = False

    def run(
        self, call: Callable[[CompiledStep], Any], plan: Callable[[], CompiledStep | None], original: Callable[[], Any]
    ) -> Any:
        """Return what a planned forward returns for these inputs.

        Args:
            call: Calls a step with them.
            plan: Plans for them; None where the original is to run instead.
            original: Runs the original.

        Raises:
            UsageError: the forward is answered otherwise when it is traced than when it runs, or each time that it runs.
        """
        if not self.steps:
            return original()
        step = self.steps[0]
        answers: tuple[Answer, ...] = ()
        drawn = Drawn()
        python: dict[str, bytes] = {}
        while True:
            drawn.note(step.draws_from)
            python = python or (python_states() if step.eager else {})  # what is left in eager may draw from them
            try:
                result = call(step)
            except AnswerChanged as changed:
                known = (*step.answers[: changed.position], changed.found)
            else:
                self._first(step)
                return result
            drawn.put_back()
            put_python_states(python)
            if len(known) <= len(answers):
                raise _unsteady(step, len(known) - 1)
            answers = known
            found = next((s for s in self.steps if _begins_with(s.answers, known)), None)
            if found is None and (found := plan()) is None:
                return original()
            if found.eager != step.eager:  # it asks other questions
                answers = ()
            elif not _begins_with(found.answers, known):
                raise _unsteady(step, len(known) - 1)
            step = found

    def _first(self, step: CompiledStep) -> None:
        if not self.steps or self.steps[0] is not step:
            self.steps[:] = [step, *(s for s in self.steps if s is not step)]


def asking(steps: Sequence[CompiledStep]) -> dict[str, bool]:
    """Return the paths of the modules at whose questions ways part; for each whether it asks for more than yes or no."""
    found: dict[str, bool] = {}
    for one, other in combinations(steps, 2):
        pairs = enumerate(zip(one.answers, other.answers, strict=False))
        position = next((i for i, (a, b) in pairs if not same(a, b)), None)
        if position is not None:
            path = one.captured.joint.asked_by(position)
            found[path] = found.get(path, False) or not isinstance(one.answers[position], bool)
    return found


def _begins_with(answers: tuple[Answer, ...], known: tuple[Answer, ...]) -> bool:
    return len(answers) >= len(known) and all(map(same, answers, known))


def _unsteady(step: CompiledStep, position: int) -> UsageError:
    where = step.captured.joint.asked_at(position)
    return UsageError(
        "the forward is answered otherwise each time that it runs",
        where=where,
        why="Python depends on what a tensor holds there, and that differs with the same inputs",
        try_='deterministic kernels, or on_error="original" to train the model as it is',
    )
