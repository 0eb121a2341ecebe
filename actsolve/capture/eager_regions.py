"""Regions that are left in eager: parts of the step whose Python no trace can follow, each one op of it.

What a region returns, and what it takes, is learned from one run on real inputs. Its outputs are held against that at each step
like any other answer (`actsolve.capture.answers`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from actsolve.capture.answers import REGION, Asked
from actsolve.capture.eager_choice import outermost
from actsolve.capture.region_call import ANOTHER_REGION, CALLS, RegionCall, region_call
from actsolve.capture.region_learning import learn, used_by
from actsolve.capture.region_results import Taken
from actsolve.capture.state import state_names, state_places
from actsolve.capture.structure import tensors_in
from actsolve.capture.torch_internals import input_role, real_tensors, storage_key
from actsolve.eager_parts import Part, Parts
from actsolve.errors import CaptureError

_BACKWARD = f"{REGION}_backward"

torch.library.define(REGION, "(Tensor[] tensors, int key) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.define(_BACKWARD, "(Tensor[] tensors, Tensor token, Tensor?[] gradients, int key) -> Tensor[]")
_forward = torch.ops.actsolve.region.default
_backward = torch.ops.actsolve.region_backward.default


def _run(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    return CALLS[key].run(tensors)


def _differentiate(
    tensors: Sequence[torch.Tensor], token: torch.Tensor, gradients: Sequence[torch.Tensor | None], key: int
) -> list[torch.Tensor]:
    return CALLS[key].differentiate(tensors, token, gradients)


# Not registered as kernels: below torch's dispatcher autograd would record nothing of what they run.
_RUNS: dict[Any, Callable[..., Any]] = {_forward: _run, _backward: _differentiate}


def called(target: Any) -> Callable[..., Any]:
    """Return what to call for the target of a traced call: of a region its Python, else the target."""
    function: Callable[..., Any] = _RUNS.get(target, target)
    return function


def _fake_gradients(tensors: Any, token: Any, gradients: Any, key: int) -> Any:
    call = CALLS[key]
    return [
        torch.empty_strided(t.shape, call.known.strides[i], dtype=t.dtype, device=t.device)
        for i, (t, need) in enumerate(zip(tensors, call.needed, strict=True))
        if need
    ]


torch.library.register_fake(_BACKWARD, _fake_gradients)


def call_of(node: Node) -> RegionCall | None:
    """Return which call of a region ``node`` is, or is the backward of; None if it is neither."""
    if node.target not in _RUNS:
        return None
    key = node.args[-1]
    assert isinstance(key, int)
    return CALLS[key]


def taken_by(node: Node) -> Taken | None:
    """Return what the region ``node`` takes; None if it is none."""
    call = call_of(node)
    return None if call is None else call.known.forward if node.target is _forward else call.known.backward


def refuse_sums(module: torch.fx.GraphModule, *, given: bool) -> None:
    """Raise if a region adds up what eager adds to a sum that is there, one by one.

    Where a tensor is read in the region more than once, and later outside of it, the gradient from outside comes first.

    Args:
        module: A joint graph.
        given: Whether the gradients of all its outputs are known to be given; else what is added to these is no matter yet.
    """
    for node in module.graph.find_nodes(op="call_function", target=_backward):
        call = call_of(node)
        assert call is not None
        for item in node.users:
            sums = [user for user in item.users if user.target is torch.ops.aten.add.Tensor and user.args[1] is item]
            summed = any(add.users and (given or not _is_tangent(add.args[0])) for add in sums)
            position = call.positions[item.args[1]]
            if summed and call.known.uses.get(position, 0) > 1:
                tensor = node.args[0][position]
                raise CaptureError(
                    f"cannot add the gradients of {tensor} bitwise as eager does",
                    where=call.path,
                    why="it is read more than once in what is left in eager, and later outside of it: eager adds each to the sum",
                    try_=ANOTHER_REGION,
                )


def _is_tangent(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder" and input_role(node).is_tangent


def refuse_later_reads(module: torch.fx.GraphModule) -> None:
    """Raise if what a region has written to is read after it: the region wrote to a copy."""
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    for region in module.graph.find_nodes(op="call_function", target=_forward):
        call = call_of(region)
        assert call is not None
        keys = {storage_key(region.args[0][i].meta["val"]) for i in call.changed}
        if not keys:
            continue
        held = [n for n in module.graph.nodes if any(storage_key(t) in keys for t in tensors_in(n.meta.get("val")))]
        later = (u for n in held for u in n.users if position[u] > position[region])
        if any(n.op == "placeholder" for n in held):
            raise call.changes("an input of the step in place", "a model around this one, which calls it with a clone() of that")
        if any(u.meta.get("partitioner_tag") != "is_backward" for u in later):
            raise call.changes("one of its inputs in place, which is read after it")


def is_nothing_else(module: torch.fx.GraphModule) -> bool:
    """Whether all that the forward of a step computes is computed in regions."""
    computed = module.graph.find_nodes(op="call_function", target=_forward)
    calls = (n for n in module.graph.nodes if n.op == "call_function" and n.meta.get("partitioner_tag") != "is_backward")
    return bool(computed) and all(n.target in (_forward, operator.getitem) for n in calls)


class _InEager(torch.autograd.Function):
    """A call in a trace, or in the run for real before it."""

    @staticmethod
    def forward(ctx: Any, call: RegionCall, run: Callable[..., list[torch.Tensor]], *tensors: torch.Tensor) -> Any:
        outputs = run(list(tensors))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, outputs[-1])
        differentiable = (*call.known.differentiable, False)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *tensors, token = ctx.saved_tensors
        found = iter(_backward(tensors, token, list(gradients[:-1]), ctx.call.key))
        return (None, None, *(next(found) if need else None for need in ctx.call.needed))


class Regions:
    """The regions of a step, and what stands for them while it is traced.

    Attributes:
        calls: Their calls in the forward, in order.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None, paths: Iterable[str]) -> None:
        self._model = model
        self._parts = Parts(model, loss_fn)
        found: dict[Any, Part] = {}
        for path in outermost(paths):
            part = self._parts.at(path)
            if part is None:
                raise CaptureError(
                    f"{path}, which is left in eager, is not there any more",
                    why="nothing that is called has this name",
                    try_="optimize the module once more",
                )
            found.setdefault((id(part.owner), part.name, part.kind), part)  # one may be in two places
        self._left = tuple(found.values())
        self._tensors = {part.path: state_names(part.owner) for part in self._left if part.owner is not None}
        self.calls: list[RegionCall] = []
        self._next = 0
        self._runs = False

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def loss_fn(self) -> Callable[[Any], torch.Tensor] | None:
        """What calls the step's loss function."""
        return self._parts.loss_fn

    @contextlib.contextmanager
    def standing_in(self, note: Callable[[Asked], None] | None) -> Iterator[None]:
        """Within this context a call of what is left in eager is one op of the trace.

        Args:
            note: If given, it runs for real and is learned of, and this is told what it returned.
        """
        self._next = 0
        if note is not None:
            self.calls.clear()
        with contextlib.ExitStack() as stack:
            for part in self._left:
                stack.enter_context(part.replaced(functools.partial(self._call, note, part), self._model))
            yield

    def _call(
        self,
        note: Callable[[Asked], None] | None,
        part: Part,
        owner: torch.nn.Module,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._runs:  # within another, which runs as it is
            return function(*args, **kwargs)
        if part.owner is not None and state_names(owner) != self._tensors[part.path]:
            raise CaptureError(
                f"a tensor is put into {part.path}, which is left in eager, before it is called",
                why="only what is around it is planned: nobody would put it there again",
                try_="pass it as an input, or leave a module around both in eager",
            )
        known = None if note is not None else self._known(part)
        given = self._given(part, owner, function, args, kwargs) if note is not None else known.given if known is not None else ()
        call, tensors = region_call(part, owner, function, given, args, kwargs)
        if note is not None:
            self.calls.append(call)
            run: Callable[..., list[torch.Tensor]] = functools.partial(self._learned, call, note)
        else:
            call = _same_call(known, call)
            run = functools.partial(_forward, key=call.key)
        *outputs, _ = _InEager.apply(call, run, *tensors)  # type: ignore[no-untyped-call]
        return call.known.restored(outputs)

    def _given(self, part: Part, owner: torch.nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return which of its owner's tensors ``part`` is given; None for all."""
        if part.is_outside:
            return ()
        if part.is_module:
            return None
        call, tensors = region_call(part, owner, function, None, args, kwargs)
        with self._for_real():
            return used_by(call, tensors)

    @contextlib.contextmanager
    def _for_real(self) -> Iterator[None]:
        self._runs = True
        try:
            with real_tensors():
                yield
        finally:
            self._runs = False

    def _learned(self, call: RegionCall, note: Callable[[Asked], None], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._for_real():
            returned = learn(call, tensors, self._model, (container[key] for container, key in state_places(self._model)))
        note(Asked.of(_forward, (tensors, call.key), returned))
        return returned

    def _known(self, part: Part) -> RegionCall | None:
        """Return the call that a trace comes to next; None if the forward that ran did not come to it."""
        known = self.calls[self._next] if self._next < len(self.calls) else None
        self._next += 1
        return known if known is not None and known.path == part.path else None


def _same_call(known: RegionCall | None, call: RegionCall) -> RegionCall:
    """Return what was learned of ``call``, which a trace has come to."""
    if known is None or known.needed != call.needed or known.structure.key != call.structure.key:
        raise CaptureError(
            f"{call.path}, which is left in eager, is called otherwise in the trace than when the forward runs",
            why="a trace can go past it only where it takes the same way",
            try_='on_error="original" to train the model as it is',
        )
    return known
