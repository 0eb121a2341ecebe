"""One call of a region that is left in eager: what runs at each step.

Its forward saves nothing but its inputs; its backward runs the forward once more, with the same random state, and differentiates
that, as `torch.utils.checkpoint` does. What is known of it from the run before its trace is `Learned`
(`actsolve.capture.region_learning`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actsolve.capture.hooks import nothing_saved
from actsolve.capture.region_results import Called, Constant, Learned, Returned, own_memory, refuse_hidden, uses_hidden
from actsolve.capture.region_token import generators_at, settings_in, token_of
from actsolve.capture.settings import closed_over, settings_key, value_key
from actsolve.capture.state import caches_put_back, every_place, state_places, submodules
from actsolve.capture.structure import Made, Structure, are_changed, refuse_hidden_data, take_apart, tensors_in
from actsolve.capture.torch_internals import NotGiven, n_mutations, storage_key
from actsolve.eager_parts import Part
from actsolve.errors import CaptureError, UsageError

_KEYS = itertools.count()

IN_TURN = threading.RLock()
"""Held while a region runs: other tensors are in the places of its module's."""


@dataclass(eq=False)
class RegionCall:
    """One call of a region in the forward.

    Attributes:
        path: The name of the part.
        module: Whose tensors and attributes it may use.
        function: What is called.
        structure: Of its inputs.
        inputs: Its inputs: where a tensor is among the flat ones, or a constant.
        given: Which of the module's tensors it is given, by their places; they come first among the flat tensors.
        n_places: How many there are.
        is_module: Whether it is the module that is called.
        is_outside: Whether the module is no part of the model: what is not trained is left where it is.
        needed: Which of the flat tensors require a gradient.
        leaf: Which of them are leaves of autograd's graph: weights, and inputs of the model.
        autocast: Kind of device, whether it is on, and the dtype.
        keeps_casts: Whether autocast casts a weight once for all its uses.
        with_grad: Whether it is called where gradients are wanted.
        learned: What is known of it.
        changed: Which of the flat tensors it writes to: it is given copies of these, and nobody reads them after it.
        modes: Whether each of its modules is in training mode.
        key: Stands for it in the graph.
    """

    path: str
    module: torch.nn.Module
    function: Callable[..., Any]
    structure: Structure
    inputs: tuple[int | Constant, ...]
    given: tuple[int, ...]
    n_places: int
    is_module: bool
    is_outside: bool
    needed: tuple[bool, ...]
    leaf: tuple[bool, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    keeps_casts: bool
    with_grad: bool
    learned: Learned | None = None
    changed: frozenset[int] = frozenset()
    modes: tuple[tuple[torch.nn.Module, bool], ...] = ()
    key: int = field(default_factory=lambda: next(_KEYS))
    _used_another: bool = False

    def __post_init__(self) -> None:
        CALLS[self.key] = self
        self.modes = tuple((child, child.training) for child in submodules(self.module))

    @property
    def n_state(self) -> int:
        """How many of the flat tensors are the module's own."""
        return len(self.given)

    @property
    def positions(self) -> list[int]:
        """Which of the flat tensors get a gradient."""
        return [i for i, need in enumerate(self.needed) if need]

    @property
    def known(self) -> Learned:
        """What was learned of it, which is done before it is traced."""
        assert self.learned is not None
        return self.learned

    def run(self, tensors: Sequence[torch.Tensor]) -> Returned:
        """Run its forward. Where it uses a tensor that it is not given, its answer is of a call that is given that too."""
        with IN_TURN:
            settings = self._settings()
            token = token_of(hash(settings))
            try:
                return self._run(tensors, token, settings)
            except CaptureError:
                if not self._used_another or self.is_outside:
                    raise
            call, everything = self._given_all(tensors)
            with generators_at(token):
                used = call.used(everything)
                GIVEN.setdefault(self.module, {})[self.path] = tuple(sorted({*self.given, *used}))
                return call._run(everything, token, settings)

    def _run(self, tensors: Sequence[torch.Tensor], token: torch.Tensor, settings: tuple[int, ...]) -> Returned:
        # Casts that autocast keeps would stay until the caller's region ends; only gradients depend on that.
        with nothing_saved(_takes_gradients), self.placed(tensors, settings) as leaves, self.as_called(keeps_casts=False):
            found = self.call(leaves)
            outputs = own_memory([t for t in found.leaves if isinstance(t, torch.Tensor)], tensors)
            return Returned([*outputs, token], (*found.answer, GIVEN.get(self.module, {}).get(self.path, ())))

    def used(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the places of the module's tensors, of which it is given all, that it computes with."""
        with self.placed(tensors) as leaves, self.as_called(keeps_casts=False), Reads() as reads:
            self.call(leaves, keep=torch.clone)
            return tuple(i for i, leaf in enumerate(leaves[: self.n_state]) if storage_key(leaf) in reads.storages)

    def _given_all(self, tensors: Sequence[torch.Tensor]) -> tuple[RegionCall, list[torch.Tensor]]:
        """Return the same call with all of the module's tensors, and its flat tensors."""
        everything = [container[key] for container, key in state_places(self.module)]
        for place, tensor in zip(self.given, tensors, strict=False):
            everything[place] = tensor
        moved = [*self.given, *range(len(everything), len(everything) + len(tensors) - self.n_state)]
        needed = [t.requires_grad and self.with_grad for t in everything]
        call = replace(
            self,
            given=tuple(range(len(everything))),
            inputs=tuple(i if isinstance(i, Constant) else moved[i] for i in self.inputs),
            needed=(*needed, *self.needed[self.n_state :]),
            leaf=(*(True for _ in everything), *self.leaf[self.n_state :]),
            changed=frozenset(moved[i] for i in self.changed),
            learned=None,
            key=next(_KEYS),
        )
        return call, [*everything, *tensors[self.n_state :]]

    def differentiate(
        self, tensors: Sequence[torch.Tensor], token: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Return the gradients of the tensors that need one: zeros where autograd has None, and `UNDEFINED` says so."""
        with self._in_its_modes(), IN_TURN:
            settings = self._settings()
            if settings_in(token) != hash(settings):
                raise UsageError(
                    f"{self.path}, which is left in eager, was changed between its forward and its backward",
                    why="its backward runs the forward again, and would take another way",
                    try_="the change before the forward, or after the backward",
                )
            return self._differentiate(tensors, token, gradients, settings)

    def _differentiate(
        self,
        tensors: Sequence[torch.Tensor],
        token: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
        settings: tuple[int, ...],
    ) -> list[torch.Tensor]:
        with self.placed(tensors, settings) as leaves:
            with generators_at(token), self.as_called(keeps_casts=self.keeps_casts):
                found = self.call(leaves)
                outputs = [t for t in found.leaves if isinstance(t, torch.Tensor)]
            _, others = found.uses(leaves)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            given: Any = [None] * len(wanted)
            if pairs and wanted:
                given = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
            del found, outputs, pairs
        refuse_hidden(self.path, others)
        UNDEFINED.found[self.key] = frozenset(p for p, g in zip(self.positions, given, strict=True) if g is None)
        laid_out = [self._laid_out(p, tensors[p], g) for p, g in zip(self.positions, given, strict=True)]
        return own_memory(laid_out, [*tensors, *(g for g in gradients if g is not None)])

    def _laid_out(self, position: int, tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        strides = self.learned.strides[position] if self.learned else tensor.stride() if gradient is None else gradient.stride()
        if gradient is not None and gradient.stride() == strides:
            return gradient
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return made.zero_() if gradient is None else made.copy_(gradient)

    @contextlib.contextmanager
    def placed(self, tensors: Sequence[torch.Tensor], settings: tuple[int, ...] | None = None) -> Iterator[list[torch.Tensor]]:
        """Yield leaves that stand for ``tensors``, those of the module in their places.

        Args:
            tensors: The flat ones.
            settings: Keys of the attributes as they are, if they are known.

        Raises:
            CaptureError: what runs within this context changes the module or its tensors.
        """
        with IN_TURN:
            there = [container[key] for container, key in state_places(self.module)]
            if len(there) != self.n_places:
                raise self.changes("which tensors it has, between two steps")
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, self.needed, strict=True)]
            leaves[: self.n_state] = map(_like, leaves, (there[i] for i in self.given))
            stand_in = {id(old): self._not_given(old) for i, old in enumerate(there) if i not in self.given}
            stand_in |= {id(there[i]): leaf for i, leaf in zip(self.given, leaves, strict=False)}
            places = [(container, key, container[key]) for container, key in every_place(self.module)]
            watched = [*leaves, *stand_in.values()]
            versions, settings = list(map(n_mutations, watched)), settings or self._settings()
            for container, key, old in places:
                container[key] = stand_in[id(old)]
            self._used_another = False
            try:
                with caches_put_back(self.module):
                    yield leaves
                now = [container[key] for container, key in every_place(self.module)]
            finally:
                for container, key, old in places:
                    container[key] = old
            if self._used_another:
                raise self.changes("its way where it may not use a tensor")
            if [id(tensor) for tensor in now] != [id(stand_in[id(old)]) for _, _, old in places]:
                raise self.changes("its tensors")
            if versions != list(map(n_mutations, watched)):
                raise self.changes("one of its tensors in place")
            self._refuse_changed_settings(settings)

    def _not_given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is in the place of a tensor of the module's that it is not given."""
        if self.is_outside and not tensor.requires_grad:
            return tensor
        return NotGiven(tensor, self._uses_another)

    def _uses_another(self, shape: tuple[int, ...]) -> CaptureError:
        self._used_another = True
        if self.is_outside:
            return uses_hidden(self.path, shape, "a weight that a model holds, for that is what a planned step trains")
        return CaptureError(
            f"{self.path}, which is left in eager, uses a tensor of shape {shape} that it did not use when it was planned for",
            why="it is given those that it used, and this one's gradient would be lost",
            try_="the module around it, all of whose tensors it is given, to be left in eager",
        )

    def _refuse_changed_settings(self, before: tuple[int, ...]) -> None:
        owner = self.path if self.is_module else self.path.rpartition(".")[0]
        names = [".".join(filter(None, (owner, path))) or "the model" for path, _ in self.module.named_modules()]
        for name, old, new in zip([*names, self.path], before, self._settings(), strict=True):
            if old != new:
                raise self.changes(f"an attribute of {name}")

    @contextlib.contextmanager
    def as_called(self, *, keeps_casts: bool) -> Iterator[None]:
        """Within this context torch's modes are those of the call."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.with_grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=keeps_casts))
            yield

    def call(self, leaves: Sequence[torch.Tensor], *, keep: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Called:
        """Call the module; ``keep`` makes its inputs from leaves, which they are not in eager."""
        keep = keep or _no_leaf
        flat = [t if leaf else keep(t) for t, leaf in zip(leaves, self.leaf, strict=True)]
        flat = [t.clone() if i in self.changed else t for i, t in enumerate(flat)]
        entries = [t.grad_fn for t in flat]
        inputs = [i.value if isinstance(i, Constant) else flat[i] for i in self.inputs]
        args, kwargs = self.structure.restore(inputs)
        found, structure = take_apart(self.function(*args, **kwargs), Made(inputs))
        if are_changed(inputs, self.structure, (args, kwargs)):  # nobody would see it
            raise self.changes("a list, dict or object that it is given")
        return Called(found, structure, flat, entries, self.changed)

    @contextlib.contextmanager
    def _in_its_modes(self) -> Iterator[None]:
        """Within this context its modules are in training mode or not, as they were when it was called."""
        before = [(child, child.training) for child, _ in self.modes]
        try:
            for child, mode in self.modes:
                child.training = mode
            yield
        finally:
            for child, mode in before:
                child.training = mode

    def _settings(self) -> tuple[int, ...]:
        """Return keys of the attributes of its modules, and of what else it refers to, with how often tensors of that changed."""
        of_module = isinstance(getattr(self.function, "__self__", None), torch.nn.Module)
        others = [] if of_module else closed_over(self.function)
        tensors = [t for t in others if isinstance(t, torch.Tensor)]
        tensors += [container[key] for container, key in state_places(self.module)] if self.is_outside else []
        referred = (*map(value_key, others), *((id(t), n_mutations(t)) for t in tensors if not t.requires_grad))
        return (*(hash(settings_key(child)) for child in submodules(self.module)), hash(referred))

    def token(self) -> torch.Tensor:
        """Return what a second run goes on from: its settings, and the states of the generators."""
        return token_of(hash(self._settings()))

    def changes(self, what: str, try_: str | None = None) -> CaptureError:
        """The error that it does what a second run would do again."""
        return CaptureError(
            f"{self.path}, which is left in eager, changes {what}",
            why="its backward runs it again, which would change it twice",
            try_=try_ or ANOTHER_REGION,
        )


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages of what is computed with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages.update(map(storage_key, tensors_in((args, kwargs))))
        return func(*args, **(kwargs or {}))


class _Undefined(threading.local):
    """Which gradients of the regions that ran backward last in this thread autograd has None for: by key, their positions."""

    def __init__(self) -> None:
        self.found: dict[int, frozenset[int]] = {}


UNDEFINED = _Undefined()

GIVEN: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""By module and part: which of its tensors are given from now on, since one was used that was not."""

CALLS: weakref.WeakValueDictionary[int, RegionCall] = weakref.WeakValueDictionary()
"""By what stands for them in a graph."""

ANOTHER_REGION = 'a module around it, or one inside of it, to be left in eager; or on_error="original"'


def region_call(
    part: Part, module: torch.nn.Module, function: Callable[..., Any], given: Sequence[int] | None, args: Any, kwargs: Any
) -> tuple[RegionCall, list[torch.Tensor]]:
    """Return a call of ``function``, and its flat tensors: those of the module that are given, then those among its inputs.

    Args:
        part: What is called.
        module: Whose tensors and attributes it may use.
        function: That of the module.
        given: Which of the module's tensors it is given, by their places; None for all.
        args: Of the call.
        kwargs: Of the call.
    """
    places = state_places(module)
    given = tuple(range(len(places)) if given is None else given)
    state = [places[i][0][places[i][1]] for i in given]
    leaves, structure = take_apart((args, kwargs))
    tensors = list(state)
    where = {id(t): i for i, t in enumerate(tensors)}  # one tensor given twice is one
    inputs: list[int | Constant] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            refuse_hidden_data(leaf, f"an input of {part.path}")
            inputs.append(Constant(leaf))
            continue
        if id(leaf) not in where:
            where[id(leaf)] = len(tensors)
            tensors.append(leaf)
        inputs.append(where[id(leaf)])
    kinds = dict.fromkeys(["cpu", *(t.device.type for t in tensors)])
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    needed = tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors)
    leaf = tuple(i < len(state) or (t.requires_grad and t.is_leaf) for i, t in enumerate(tensors))
    modes = (autocast, torch.is_autocast_cache_enabled(), torch.is_grad_enabled())
    where_from = (part.path, module, function, structure, tuple(inputs), given, len(places), part.is_module, part.is_outside)
    return RegionCall(*where_from, needed, leaf, *modes), tensors


def _like(leaf: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return ``leaf`` as a parameter, with all its attributes, if it stands for one."""
    if not isinstance(there, torch.nn.Parameter):
        return leaf
    parameter = torch.nn.Parameter(leaf.detach(), requires_grad=leaf.requires_grad)
    parameter.__dict__.update(there.__dict__)
    return parameter


def _no_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """Return what is no leaf, as an activation is none: autocast keeps no cast of it."""
    return leaf.view_as(leaf) if leaf.requires_grad else leaf


def _takes_gradients() -> CaptureError:
    return CaptureError(
        "a forward that is left in eager takes gradients", why="it keeps nothing that a backward needs", try_=ANOTHER_REGION
    )
