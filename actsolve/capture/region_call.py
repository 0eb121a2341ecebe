"""One call of a region that is left in eager: what runs at each step, and what is learned of it before.

Its forward saves nothing but its inputs; its backward runs the forward once more, with the same random state, and differentiates
that, as `torch.utils.checkpoint` does. What it takes is measured on the inputs that the step is planned for, and may be more with
other data.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actsolve.capture.flops import overload_flops
from actsolve.capture.generators import own_generators
from actsolve.capture.randomness import put_python_states, python_states
from actsolve.capture.state import TracedState
from actsolve.capture.structure import Made, Structure, refuse_hidden_data, take_apart
from actsolve.capture.torch_internals import n_mutations, storage_key
from actsolve.errors import CaptureError
from actsolve.runtime.memory_events import measure_peak

_TOKEN_BYTES = 1 << 14
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Taken:
    """What one run of a region takes.

    Attributes:
        seconds: Of a run.
        peak_bytes: The most that it has allocated at once, its results included.
        flops: Of all kernels that are known, as those of other ops (`actsolve.capture.flops`).
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    flops: int = 0


@dataclass(eq=False)
class RegionCall:
    """One call of a region in the forward.

    Attributes:
        path: Of the module.
        module: What is called.
        function: Its forward.
        structure: Of its inputs.
        inputs: Its inputs: where a tensor is among the flat ones, or a constant.
        n_state: How many of the flat tensors are the module's own; they come first.
        needed: Which of the flat tensors require a gradient.
        autocast: Kind of device, whether it is on, and the dtype.
        keeps_casts: Whether autocast casts a weight once for all its uses.
        differentiable: Which outputs require a gradient.
        output: The structure of what it returns, and its leaves that are no tensors, by position.
        strides: Of the gradients that its backward returns, by the position of the tensor.
        forward: What its forward takes.
        backward: What its backward takes.
        key: Stands for it in the graph.
    """

    path: str
    module: torch.nn.Module
    function: Callable[..., Any]
    structure: Structure
    inputs: tuple[int | _Constant, ...]
    n_state: int
    needed: tuple[bool, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    keeps_casts: bool
    differentiable: tuple[bool, ...] = ()
    output: tuple[Structure, dict[int, Any]] | None = None
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    forward: Taken = Taken()
    backward: Taken = Taken()
    key: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        CALLS[self.key] = self

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return its outputs, and a token: the states that the generators had."""
        token = _token()
        # Casts that autocast keeps would stay until the caller's region ends; only gradients depend on that.
        with _nothing_saved(), self._placed(tensors, keeps_casts=False) as leaves:
            outputs = self._outputs(leaves)
            return [*_own(outputs, tensors), token]

    def differentiate(
        self, tensors: Sequence[torch.Tensor], token: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Return the gradients of the tensors that need one; `is_undefined` is true of those that autograd does not define."""
        with _generators_at(token), self._placed(tensors, keeps_casts=self.keeps_casts) as leaves:
            outputs = self._outputs(leaves)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found: Any = [None] * len(wanted)
            if pairs and wanted:
                found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        positions = [i for i, need in enumerate(self.needed) if need]
        laid_out = [self._laid_out(p, tensors[p], g) for p, g in zip(positions, found, strict=True)]
        return _own(laid_out, [*tensors, *(g for g in gradients if g is not None)])

    def _laid_out(self, position: int, tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        strides = self.strides.get(position, None if gradient is None else gradient.stride()) or tensor.stride()
        if gradient is not None and gradient.stride() == strides:
            return gradient
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        if gradient is not None:
            return made.copy_(gradient)
        made._actsolve_undefined = True  # type: ignore[attr-defined]
        return made.zero_()

    @contextlib.contextmanager
    def _placed(self, tensors: Sequence[torch.Tensor], *, keeps_casts: bool) -> Iterator[list[torch.Tensor]]:
        """Yield leaves that stand for ``tensors``, those of the module in their places, in the modes of the call."""
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, self.needed, strict=True)]
        versions = list(map(n_mutations, leaves))
        state = TracedState(self.module, frozenset())
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=keeps_casts))
            stack.enter_context(state.replaced(tuple(leaves[: self.n_state])))
            yield leaves
            changed = [w.attribute for w in state.writes()] + [s.name for s in state.settings]
        if changed or versions != list(map(n_mutations, leaves)):
            raise self._changes(changed[0] if changed else "one of its tensors in place")

    def _changes(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.path}, which is left in eager, changes {what}",
            why="its backward runs it again, which would change it twice",
            try_=_ANOTHER,
        )

    def _outputs(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        inputs = [i.value if isinstance(i, _Constant) else leaves[i] for i in self.inputs]
        args, kwargs = self.structure.restore(inputs)
        found, structure = take_apart(self.function(*args, **kwargs), Made(inputs))
        constants = {i: leaf for i, leaf in enumerate(found) if not isinstance(leaf, torch.Tensor)}
        if self.output is None:
            self.output = structure, constants
        elif structure.key != self.output[0].key or repr(constants) != repr(self.output[1]):
            raise CaptureError(
                f"{self.path}, which is left in eager, returns something else than when it was planned for",
                why=f"{constants} in place of {self.output[1]}" if constants else "its structure depends on data",
                try_=_ANOTHER,
            )
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def restored(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the module returns, with ``tensors`` for its tensors."""
        assert self.output is not None
        structure, constants = self.output
        rest = iter(tensors)
        return structure.restore([constants[i] if i in constants else next(rest) for i in range(structure.n_leaves)])

    def learn(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it on real tensors, forward and backward, and note what it returns and takes. Return what `run` does."""
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):  # around it nothing is saved
            return self._learn(tensors)

    def _learn(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._placed(tensors, keeps_casts=False) as leaves, _generators_at(_token()):
            inputs = [leaf.clone() for leaf in leaves[self.n_state :]]  # no leaves: autograd lets nobody write to these
            outputs = self._outputs([*leaves[: self.n_state], *inputs])
            if any(map(n_mutations, inputs)):
                raise self._changes("one of its inputs in place")
            self.differentiable = tuple(o.requires_grad for o in outputs)
            self._refuse_hidden(outputs, leaves)
            del outputs, leaves, inputs
        results = self.run(tensors)
        *outputs, token = results
        ones = [torch.ones_like(o) if d else None for o, d in zip(outputs, self.differentiable, strict=True)]

        def forward() -> list[torch.Tensor]:
            with _generators_at(token):
                return self.run(tensors)

        def backward() -> list[torch.Tensor]:
            return self.differentiate(tensors, token, ones)

        forward_s, again = _timed(forward, outputs[0].device)
        if any(not _same_bits(a, b) for a, b in zip(outputs, again[:-1], strict=True)):
            raise CaptureError(
                f"{self.path}, which is left in eager, returns something else when it runs a second time",
                why="its backward runs it again; does it count its calls, or draw from a generator of its own?",
                try_='on_error="original" to train the model as it is',
            )
        del again
        positions = [i for i, need in enumerate(self.needed) if need]
        self.strides = {p: g.stride() for p, g in zip(positions, backward(), strict=True)}
        backward_s, _ = _timed(backward, outputs[0].device)
        self.forward = _taken(forward, outputs[0].device, forward_s)
        self.backward = _taken(backward, outputs[0].device, backward_s)
        return results

    def _refuse_hidden(self, outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        """Raise if a tensor is trained that neither is the module's nor comes in: its gradient would be lost."""
        known = {id(leaf) for leaf in leaves}
        seen, pending = set(), [o.grad_fn for o in outputs if o.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise CaptureError(
                    f"{self.path}, which is left in eager, uses a tensor of shape {tuple(variable.shape)} that is not its own",
                    why="it requires a gradient, which would be lost",
                    try_="a module around it that holds this tensor, to be left in eager",
                )
            pending += [parent for parent, _ in node.next_functions if parent is not None]


@dataclass(frozen=True)
class _Constant:
    """An input that is no tensor."""

    value: Any


CALLS: weakref.WeakValueDictionary[int, RegionCall] = weakref.WeakValueDictionary()
"""By what stands for them in a graph."""

_ANOTHER = 'a module around it, or one inside of it, to be left in eager; or on_error="original"'


def region_call(
    path: str, module: torch.nn.Module, function: Callable[..., Any], state: Sequence[torch.Tensor], args: Any, kwargs: Any
) -> tuple[RegionCall, list[torch.Tensor]]:
    """Return a call of ``function``, the forward of ``module``, and its flat tensors: ``state``, then those among its inputs."""
    leaves, structure = take_apart((args, kwargs))
    tensors = list(state)
    where = {id(t): i for i, t in enumerate(tensors)}  # one tensor given twice is one
    inputs: list[int | _Constant] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            refuse_hidden_data(leaf, f"an input of {path}")
            inputs.append(_Constant(leaf))
            continue
        if id(leaf) not in where:
            where[id(leaf)] = len(tensors)
            tensors.append(leaf)
        inputs.append(where[id(leaf)])
    kinds = dict.fromkeys(["cpu", *(t.device.type for t in tensors)])
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    needed = tuple(t.requires_grad for t in tensors)
    keeps = torch.is_autocast_cache_enabled()
    return RegionCall(path, module, function, structure, tuple(inputs), len(state), needed, autocast, keeps), tensors


def is_undefined(gradient: Any) -> bool:
    """Whether autograd has None in place of this gradient, which is zero: what it is of had no part in the loss."""
    return getattr(gradient, "_actsolve_undefined", False)


def _own(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors``, none of which is in memory of another or of one of ``others``."""
    taken = set(map(storage_key, others))
    own = []
    for tensor in tensors:
        plain = tensor.detach() if tensor.requires_grad else tensor
        if storage_key(plain) in taken:
            plain = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device).copy_(plain)
        taken.add(storage_key(plain))
        own.append(plain)
    return own


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _taken(run: Callable[[], Any], device: torch.device, seconds: float) -> Taken:
    """Return what ``run`` takes, whose time is known: memory and FLOPs of one more run."""
    counter = _Counter()  # type: ignore[no-untyped-call]
    with counter:
        measured = measure_peak(run, device)
    return Taken(seconds, measured.peak_bytes, counter.flops)


def _timed(run: Callable[[], list[torch.Tensor]], device: torch.device) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds that ``run`` takes, which ran before, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of what runs. Torch's own counter hooks into autograd, which takes no leaf of ``torch.autograd.grad``."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += overload_flops(func, args, kwargs or {}, result) or 0
        return result


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def _nothing_saved() -> Iterator[None]:
    def refuse(_: None) -> torch.Tensor:
        raise CaptureError(
            "a forward that is left in eager takes gradients",
            why="it keeps nothing that a backward needs",
            try_=_ANOTHER,
        )

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        yield


# -- states of generators ------------------------------------------------------------------------------------------------------


def _token() -> torch.Tensor:
    """Return the states of torch's, Python's and NumPy's generators as bytes."""
    states = [g.get_state().numpy().tobytes() for g in own_generators()], python_states()
    content = pickle.dumps(states)
    token = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
    token[:_LENGTH_BYTES] = torch.frombuffer(bytearray(len(content).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8)
    token[_LENGTH_BYTES : _LENGTH_BYTES + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return token


def _set(token: torch.Tensor) -> None:
    """Set the generators to the states in ``token``."""
    content = token.numpy().tobytes()
    size = int.from_bytes(content[:_LENGTH_BYTES], "little")
    states, python = pickle.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + size])
    for generator, state in zip(own_generators(), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    put_python_states(python)


@contextlib.contextmanager
def _generators_at(token: torch.Tensor) -> Iterator[None]:
    """Within this context the generators go on from the states in ``token``, and afterwards from where they were."""
    before = _token()
    _set(token)
    try:
        yield
    finally:
        _set(before)
