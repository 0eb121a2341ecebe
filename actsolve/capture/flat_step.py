"""A training step as a function of flat tensors, which torch can trace: its forward, and what is refused of what that does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actsolve.capture.answers import Answers, Asked, noted
from actsolve.capture.eager_regions import Regions
from actsolve.capture.output_layout import OutputLayout
from actsolve.capture.provenance import recorded_origins, short_path
from actsolve.capture.randomness import put_python_states, python_states
from actsolve.capture.state import (
    TracedState,
    Write,
    put_back,
    state_places,
)
from actsolve.capture.structure import are_changed, refuse_hidden_data, take_apart
from actsolve.capture.torch_internals import (
    as_if_traced,
    is_of_trace,
    n_mutations,
    real_tensors,
)
from actsolve.errors import ActsolveError, CaptureError, ForwardError
from actsolve.training_step import TrainingStep


class FlatStep(torch.nn.Module):
    """The step as a function of flat tensors: the module's own, each once, then those among the inputs.

    So torch sees no nested inputs, constants or loss function, and a parameter that two modules share is one input with
    one gradient, added up in eager's order.
    """

    def __init__(self, step: TrainingStep, leave_out: frozenset[Write]) -> None:
        super().__init__()
        self._leave_out = leave_out
        self._keeps_casts = torch.is_autocast_cache_enabled()
        # Behind lists, or torch would find the parameters and buffers in them and add them as inputs of its own.
        self._hidden = [step.model]
        self._hidden_loss = [step.loss_fn]
        leaves, self._structure = take_apart((tuple(step.args), dict(step.kwargs)))
        self._constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        for constant in self._constants.values():
            refuse_hidden_data(constant, "an input")
        self.answers: Answers | None = None
        self.regions = Regions(step.model, step.loss_fn, step.eager)
        self._note: Callable[[Asked], None] | None = None  # while it runs for real
        state = [container[key] for container, key in state_places(step.model, leave_out)]
        self._n_state = len(state)
        first: dict[int, int] = {}
        # One tensor given twice is one in the trace.
        self._same = [first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves)]
        self.tensors = (*state, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        self.layout = OutputLayout()
        self._traced = contextlib.ExitStack()
        self._state: TracedState | None = None
        self._writes: dict[Write, torch.Tensor] = {}

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run the step, and leave its module as it is then for the backward, whose Python may look at it: see `close`."""
        self.close()
        if self.answers is not None:
            self.answers.begin()
        rest = iter(tensors[self._n_state :])
        leaves = [self._constants[i] if i in self._constants else next(rest) for i in range(self._structure.n_leaves)]
        leaves = [leaves[first] for first in self._same]
        args, kwargs = self._structure.restore(leaves)
        (model,) = self._hidden
        run = functools.partial(type(model).forward, model)  # its own hooks run outside, at each call
        self._traced.enter_context(self.regions.standing_in(self._note))
        state = self._state = TracedState(model, self._leave_out, self._hidden_loss)
        self._traced.enter_context(state.replaced(tensors[: self._n_state]))
        self._traced.enter_context(put_back(self._constants.values()))
        with recorded_origins(model, entry=FlatStep.forward.__code__, keeps_casts=self._keeps_casts) as noting:
            (loss_fn,) = self._hidden_loss
            called = self.regions.loss_fn
            with _loss_as_it_was(loss_fn):
                output = call_step(run, None if called is None else noting.of_loss(called), args, kwargs)
            if loss_fn is not None:
                _refuse_odd_loss(loss_fn, *output)
        self._writes = state.writes()
        if are_changed(leaves, self._structure, (args, kwargs)):
            raise CaptureError(
                "the forward changes a list, dict or object that is one of its inputs",
                why="a planned step is given tensors only, so that its caller would not see the change",
                try_="return what it adds",
            )
        return self.layout.record(self._writes, state.settings, output, leaves)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise if the module's tensors change within this context: a checkpoint, which eager runs again in the backward."""
        (model,) = self._hidden
        before = [(container, key, container[key], n_mutations(container[key])) for container, key in state_places(model)]
        yield
        for container, key, tensor, version in before:
            if container[key] is not tensor or n_mutations(tensor) != version:
                raise CaptureError(
                    "a checkpoint changes the module",
                    where=str(key),
                    why="eager runs it again in the backward, and changes it twice; a planned step runs it once",
                    try_="no checkpoint there: a plan decides what is computed again",
                )

    def refuse_changes_since(self) -> None:
        """Raise if the backward changed the module."""
        assert self._state is not None
        self._state.refuse_changes_since(self._writes, self.layout.settings)

    def close(self) -> None:
        """Put the module back as it was before the last forward."""
        self._traced.close()
        self._state, self._writes = None, {}

    def ask(self) -> None:
        """Run the forward once on copies of its tensors, and note what it asks of them."""
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors]

        def forward(note: Callable[[Asked], None]) -> None:
            self._note = note
            before = python_states()
            try:
                self(*copies)
            finally:
                put_python_states(before)

        try:
            with as_if_traced():
                self.answers = noted(forward)
        except ActsolveError:
            raise
        except Exception as error:
            name, model = type(error).__name__, type(self._hidden[0]).__name__
            raise ForwardError(
                f"the forward of {model} raises", why=f"{name}: {error}", try_="the model with these inputs"
            ) from error
        finally:
            self._note = None
            self.close()


def call_step(
    forward: Callable[..., Any], loss_fn: Callable[[Any], torch.Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what ``forward`` does, or ``(loss, output)`` where there is a loss function."""
    output = forward(*args, **kwargs)
    return output if loss_fn is None else (loss_fn(output), output)


@contextlib.contextmanager
def _loss_as_it_was(loss_fn: Any) -> Iterator[None]:
    """Put back what a loss that is a module changes in itself, and raise if it does: a planned step would not do it again."""
    if not isinstance(loss_fn, torch.nn.Module):
        yield
        return
    state = TracedState(loss_fn, frozenset())
    tensors = tuple(container[key] for container, key in state_places(loss_fn))
    with real_tensors():
        kept = [(t, t.detach().clone()) for t in tensors if not is_of_trace(t)]
    changed = []
    try:
        with state.replaced(tensors):
            yield
            changed += [*(write.attribute for write in state.writes()), *(setting.name for setting in state.settings)]
    finally:
        with real_tensors(), torch.no_grad():
            for tensor, content in kept:
                if not torch.equal(tensor, content) and not content.isnan().any():
                    changed.append("one of its tensors")
                    tensor.copy_(content)
    if changed:
        raise CaptureError(
            f"the loss changes {changed[0]}",
            why="a planned step runs no Python, so that the change would not be repeated",
            try_="a loss that is part of the model, which may change its buffers, or one outside of the step",
        )


def _refuse_odd_loss(loss_fn: Callable[[Any], torch.Tensor], loss: Any, output: Any) -> None:
    """Raise if a backward cannot start from ``loss``. Where not even ``output`` leads to a parameter, it is not to blame."""
    if not isinstance(loss, torch.Tensor):
        why = f"it returns a {type(loss).__name__}"
    elif loss.numel() != 1 or loss.is_complex():
        why = f"it returns a tensor of shape {tuple(loss.shape)}, {str(loss.dtype).removeprefix('torch.')}"
    elif not loss.requires_grad and any(isinstance(t, torch.Tensor) and t.requires_grad for t in take_apart(output)[0]):
        why = "it returns a tensor that requires no gradient, and the model's output does"
    else:
        return
    name, code = getattr(loss_fn, "__qualname__", type(loss_fn).__name__), getattr(loss_fn, "__code__", None)
    raise CaptureError(
        f"cannot train with the loss {name}",
        where=None if code is None else f"{short_path(code.co_filename)}:{code.co_firstlineno}",
        why=why,
        try_="a loss_fn that returns one real number as a tensor, computed from the model's output, such as its mean()",
    )
