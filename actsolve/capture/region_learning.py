"""What is learned of a region from one run on real inputs, before the step around it is traced; what it does is refused if a plan
would lose it, or do it twice.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from actsolve.capture.flops import overload_flops
from actsolve.capture.randomness import as_if_not_traced
from actsolve.capture.region_call import ANOTHER_REGION, GIVEN, RegionCall
from actsolve.capture.region_results import Learned, Returned, Taken, refuse_hidden
from actsolve.capture.region_token import generators_at
from actsolve.capture.settings import SCALARS
from actsolve.capture.state import TracedState, state_places
from actsolve.capture.structure import Structure, tensors_in
from actsolve.capture.torch_internals import n_mutations, storage_key
from actsolve.errors import CaptureError
from actsolve.runtime.memory_events import measure_peak


def learn(call: RegionCall, tensors: Sequence[torch.Tensor], model: torch.nn.Module, state: Iterable[torch.Tensor]) -> Returned:
    """Run ``call`` on real tensors, forward and backward, and note what it returns and takes. Return what its `run` does.

    Args:
        call: Of a region.
        tensors: What it is given.
        model: What it is part of.
        state: The tensors of that.

    Raises:
        CaptureError: it has an effect besides what it returns, or not the same one when it runs again.
    """
    with as_if_not_traced(), torch.autograd.graph.saved_tensors_hooks(_detached, _as_it_is):  # around it nothing is saved
        return _Learner(call, list(tensors), model, set(map(storage_key, state))).returned()


def used_by(call: RegionCall, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the places of the module's tensors that ``call``, which is given all of them, is to be given from now on."""
    with as_if_not_traced(), torch.autograd.graph.saved_tensors_hooks(_detached, _as_it_is), generators_at(call.token()):
        used = call.used(tensors)
    known = GIVEN.get(call.module, {}).get(call.path, ())
    return tuple(sorted({*used, *(i for i in known if i < call.n_places)}))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is saved: an op whose own result it is would hold itself otherwise."""
    return tensor.detach()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Learner:
    def __init__(self, call: RegionCall, tensors: list[torch.Tensor], model: torch.nn.Module, state: set[int]) -> None:
        self.call, self.tensors, self.model = call, tensors, model
        self.given = set(map(storage_key, tensors))
        self.not_its_own = state - self.given

    def returned(self) -> Returned:
        around = TracedState(self.model, frozenset())
        held = [*self.tensors[: self.call.n_state], *(container[key] for container, key in state_places(self.call.module))]
        before = [(t, t.clone()) for t in held if not t.requires_grad]
        structure, constants, differentiable, uses = self._differentiated_once()
        if any(not _same_bits(now, then) for now, then in before):  # a batch norm leaves no other sign
            raise self.call.changes("one of its tensors in place")
        returned = self.call.run(self.tensors)
        *outputs, token = returned
        if changed := [*(w.attribute for w in around.writes()), *(s.name for s in around.settings)]:
            raise self.call.changes(changed[0])
        ones = [torch.ones_like(o) if d else None for o, d in zip(outputs, differentiable, strict=True)]
        device = next((t.device for t in [*outputs, *self.tensors]), torch.device("cpu"))

        def forward() -> list[torch.Tensor]:
            with generators_at(token):
                return self.call.run(self.tensors)

        def backward() -> list[torch.Tensor]:
            return self.call.differentiate(self.tensors, token, ones)

        forward_s, again = _timed(forward, device)
        if any(not _same_bits(a, b) for a, b in zip(outputs, again[:-1], strict=True)):
            raise CaptureError(
                f"{self.call.path}, which is left in eager, returns something else when it runs a second time",
                why="its backward runs it again; does it count its calls, or draw from a generator of its own?",
                try_='on_error="original" to train the model as it is',
            )
        del again
        strides = {p: g.stride() for p, g in zip(self.call.positions, backward(), strict=True)}
        backward_s, _ = _timed(backward, device)
        self.call.learned = Learned(
            structure,
            constants,
            differentiable,
            strides,
            uses,
            self._taken(forward, device, forward_s),
            self._taken(backward, device, backward_s),
        )
        return returned

    def _differentiated_once(self) -> tuple[Structure, dict[int, Any], tuple[bool, ...], dict[int, int]]:
        """Return what it returns: structure, what is no tensor, what requires a gradient; and how often it uses each tensor."""
        call = self.call
        with call.placed(self.tensors) as leaves, generators_at(call.token()), call.as_called(keeps_casts=False):
            found = call.call(leaves, keep=torch.clone)  # autograd lets nobody write into a leaf, or a view of one
            found = replace(found, changed=self._changed(found.flat))
            if any(found.shared):
                raise CaptureError(
                    f"{call.path}, which is left in eager, returns what is in memory of its inputs, its weights or of another",
                    why="what writes into one of them would have to change the other",
                    try_=f"a copy of it, {ANOTHER_REGION}",
                )
            constants = {i: leaf for i, leaf in enumerate(found.leaves) if not isinstance(leaf, torch.Tensor)}
            odd = [type(leaf).__name__ for leaf in constants.values() if type(leaf) not in SCALARS]
            if odd or len(constants) == len(found.leaves):
                raise CaptureError(
                    f"{call.path}, which is left in eager, returns {f'a {odd[0]}' if odd else 'no tensor'}",
                    why="what it returns are tensors, numbers, texts and None, and containers of these",
                    try_=ANOTHER_REGION,
                )
            differentiable = tuple(t.requires_grad for t in found.leaves if isinstance(t, torch.Tensor))
            uses, others = found.uses(leaves)
            structure, call.changed = found.structure, found.changed
            del found, leaves
        refuse_hidden(call.path, others)
        return structure, constants, differentiable, uses

    def _changed(self, flat: list[torch.Tensor]) -> frozenset[int]:
        """Return which inputs it has written to, which are copies; raise if a planned step could not give it such copies."""
        call = self.call
        changed = {i for i, t in enumerate(flat) if i >= call.n_state and n_mutations(t)}
        if any(call.leaf[i] or flat[i].stride() != self.tensors[i].stride() for i in changed):
            raise call.changes("one of its inputs in place")
        return frozenset(changed)

    def _taken(self, run: Callable[[], Any], device: torch.device, seconds: float) -> Taken:
        """Return what ``run`` takes, whose time is known: memory and FLOPs of one more run.

        Raises:
            CaptureError: it leaves tensors somewhere, or reads tensors of the model that are not given to it.
        """
        watch = _Watch(self.given, self.not_its_own, any(enabled for _, enabled, _ in self.call.autocast))
        with watch:
            measured = measure_peak(run, device)
        taken = Taken(seconds, measured.peak_bytes, watch.flops)
        del measured
        if watch.foreign:
            raise CaptureError(
                f"{self.call.path}, which is left in eager, reads a tensor of shape {watch.foreign[0]} of another module",
                why="a planned step may change that at another time than eager does",
                try_="a module around both to be left in eager",
            )
        gc.collect()
        if left := [tuple(t.shape) for ref in watch.made if (t := ref()) is not None]:
            raise self.call.changes(f"something outside of it: a tensor of shape {left[0]} is kept there")
        return taken


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of what runs, and notes what it reads and makes.

    Torch's own counter of FLOPs hooks into autograd, which takes no leaf of ``torch.autograd.grad``.
    """

    def __init__(self, given: set[int], not_its_own: set[int], autocast: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.foreign: list[tuple[int, ...]] = []
        self.made: list[TensorWeakRef] = []
        self._given, self._not_its_own = given, not_its_own
        self._autocast = autocast

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.foreign += [tuple(t.shape) for t in tensors_in((args, kwargs)) if storage_key(t) in self._not_its_own]
        result = func(*args, **(kwargs or {}))
        self.flops += overload_flops(func, args, kwargs or {}, result) or 0
        if not (self._autocast and func is torch.ops.aten._to_copy.default):  # autocast keeps its casts
            self.made += [TensorWeakRef(t) for t in tensors_in(result) if storage_key(t) not in self._given]
        return result


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _timed(run: Callable[[], list[torch.Tensor]], device: torch.device) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds that ``run`` takes, which ran before, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result
