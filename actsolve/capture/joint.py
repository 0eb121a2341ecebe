"""From a training step to AOTAutograd's joint graph, with all that is needed to call it like the module again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actsolve.capture.provenance import recorded_origins
from actsolve.capture.torch_internals import JointExport, export_joint, n_forward_outputs, output_descriptors
from actsolve.errors import CaptureError
from actsolve.training_step import TrainingStep


@dataclass
class OutputLayout:
    """How the flat tensors that the traced step returns become what its caller expects."""

    spec: pytree.TreeSpec | None = None
    constants: dict[int, Any] = field(default_factory=dict)
    n_leaves: int = 0

    def record(self, output: Any) -> list[torch.Tensor]:
        """Take ``output`` apart; return its tensors and remember the rest."""
        leaves, self.spec = pytree.tree_flatten(output)
        self.n_leaves = len(leaves)
        self.constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def restore(self, tensors: list[torch.Tensor]) -> Any:
        """Put ``tensors`` where those of the traced output were."""
        assert self.spec is not None
        rest = iter(tensors)
        leaves = [self.constants[i] if i in self.constants else next(rest) for i in range(self.n_leaves)]
        return pytree.tree_unflatten(leaves, self.spec)


class _FlatStep(torch.nn.Module):
    """The step as a module of flat tensors, so that torch sees no nested inputs, constants or loss function."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.model = step.model
        self._loss_fn = step.loss_fn
        leaves, self._spec = pytree.tree_flatten((tuple(step.args), dict(step.kwargs)))
        self._constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self._n_leaves = len(leaves)
        self.tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.layout = OutputLayout()

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(tensors)
        leaves = [self._constants[i] if i in self._constants else next(rest) for i in range(self._n_leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        with recorded_origins(self.model):
            output = call_step(self.model, self._loss_fn, args, kwargs)
        return self.layout.record(output)


def call_step(
    model: Callable[..., Any], loss_fn: Callable[[Any], torch.Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return ``model(*args, **kwargs)``, or ``(loss, output)`` where there is a loss function."""
    output = model(*args, **kwargs)
    return output if loss_fn is None else (loss_fn(output), output)


@dataclass(frozen=True)
class Joint:
    """A traced training step.

    Attributes:
        export: Torch's own record of it.
        module: The joint forward and backward graph.
        layout: How its flat outputs become the step's output.
    """

    export: JointExport
    module: torch.fx.GraphModule
    layout: OutputLayout

    @property
    def output_descs(self) -> list[Any]:
        """Torch's descriptor of each output of the joint graph."""
        return output_descriptors(self.module)

    @property
    def n_forward_outputs(self) -> int:
        """How many outputs the forward returns (updated buffers, then the step's outputs); each input's gradient, or None, follows."""
        return n_forward_outputs(self.module)


def trace_joint(step: TrainingStep) -> Joint:
    """Trace forward and backward of ``step`` with AOTAutograd. No kernel runs; buffers and RNG state stay as they are.

    Raises:
        CaptureError: the model cannot be traced, or nothing in it requires a gradient.
    """
    flat = _FlatStep(step)
    try:
        with torch.enable_grad():
            export = export_joint(flat, flat.tensors)
    except Exception as error:
        raise CaptureError(
            f"cannot trace {type(step.model).__name__}",
            where=_user_frame(error),
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            try_='a model without data-dependent Python, or on_error="original" to train it as it is',
        ) from error
    module = export.graph_module
    if not any(node.op == "placeholder" and "tangent" in node.name for node in module.graph.nodes):
        raise CaptureError(
            f"{type(step.model).__name__} has nothing to train",
            why="no output depends on a parameter or input that requires a gradient",
            try_="requires_grad_(True) on the parameters to be trained",
        )
    return Joint(export, module, flat.layout)


def _user_frame(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost traceback frame outside torch and actsolve."""
    import traceback
    from pathlib import Path

    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
