"""From a training step to AOTAutograd's joint graph, with all that is needed to call it like the module again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actsolve.capture.provenance import recorded_origins
from actsolve.capture.torch_internals import JointExport, export_joint, input_role, n_forward_outputs, output_descriptors
from actsolve.errors import CaptureError
from actsolve.graph import Kind
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
    """The step as a function of flat tensors: each parameter and buffer once, then the tensors among the inputs.

    So torch sees no nested inputs, constants or loss function, and a parameter that two modules share is one input with
    one gradient, added up in eager's order.
    """

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        # Behind a list, or torch would find the model's parameters and add them as inputs of its own.
        self._hidden = [step.model]
        self._loss_fn = step.loss_fn
        self.parameter_names = [name for name, _ in step.model.named_parameters()]
        self.buffer_names = [name for name, _ in step.model.named_buffers()]
        leaves, self._spec = pytree.tree_flatten((tuple(step.args), dict(step.kwargs)))
        self._constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self._n_leaves = len(leaves)
        state = [*dict(step.model.named_parameters()).values(), *dict(step.model.named_buffers()).values()]
        self.tensors = (*state, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        self.layout = OutputLayout()

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        names = self.parameter_names + self.buffer_names
        state = dict(zip(names, tensors, strict=False))
        rest = iter(tensors[len(names) :])
        leaves = [self._constants[i] if i in self._constants else next(rest) for i in range(self._n_leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        (model,) = self._hidden

        def run(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, state, args, kwargs, tie_weights=True)

        with recorded_origins(model):
            output = call_step(run, self._loss_fn, args, kwargs)
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
        parameter_names: Of its first inputs.
        buffer_names: Of the inputs that follow them; the step's own inputs come last.
    """

    export: JointExport
    module: torch.fx.GraphModule
    layout: OutputLayout
    parameter_names: list[str]
    buffer_names: list[str]

    @property
    def output_descs(self) -> list[Any]:
        """Torch's descriptor of each output of the joint graph."""
        return output_descriptors(self.module)

    def given(self, placeholder: torch.fx.Node) -> tuple[Kind, str]:
        """Return what an input of the joint graph is, and its name."""
        role = input_role(placeholder)
        if role.is_tangent:
            return Kind.TANGENT, placeholder.name
        n_parameters, n_buffers = len(self.parameter_names), len(self.buffer_names)
        if role.index < n_parameters:
            return Kind.PARAMETER, self.parameter_names[role.index]
        if role.index < n_parameters + n_buffers:
            return Kind.BUFFER, self.buffer_names[role.index - n_parameters]
        return Kind.INPUT, f"input_{role.index - n_parameters - n_buffers}"

    @property
    def n_forward_outputs(self) -> int:
        """How many outputs the forward returns (updated buffers, then the step's outputs).

        The gradient of each input, or None, follows.
        """
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
    return Joint(export, module, flat.layout, flat.parameter_names, flat.buffer_names)


def _user_frame(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost traceback frame outside torch and actsolve."""
    import traceback
    from pathlib import Path

    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
