"""What a forward asks of its tensors: the number that Python reads from one, or how many elements a result has.

A trace runs on fake tensors, which hold nothing. Where it comes to such a question the forward is run once for real, every
answer is noted in order, and the trace is given them. What was traced is then right for as long as the answers are these: the
ops that give them stay in the planned forward, and each is held against what was noted (`actsolve.runtime.answered`).

A boolean mask that is written through is asked how many elements are true, for the backward reads through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from actsolve.capture.generators import Drawn, own_generators
from actsolve.capture.hooks import nothing_saved
from actsolve.capture.structure import tensors_in
from actsolve.errors import CaptureError

aten = torch.ops.aten

_READ = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"})
_THROUGH_MASKS = frozenset({"aten::index_put", "aten::masked_scatter"})
_MASKS = (torch.bool, torch.uint8)

REGION = "actsolve::region"  # its outputs are what it is asked (`actsolve.capture.eager_regions`)

Answer = bool | int | float | complex | tuple[Any, ...]
"""What was read; the shape of each tensor of a result; or how many elements of each mask are true."""


def _name(kernel: Any) -> str:
    """Return the name of ``kernel``, the same for one that works in place: a trace has the other."""
    return str(kernel._schema.name).removesuffix("_")


def may_ask(kernel: Any) -> bool:
    """Whether `asks` is true of some calls of ``kernel``."""
    return _name(kernel) in {*_READ, *_THROUGH_MASKS, REGION} or torch.Tag.dynamic_output_shape in kernel.tags


def asks(kernel: Any, args: Sequence[Any]) -> bool:
    """Whether what Python gets from ``kernel(*args)``, or the shape of its result, depends on what tensors hold."""
    if not isinstance(kernel, torch._ops.OpOverload) or not may_ask(kernel):
        return False
    if kernel is aten.index.Tensor or _name(kernel) in _THROUGH_MASKS:
        return bool(masks_of(args))
    return kernel is not aten.one_hot.default or len(args) < 2 or args[1] == -1


def is_through_masks(kernel: Any) -> bool:
    """Whether ``kernel`` writes through a mask: the shape of its own result does not depend on it."""
    return _name(kernel) in _THROUGH_MASKS


def masks_of(args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the masks among the arguments of an indexing kernel."""
    return [a for a in tensors_in(list(args[1:2])) if a.dtype in _MASKS]


def answer_of(kernel: Any, args: Sequence[Any], result: Any) -> Answer:
    """Return the answer that ``kernel(*args)``, which `asks`, gives where its result is ``result``."""
    if _name(kernel) in _THROUGH_MASKS:
        return tuple(int(mask.count_nonzero()) for mask in masks_of(args))
    if _name(kernel) == REGION:
        return result.answer  # type: ignore[no-any-return]
    tensors = tensors_in(result)
    answer: Answer = tuple(tuple(map(int, t.shape)) for t in tensors) if tensors else result
    return answer


@dataclass(frozen=True)
class Asked:
    """A question, and what the forward that ran for real was answered.

    Attributes:
        name: Of the kernel.
        shape: Of its first argument; of a region, its key.
        answer: To it.
        layouts: Of the tensor that the kernel made, or of each: shape, strides, dtype and device. Empty for numbers.
        is_one: Whether it made one tensor, not a tuple.
    """

    name: str
    shape: tuple[int, ...]
    answer: Answer
    layouts: tuple[tuple[Any, Any, torch.dtype, torch.device], ...] = ()
    is_one: bool = True

    @staticmethod
    def of(kernel: Any, args: Sequence[Any], result: Any) -> Asked:
        """Return what was asked where ``kernel(*args)`` gave ``result``."""
        tensors = tensors_in(list(result) if isinstance(result, list) else result)
        layouts = tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
        answer = answer_of(kernel, args, result)
        return Asked(_name(kernel), _subject(args), answer, layouts, isinstance(result, torch.Tensor))

    def traced(self, fake_mode: Any) -> Any:
        """Return the result as a trace sees it: a number, or fake tensors."""
        if not self.layouts:
            return self.answer
        with fake_mode:
            made = [torch.empty_strided(shape, stride, dtype=d, device=at) for shape, stride, d, at in self.layouts]
        return made[0] if self.is_one else tuple(made)


class Answers:
    """What one forward is answered, in the order of its questions.

    Attributes:
        given: The questions since a forward began.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = asked
        self.begin()

    def begin(self) -> None:
        """Let the next question be the first of a forward."""
        self._next = 0
        self.given: list[Asked] = []
        self._true: dict[Any, int] = {}  # by the storage and shape of a mask

    def to(self, kernel: Any, args: Sequence[Any]) -> Asked | None:
        """Return the next question of this kind.

        None where it is none: in a backward, whose masks are those that the forward was asked about.

        Raises:
            CaptureError: the forward that ran for real did not come to such a question.
        """
        name, shape = _name(kernel), _subject(args)
        for position in range(self._next, len(self._asked)):
            asked = self._asked[position]
            if asked.name == name and asked.shape == shape:
                self._next = position + 1
                self.given.append(asked)
                self._note_masks(args, asked)
                return asked
        masks = masks_of(args)
        if name in _THROUGH_MASKS or (masks and all(_mask_key(mask) in self._true for mask in masks)):
            return None
        raise CaptureError(
            f"the step asks {name} of a tensor of shape {shape} in the trace, and not when its forward runs",
            why="a trace can follow Python that depends on data only where it takes the same way, and in the forward alone",
            try_='a model whose Python does not depend on data there, or on_error="original" to train it as it is',
        )

    def _note_masks(self, args: Sequence[Any], asked: Asked) -> None:
        masks = masks_of(args)
        if asked.name in _THROUGH_MASKS and isinstance(asked.answer, tuple):
            self._true.update(zip(map(_mask_key, masks), asked.answer, strict=True))

    def by_position(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of an indexing kernel with as many positions in place of each mask as it has true elements."""
        indices: list[Any] = []
        for index in args[1] if isinstance(args[1], list | tuple) else [args[1]]:
            if isinstance(index, torch.Tensor) and index.dtype in _MASKS:
                n = self._true[_mask_key(index)]
                indices += [index.new_empty((n,), dtype=torch.int64) for _ in range(index.dim())]
            else:
                indices.append(index)
        return [args[0], indices]


def _subject(args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(args[0].shape) if isinstance(args[0], torch.Tensor) else (args[1],)


def _mask_key(mask: torch.Tensor) -> Any:
    return mask.untyped_storage()._cdata, tuple(mask.shape), mask.storage_offset()


def is_asked(node: Node) -> bool:
    """Whether Python goes on with what ``node`` gives, or with its shape."""
    return _ANSWER in node.meta


def questions(module: torch.fx.GraphModule) -> list[Node]:
    """Return the questions of a traced step, in order."""
    return [node for node in module.graph.nodes if is_asked(node)]


def _may_be_asked(node: Node) -> bool:
    """Whether `asks` is true of ``node``; in a backward nothing new is asked."""
    forward = node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward"
    return forward and asks(node.target, map_arg(node.args, lambda n: n.meta.get("val")))


def note_answers(module: torch.fx.GraphModule, given: Sequence[Asked] | None) -> None:
    """Attach the answers to the questions of a traced step.

    Args:
        module: Its joint graph.
        given: What was asked, in order; None if nothing had to be: then all that it asks was of constants.

    Raises:
        CaptureError: there are more questions than were asked, or fewer.
    """
    if given is None:
        return
    nodes = [node for node in module.graph.nodes if _may_be_asked(node)]
    if [_name(node.target) for node in nodes] != [asked.name for asked in given]:
        raise CaptureError(
            f"{len(nodes)} questions of a step that asked {len(given)} were traced",
            why="its Python may take other ways each time that it runs",
            try_='on_error="original" to train it as it is',
        )
    for node, asked in zip(nodes, given, strict=True):
        node.meta[_ANSWER] = asked.answer


_ANSWER = "actsolve_answer"


def answer_at(node: Node) -> Answer:
    """Return what `note_answers` attached to a question."""
    answer: Answer = node.meta[_ANSWER]
    return answer


def noted(forward: Callable[[Callable[[Asked], None]], Any]) -> Answers:
    """Run ``forward``, on real tensors that are its own, and return what it was answered. All generators are left as they are.

    It is given what notes an answer that is no kernel's.

    What autograd would save is dropped at once: memory is that of a forward without gradients.
    """
    noting = _Noting()
    try:
        with nothing_saved(_takes_gradients), noting, _AsInTrace(noting):
            forward(noting.asked.append)
    finally:
        noting.drawn.put_back()
    return Answers(noting.asked)


def _takes_gradients() -> CaptureError:
    return CaptureError(
        "the forward takes gradients, and its Python depends on data",
        why="the forward that is run for the data's sake keeps nothing that a backward needs",
        try_='on_error="original" to train it as it is',
    )


class _Noting(TorchDispatchMode):
    """Notes the questions, and the state that each generator had: torch's own, and others that are drawn from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[Asked] = []
        self.drawn = Drawn()
        self.drawn.note(own_generators())
        self.listens = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self.drawn.note([generator])
        result = func(*args, **kwargs)
        if self.listens and asks(func, args):
            self.asked.append(Asked.of(func, args, result))
        return result


class _AsInTrace(TorchFunctionMode):
    """Has torch ask as it does in a trace: ``tolist`` for each element, and ``one_hot`` for the number of classes alone."""

    def __init__(self, noting: _Noting) -> None:
        super().__init__()
        self._noting = noting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist:
            return _listed(args[0])
        if func is not torch.nn.functional.one_hot:
            return func(*args, **kwargs)
        n_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        tensor = kwargs.get("tensor", args[0] if args else None)
        if n_classes == -1 and tensor.numel():
            n_classes = int(tensor.max().item()) + 1
        self._noting.listens = False
        try:
            return func(tensor, n_classes)
        finally:
            self._noting.listens = True


def _listed(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_listed(part) for part in tensor]
