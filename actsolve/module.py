"""The module that is handed back: the original, whose training step runs the planned graphs.

It is an instance of the original's class and shares its parameters, buffers and submodules, so that ``state_dict``,
optimizers, ``train``/``eval``, ``to`` and attribute access are the original's own. Only ``forward`` differs: where gradients
are wanted and the module is in training mode it runs the planned step for the signature of its inputs, planning once for each
new signature; anywhere else it runs the original forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actsolve.capture.captured import Captured
from actsolve.capture.joint import call_step
from actsolve.capture.torch_internals import compile_joint
from actsolve.errors import UsageError
from actsolve.lower import lower
from actsolve.planned import Planned
from actsolve.report.plan_text import plan_text
from actsolve.runtime.boxed import boxed_function
from actsolve.schedule import Schedule
from actsolve.training_step import TrainingStep

_RUNTIME = "_actsolve_runtime"


@dataclass
class CompiledStep:
    """A planned step that can be called.

    Attributes:
        function: Differentiable function of flat parameters, buffers and inputs.
        captured: What it was made from.
        planned: What `optimize` knows of the plan, for reports.
    """

    function: Callable[..., Any]
    captured: Captured
    planned: Planned

    def __call__(self, slots: list[tuple[dict[str, Any], str]], leaves: list[Any]) -> Any:
        state = [owner[name] for owner, name in slots]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return self.captured.joint.layout.restore(list(self.function(*state, *tensors)))


def compile_schedule(captured: Captured, schedule: Schedule) -> Callable[..., Any]:
    """Return a differentiable function of flat parameters, buffers and inputs that carries out ``schedule``."""

    def partition(_joint: Any, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        assert num_fwd_outputs == captured.n_forward_outputs
        return lower(captured, schedule)

    return compile_joint(captured.joint.export, partition, boxed_function)


@dataclass
class Runtime:
    """What an optimized module keeps besides the original's state.

    Attributes:
        original: The module as it was given.
        loss_fn: The loss that is part of the step, if any.
        plan_step: Plans and compiles for a training step of a new signature.
        on_new_inputs: ``"plan"``, ``"original"`` or ``"raise"`` where a signature is new.
        steps: Compiled steps by signature; None where planning failed and the original runs.
        first: The step that `optimize` was given.
    """

    original: torch.nn.Module
    loss_fn: Callable[[Any], torch.Tensor] | None
    plan_step: Callable[[TrainingStep], CompiledStep | None]
    on_new_inputs: str = "plan"
    steps: dict[Any, CompiledStep | None] = field(default_factory=dict)
    first: CompiledStep | None = None

    def __deepcopy__(self, _memo: Any) -> Runtime:
        """A copied module plans for itself: the graphs hold no state, but constants and devices of their own."""
        return Runtime(self.original, self.loss_fn, self.plan_step, self.on_new_inputs)

    def __reduce__(self) -> Any:
        raise UsageError(
            "an optimized module cannot be pickled",
            why="it holds compiled graphs",
            try_="save model.state_dict(), and model.plan.save(path) for the plan",
        )


def state_slots(module: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where each parameter and then each buffer lives, as ``(dict, name)``, each once, as the joint graph takes them.

    Looked up through these at each call, a parameter that was replaced is seen.
    """
    parameters: dict[int, tuple[dict[str, Any], str]] = {}
    buffers: dict[int, tuple[dict[str, Any], str]] = {}
    for child in submodules(module):
        for name, parameter in child._parameters.items():
            if parameter is not None:
                parameters.setdefault(id(parameter), (child._parameters, name))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                buffers.setdefault(id(buffer), (child._buffers, name))
    return [*parameters.values(), *buffers.values()]


def submodules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return ``module`` and all modules in it, each once, in the order of ``module.modules()``, which takes longer."""
    found: dict[int, torch.nn.Module] = {}
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if id(child) not in found:
            found[id(child)] = child
            waiting.extend(m for m in reversed(child._modules.values()) if m is not None)
    return list(found.values())


def signature(module: torch.nn.Module, slots: list[tuple[dict[str, Any], str]], leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Return a key that is equal for calls that one plan serves.

    It holds shapes, strides, dtypes, devices and aliasing of inputs, which parameters are trained and shared, constants, and the
    modes of every submodule and of torch.
    """
    first_seen: dict[int, int] = {}
    inputs = tuple(
        (*_tensor_key(leaf), first_seen.setdefault(id(leaf), i)) if isinstance(leaf, torch.Tensor) else _constant_key(leaf)
        for i, leaf in enumerate(leaves)
    )
    state = tuple((name, *_tensor_key(owner[name])) for owner, name in slots)
    modes = tuple(child.training for child in submodules(module))
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return inputs, str(spec), state, modes, autocast, torch.are_deterministic_algorithms_enabled()


def _tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


def _constant_key(constant: Any) -> Any:
    try:
        hash(constant)
    except TypeError:
        return type(constant), repr(constant)
    return type(constant), constant


def optimized_module(runtime: Runtime) -> torch.nn.Module:
    """Return a module that is the original in all but its training step."""
    original = runtime.original
    cls = type(original)
    optimized: torch.nn.Module = object.__new__(_subclass(cls))
    optimized.__dict__.update(original.__dict__)
    optimized.__dict__[_RUNTIME] = runtime
    return optimized


_SUBCLASSES: dict[type, type] = {}


def _subclass(cls: type) -> type:
    """Return the subclass of ``cls`` whose forward runs planned steps; same name, so that what prints it is not surprised."""
    if cls not in _SUBCLASSES:
        _SUBCLASSES[cls] = type(cls.__name__, (_OptimizedForward, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _SUBCLASSES[cls]


class _OptimizedForward(torch.nn.Module):
    """Mixed in before the original's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runtime: Runtime = self.__dict__[_RUNTIME]
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return call_step(super().forward, runtime.loss_fn, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        slots = state_slots(self)
        key = signature(self, slots, leaves, spec)
        if key not in runtime.steps:
            runtime.steps[key] = _plan_new(self, runtime, args, kwargs)
        step = runtime.steps[key]
        if step is None:
            return call_step(super().forward, runtime.loss_fn, args, kwargs)
        return step(slots, leaves)

    @property
    def plan(self) -> Any:
        """The plan for the inputs that `optimize` was given; None if the original runs instead."""
        first = self.__dict__[_RUNTIME].first
        return None if first is None else first.planned.plan_file

    @property
    def original(self) -> torch.nn.Module:
        """The module that was optimized. It shares all parameters and buffers."""
        module: torch.nn.Module = self.__dict__[_RUNTIME].original
        return module

    def report(self) -> str:
        """Return what was planned, as text."""
        first = self.__dict__[_RUNTIME].first
        return "not optimized: the original module runs" if first is None else plan_text(first.planned)


def _plan_new(module: torch.nn.Module, runtime: Runtime, args: Any, kwargs: Any) -> CompiledStep | None:
    """Plan for a new signature as the module's settings say."""
    if runtime.on_new_inputs == "raise":
        raise UsageError(
            "the module was not planned for these inputs",
            why="their shapes, dtypes, structure or the module's modes differ from those it was planned for",
            try_='on_new_inputs="plan" or "original"',
        )
    if runtime.on_new_inputs == "original":
        warnings.warn("actsolve: new input signature, the original forward runs and the budget is not held", stacklevel=3)
        return None
    compiled = runtime.plan_step(TrainingStep(_plain(module), args, kwargs, runtime.loss_fn))
    runtime.first = runtime.first or compiled
    return compiled


def _plain(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module of the original class with the same state and the root's present mode, to trace."""
    plain: torch.nn.Module = object.__new__(type(module).__mro__[2])
    plain.__dict__.update({k: v for k, v in module.__dict__.items() if k != _RUNTIME})
    return plain
