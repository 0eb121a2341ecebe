"""A planned step that can be called: torch's autograd around the forward and the backward that were lowered.

A backward that starts from other outputs than the plan expected is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from actsolve.capture.captured import Captured
from actsolve.capture.state import Place
from actsolve.capture.torch_internals import compile_joint
from actsolve.errors import ScheduleError, UsageError
from actsolve.lower import Lowered, lower, lower_backward
from actsolve.planned import Planned
from actsolve.runtime.boxed import boxed_function
from actsolve.schedule import Schedule

Boxed = Callable[[list[Any]], Any]


@dataclass
class Backward:
    """The backward of a compiled step, for each set of outputs that it was asked to start from.

    Attributes:
        captured: The step.
        lowered: The planned forward and backward.
        seen: The tangents that it has ever been given.
    """

    captured: Captured
    lowered: Lowered
    seen: set[str] = field(default_factory=set)
    _forms: dict[frozenset[str], Boxed] = field(default_factory=dict)

    def __call__(self, args: list[Any]) -> Any:
        names = [tangent.name for tangent in self.captured.joint.tangents]
        given = frozenset(
            name for name, tangent in zip(names, args[len(args) - len(names) :], strict=True) if tangent is not None
        )
        self.seen |= given
        if given not in self._forms:
            self._forms[given] = boxed_function(self._lowered(given), "backward")
        return self._forms[given](args)

    def _lowered(self, given: frozenset[str]) -> torch.fx.GraphModule:
        if given == self.captured.tangents:
            return self.lowered.backward
        try:
            return lower_backward(self.captured.starting_from(given), self.lowered.saved)
        except ScheduleError as error:
            raise UsageError(
                "the backward starts from other outputs than this step was planned for",
                where=error.where,
                why=f"it needs what the plan neither keeps nor can recompute ({error.what})",
                try_="the next step: it is planned for these outputs too",
            ) from error


@dataclass
class CompiledStep:
    """A planned step that can be called.

    Attributes:
        function: Differentiable function of the tensors of the module and its inputs.
        backward: What it runs in the backward.
        captured: What it was made from.
        planned: What is known of the plan.
    """

    function: Callable[..., list[Any]]
    backward: Backward
    captured: Captured
    planned: Planned

    def __call__(self, module: torch.nn.Module, places: list[Place], leaves: list[Any]) -> Any:
        state = [container[key] for container, key in places]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return self.captured.joint.layout.restore(module, self.function(*state, *tensors))

    @property
    def outgrown(self) -> frozenset[str] | None:
        """The tangents to plan for, if the backward was given some that the plan did not expect."""
        expected = self.captured.tangents
        return None if self.backward.seen <= expected else expected | self.backward.seen


def compile_step(captured: Captured, planned: Planned, schedule: Schedule | None = None) -> CompiledStep:
    """Return a step that carries out the planned schedule, or ``schedule`` in its place."""
    schedule = schedule or planned.schedule
    lowered = lower(captured, schedule)
    backward = Backward(captured, lowered)

    def partition(_joint: Any, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        assert num_fwd_outputs == captured.n_forward_outputs
        return lowered.forward, lowered.backward

    def forward_of(module: torch.fx.GraphModule, _inputs: Any) -> Boxed:
        return boxed_function(module, "forward")

    def backward_of(_module: torch.fx.GraphModule, _inputs: Any) -> Boxed:
        def run(args: list[Any]) -> Any:
            return backward(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    function = compile_joint(captured.joint.export, partition, forward=forward_of, backward=backward_of)
    return CompiledStep(function, backward, captured, planned)
