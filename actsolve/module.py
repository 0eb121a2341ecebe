"""The module that is handed back: the original, whose training step runs the planned graphs.

It is an instance of a subclass of the original's class, and the two share one ``__dict__``: parameters, buffers, submodules,
modes, hooks and attributes are the same, so that ``state_dict``, optimizers, ``train``/``eval`` and ``to`` are the
original's own. Only ``forward`` differs: where gradients are wanted and the module is in training mode it runs the planned
step for the signature of its inputs, planning once for each new signature; anywhere else it runs the original forward.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from actsolve.capture.eager_choice import left_besides, left_in_eager
from actsolve.capture.flat_step import call_step
from actsolve.capture.state import Place, Write, state_places
from actsolve.capture.structure import Structure, take_apart
from actsolve.capture.torch_internals import being_traced, in_function_transform
from actsolve.compiled import CompiledStep
from actsolve.errors import ActsolveError, CaptureError, ForwardError, UsageError
from actsolve.report.plan_text import plan_text
from actsolve.signature import signature
from actsolve.training_step import TrainingStep
from actsolve.ways import FEW_WAYS, MANY_WAYS, Ways, asking

_RUNTIME = "_actsolve_runtime"
_MANY_PLANS = 16
_PLANNING = threading.RLock()  # a trace hooks into all modules, also those that another thread calls
_OTHER_DATA = "Python depends on what their tensors hold, and takes another way than it was planned for"
_ANOTHER_WAY = "the forward's Python depends on data, and takes another way than the {} planned for"
_OTHER_SIGNATURE = "their shapes, dtypes, structure or the module's modes differ from those it was planned for"

PlanStep = Callable[[TrainingStep, frozenset[str] | None], CompiledStep | None]
"""Plans and compiles a training step; the second argument names the outputs that its backward starts from, if known."""


@dataclass
class Runtime:
    """What an optimized module is besides the original.

    Attributes:
        original: The module as it was given.
        loss_fn: The loss that is part of the step, if any.
        plan_step: Plans and compiles for a training step of a new signature.
        on_new_inputs: ``"plan"``, ``"original"`` or ``"raise"`` where a signature is new.
        on_error: ``"raise"`` or ``"original"`` where planning fails.
        steps: Compiled steps by signature.
        first: The step that `optimize` was given; None if the original runs.
        offsets: Whether it matters where in its storage an input begins: a graph reads past the views it was given.
        written_only: Attributes that the forward assigns and does not read.
        eager: Names of what is left in eager (`actsolve.eager_parts`).
    """

    original: torch.nn.Module
    loss_fn: Callable[[Any], torch.Tensor] | None
    plan_step: PlanStep
    on_new_inputs: str = "plan"
    on_error: str = "raise"
    steps: dict[Any, Ways] = field(default_factory=dict)
    first: CompiledStep | None = None
    offsets: bool = False
    written_only: frozenset[Write] = frozenset()
    eager: tuple[str, ...] = ()

    def plan_first(self, step: TrainingStep, plan: Callable[[], CompiledStep]) -> None:
        """Enter the step that the module is optimized for, from ``plan``."""
        with _PLANNING:
            self._enter(tuple(step.args), dict(step.kwargs), plan)

    def state(self, step: CompiledStep | None = None) -> list[Place]:
        """Return the places of the tensors that are state: of all steps, or of one."""
        return state_places(self.original, self.written_only if step is None else step.captured.joint.written_only)

    def ways_for(self, places: list[Place], args: Any, kwargs: Any) -> tuple[Ways, list[Any]]:
        """Return the steps for these inputs, planned now if they are new, and their leaves; none if the original is to run."""
        leaves, structure = take_apart((args, kwargs))
        key = self._or_none(lambda: self._key(places, leaves, structure))
        ways = self.steps[key] if key in self.steps else self._enter(args, kwargs, lambda: self._plan_new(args, kwargs))
        if ways.steps and self.on_new_inputs == "plan" and (tangents := ways.steps[0].outgrown) is not None:
            again = self._or_none(lambda: self.plan_step(self._step(args, kwargs), tangents))
            ways.steps[:1] = [] if again is None else [again]
        return ways, leaves

    def another_way(self, args: Any, kwargs: Any) -> CompiledStep | None:
        """Return a step for inputs whose answers no step was traced for; None if the original is to run."""
        with _PLANNING:
            return self._another_way(args, kwargs)

    def _another_way(self, args: Any, kwargs: Any) -> CompiledStep | None:
        ways, _ = self.ways_for(self.state(), args, kwargs)
        asked = asking(ways.steps)
        many = MANY_WAYS if not any(asked.values()) else FEW_WAYS
        if len(ways.steps) >= many and not ways.ended:
            past = self._past_what_asks(ways, args, kwargs, asked)
            if past is not None:
                ways.steps[:] = [past]
                return past
        if len(ways.steps) >= MANY_WAYS:
            _warn(f"actsolve: {_ANOTHER_WAY.format(MANY_WAYS)}: here the original runs, and the budget is not held")
            return None
        step: CompiledStep | None = self._or_none(lambda: self._plan_new(args, kwargs, _OTHER_DATA))
        if step is not None:
            ways.steps.insert(0, step)
        return step

    def _past_what_asks(self, ways: Ways, args: Any, kwargs: Any, asked: Iterable[str]) -> CompiledStep | None:
        """Return a step that leaves in eager the modules where ways part; None if there is none, and never will be."""
        eager = left_besides(self.original, self.eager, asked) if self.on_new_inputs == "plan" else None
        step: CompiledStep | None = None
        told = ""
        while eager is not None and step is None:
            try:
                step = self.plan_step(replace(self._step(args, kwargs), eager=eager), None)
            except ForwardError:
                raise
            except CaptureError as refused:  # what is around it may do
                told, eager = told or str(refused), left_in_eager(self.original, eager, None)
            except ActsolveError as refused:
                told, eager = told or str(refused), None
        if step is None and told:
            _warn(f"actsolve: {', '.join(asked)} cannot be left in eager.\n{told}")
        if step is None:
            ways.ended = True
            return None
        self.eager = step.eager
        told = _ANOTHER_WAY.format(len(ways.steps))
        _warn(f"actsolve: {told}: from here on {', '.join(self.eager)} run as they are, and the rest is planned")
        return step

    def _key(self, places: list[Place], leaves: list[Any], structure: Structure) -> Any:
        return signature(self.original, places, leaves, structure, self.loss_fn, offsets=self.offsets)

    def _enter(self, args: Any, kwargs: Any, plan: Callable[[], CompiledStep | None]) -> Ways:
        step: CompiledStep | None = self._or_none(plan)
        self.first = self.first or step
        if step is not None:
            self.offsets = self.offsets or step.captured.joint.reads_by_offset
            self.written_only |= step.captured.joint.written_only
            self.eager = step.eager
        leaves, structure = take_apart((args, kwargs))
        ways = Ways([] if step is None else [step])
        self.steps[self._or_none(lambda: self._key(self.state(), leaves, structure))] = ways
        if len(self.steps) == _MANY_PLANS:
            _warn(
                f"actsolve: {len(self.steps)} plans for as many kinds of inputs; each new one takes seconds and memory. "
                "Does an input, an attribute or what loss_fn refers to change at each call?",
            )
        return ways

    def _or_none(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` does, or None, after a warning, where it fails and the original is to run instead."""
        try:
            return make()
        except ActsolveError as error:
            if self.on_error == "raise" or isinstance(error, ForwardError):
                raise
            _warn(f"actsolve: the original module runs, unplanned.\n{error}")
            return None

    def _plan_new(self, args: Any, kwargs: Any, why: str = _OTHER_SIGNATURE) -> CompiledStep | None:
        """Plan for new inputs as the settings say."""
        if not self.steps:
            return self.plan_step(self._step(args, kwargs), None)
        if self.on_new_inputs == "raise":
            raise UsageError(
                "the module was not planned for these inputs",
                why=why,
                try_='on_new_inputs="plan" or "original"',
            )
        if self.on_new_inputs == "original":
            _warn("actsolve: new inputs, the original forward runs and the budget is not held")
            return None
        return self.plan_step(self._step(args, kwargs), None)

    def _step(self, args: Any, kwargs: Any) -> TrainingStep:
        return TrainingStep(self.original, args, kwargs, self.loss_fn, self.eager)


def _warn(message: str) -> None:
    """Warn of what happens at the user's line: the innermost frame that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def optimized_module(runtime: Runtime) -> torch.nn.Module:
    """Return a module that is the original in all but its training step.

    Raises:
        UsageError: the original's forward cannot be replaced.
    """
    original = runtime.original
    cls = type(original)
    if "forward" in original.__dict__ or isinstance(original, torch.jit.ScriptModule):
        raise UsageError(
            f"the forward of this {cls.__name__} cannot be replaced",
            why="it is scripted" if isinstance(original, torch.jit.ScriptModule) else "it was set on the instance",
            try_="optimize the module before it is wrapped or scripted",
        )
    extras = {name: extra for name, extra in _EXTRAS.items() if not hasattr(original, name)}  # the model's own names come first
    optimized: torch.nn.Module = object.__new__(
        type(
            cls.__name__,
            (_Optimized, cls),
            {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
                "forward": _forward_of(cls),
                _RUNTIME: runtime,
                **extras,
            },
        )
    )
    object.__setattr__(optimized, "__dict__", original.__dict__)
    return optimized


def runtime_of(module: torch.nn.Module) -> Runtime | None:
    """Return what `optimize` knows of ``module``; None if it did not make it."""
    return getattr(type(module), _RUNTIME, None)


def _forward_of(cls: type) -> Callable[..., Any]:
    """Return the forward of the subclass of ``cls``, with the signature of the original's."""
    forward: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def planned(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        runtime: Runtime = getattr(type(self), _RUNTIME)
        if _RUNTIME not in type(self).__dict__:
            raise UsageError(
                f"this module is a {type(self).__name__} now, and was optimized as a {type(runtime.original).__name__}",
                why="it was given another class, as parametrizations do",
                try_="parametrize it before it is optimized",
            )
        run_original = functools.partial(call_step, functools.partial(forward, self), runtime.loss_fn, args, kwargs)
        seen_by_another = torch.compiler.is_compiling() or in_function_transform() or being_traced()
        if not (self.training and torch.is_grad_enabled()) or seen_by_another:
            return run_original()
        places = runtime.state()
        if not _wants_gradient(places, args, kwargs):
            return run_original()

        def call(step: CompiledStep) -> Any:
            return step(self, runtime.state(step) if runtime.written_only else places, leaves)

        try:
            with _PLANNING:
                ways, leaves = runtime.ways_for(places, args, kwargs)
            return ways.run(call, lambda: runtime.another_way(args, kwargs), run_original)
        except ForwardError:
            return run_original()  # it raises what it raises, with all that it does before

    return planned


def _wants_gradient(places: list[Place], args: Any, kwargs: Any) -> bool:
    if any(container[key].requires_grad for container, key in places):
        return True
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in take_apart((args, kwargs))[0])


class _Optimized(torch.nn.Module):
    """Mixed in before the original's class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy has parameters of its own, and plans for itself: a graph holds constants and devices."""
        runtime: Runtime = getattr(type(self), _RUNTIME)
        copied = copy.deepcopy(runtime.original, memo)
        settings = (runtime.plan_step, runtime.on_new_inputs, runtime.on_error)
        return optimized_module(Runtime(copied, runtime.loss_fn, *settings, eager=runtime.eager))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an optimized module cannot be pickled",
            why="it holds compiled graphs",
            try_="save model.state_dict(), and model.plan.save(path) for the plan; or pickle model.original",
        )


class _Extra:
    """An attribute that the original's class does not have; an attribute of that name in the instance wins."""

    def __init__(self, get: Callable[[torch.nn.Module, Runtime], Any], doc: str) -> None:
        self._get = get
        self.__doc__ = doc

    def __get__(self, module: torch.nn.Module | None, cls: type) -> Any:
        return self if module is None else self._get(module, getattr(cls, _RUNTIME))


def _plan(_: torch.nn.Module, runtime: Runtime) -> Any:
    return None if runtime.first is None else runtime.first.planned.plan_file


def _original(_: torch.nn.Module, runtime: Runtime) -> torch.nn.Module:
    return runtime.original


def _report(_: torch.nn.Module, runtime: Runtime) -> Callable[[], str]:
    first = runtime.first
    unplanned = (
        "not optimized: the original module runs" if runtime.steps else "not planned yet: that is done at the first training call"
    )
    return lambda: unplanned if first is None else plan_text(first.planned)


_EXTRAS = {
    "plan": _Extra(_plan, "The plan for the first inputs; None if there were none yet, or the original runs instead."),
    "original": _Extra(_original, "The module that was optimized. It shares all that it has with the optimized one."),
    "report": _Extra(_report, "Return what was planned, as text."),
}
