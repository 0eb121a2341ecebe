"""From a training step to AOTAutograd's joint graph, with all that is needed to call it like the module again."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from actsolve.capture.answers import Answer, answer_at, note_answers, questions
from actsolve.capture.cached_calls import forget_traced_results
from actsolve.capture.dropout import KERNELS
from actsolve.capture.eager_choice import left_in_eager
from actsolve.capture.eager_regions import call_of, is_nothing_else, refuse_later_reads, refuse_sums
from actsolve.capture.flat_step import FlatStep
from actsolve.capture.hooks import refuse_hooks
from actsolve.capture.layouts import corrected
from actsolve.capture.output_layout import OutputLayout
from actsolve.capture.provenance import origin_of
from actsolve.capture.randomness import only_in_graph
from actsolve.capture.region_call import RegionCall
from actsolve.capture.state import (
    Write,
    refuse_again,
    settled,
    state_names,
)
from actsolve.capture.to_blame import parts_that_draw, parts_that_raised
from actsolve.capture.torch_aot import JointExport, export_joint
from actsolve.capture.torch_internals import (
    DATA_DEPENDENT,
    FakeTensor,
    annotation,
    input_role,
    leaked_tensors,
    n_forward_outputs,
    output_descriptors,
)
from actsolve.eager_parts import LOSS, Parts
from actsolve.errors import ActsolveError, CaptureError, ForwardError
from actsolve.graph import Kind
from actsolve.training_step import TrainingStep


@dataclass(frozen=True)
class Joint:
    """A traced training step.

    Attributes:
        export: Torch's own record of it.
        module: The joint forward and backward graph.
        layout: How its flat outputs become the step's output.
        state: Kind and name of its first inputs, the tensors of the module; the step's own inputs come last.
        written_only: Attributes of the module that the forward assigns and does not read: they are no inputs.
        is_real: Whether the step's tensors hold data, so that its kernels can be run.
        leaf_indices: Which inputs are leaves of autograd's graph and require a gradient.
        undefined: Names of the tangents that are not given: no gradient starts from these outputs.
        regions: What is left in eager.
    """

    export: JointExport
    module: torch.fx.GraphModule
    layout: OutputLayout
    state: tuple[tuple[Kind, str], ...]
    written_only: frozenset[Write]
    is_real: bool
    leaf_indices: frozenset[int]
    undefined: frozenset[str] = frozenset()
    regions: tuple[RegionCall, ...] = ()

    @property
    def eager(self) -> tuple[str, ...]:
        """Names of what is left in eager."""
        return tuple(dict.fromkeys(call.path for call in self.regions))

    @property
    def output_descs(self) -> list[Any]:
        """Torch's descriptor of each output of the joint graph."""
        return output_descriptors(self.module)

    @property
    def reads_by_offset(self) -> bool:
        """Whether an op addresses a storage from its beginning, so that it matters where an input lies in its own."""
        return bool(self.module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default))

    @property
    def leaves(self) -> set[torch.fx.Node]:
        """The inputs that are leaves of autograd's graph and require a gradient."""
        return {n for n in self.module.graph.find_nodes(op="placeholder") if input_role(n).index in self.leaf_indices}

    def gradient_of(self, placeholder: torch.fx.Node) -> torch.fx.Node | None:
        """Return the gradient of an input, or None."""
        (output,) = self.module.graph.find_nodes(op="output")
        gradient = output.args[0][self.n_forward_outputs + input_role(placeholder).index]
        return gradient if isinstance(gradient, torch.fx.Node) else None

    @property
    def questions(self) -> list[torch.fx.Node]:
        """What the forward asks of its tensors, in order."""
        return questions(self.module)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """What it was traced for: the answer to each question."""
        return tuple(map(answer_at, self.questions))

    def asked_at(self, position: int) -> str | None:
        """Return the source line of a question."""
        origin = annotation(self.questions[position])
        return origin.source or None if origin is not None else None

    def asked_by(self, position: int) -> str:
        """Return the name of the module or the loss that asks a question; of what a region returned, the region's."""
        node = self.questions[position]
        call, origin = call_of(node), annotation(node)
        if call is not None or origin is None:
            return "" if call is None else call.path
        return LOSS if origin.is_of_loss else origin.module

    @property
    def tangents(self) -> list[torch.fx.Node]:
        """The inputs that are gradients of outputs, in order."""
        return [node for node in self.module.graph.find_nodes(op="placeholder") if input_role(node).is_tangent]

    def given(self, placeholder: torch.fx.Node) -> tuple[Kind, str]:
        """Return what an input of the joint graph is, and its name."""
        role = input_role(placeholder)
        if role.is_tangent:
            return Kind.TANGENT, placeholder.name
        if role.index < len(self.state):
            return self.state[role.index]
        return Kind.INPUT, f"input_{role.index - len(self.state)}"

    @property
    def n_forward_outputs(self) -> int:
        """How many outputs the forward returns (updated buffers, then the step's outputs).

        The gradient of each input, or None, follows.
        """
        return n_forward_outputs(self.module)


def trace_joint(step: TrainingStep) -> Joint:
    """Trace forward and backward of ``step`` with AOTAutograd; all is left as it was, RNG state included.

    No kernel runs, unless Python depends on data. What no trace can follow is left in eager.

    Raises:
        CaptureError: the model cannot be traced, or it does what a trace would lose, or nothing requires a gradient.
    """
    eager = tuple(step.eager)
    around: dict[str, str] = {}
    first: CaptureError | None = None
    told = False
    try:
        for _ in range(_MOST_TRACES):
            try:
                joint = _trace_past(replace(step, eager=eager))
                if first is not None and is_nothing_else(joint.module):
                    break
                return joint
            except CaptureError as error:
                wider = None
                if not isinstance(error, ForwardError) and (error.module or first is not None):
                    if error.module:
                        around |= zip((error.module, *error.around), error.around, strict=False)
                    wider = left_in_eager(step.model, eager, error.module, around)
                if wider is None and first is None:
                    raise
                if first is not None and not told:
                    first.add_reason(f"with {', '.join(eager)} left in eager: {error.what}", error.try_)
                    told = True
                first = first or _without_frames(error)
            if wider is None:
                break
            eager = wider
        assert first is not None
        raise first
    finally:
        first = None  # its frames, which are those of this call, would be kept by this one


def _without_frames(error: CaptureError) -> CaptureError:
    """Return ``error`` without what was running when it was raised, some of which would stay open for as long as it is kept."""
    for known in (error, error.__cause__, error.__context__):
        if known is not None:
            known.__traceback__ = None
    return error


def _trace_past(step: TrainingStep) -> Joint:
    refuse_hooks(step.model, loss_inside=step.loss_fn is not None)
    joint = _traced(step, frozenset())
    if settings := joint.layout.settings:
        with settled(step.model, settings):
            # Tensors that the first forward assigns beside them are not there for another trace.
            again = settings if joint.layout.writes else _traced(step, frozenset()).layout.settings
            refuse_again(again)
    if written_only := _written_only(joint):
        # Their old tensors would be inputs, and autograd would keep the graph of the step that made them.
        given = {name for _, name in joint.state}
        joint = _traced(step, written_only) if any(w.attribute in given for w in written_only) else joint
        joint = replace(joint, written_only=written_only)
    if not joint.tangents:
        raise CaptureError(
            f"{type(step.model).__name__} has nothing to train",
            why="no output depends on a parameter or input that requires a gradient",
            try_="requires_grad_(True) on the parameters to be trained",
        )
    return joint


_MOST_TRACES = 12
_NO_DATA_IN_BACKWARD = "a model whose backward does not read any"
_REAL_DATA = f"real tensors as inputs, for Python reads data; {_NO_DATA_IN_BACKWARD}"
_IN_A_PART = "what depends on data in a method or submodule of its own, which is then left in eager"
_NESTED = "self.shape_env must not be None"  # what torch asserts of a nested tensor that is made within a trace


def _traced(step: TrainingStep, leave_out: frozenset[Write]) -> Joint:
    flat = FlatStep(step, leave_out)
    _refuse_odd_tensors(flat.tensors)
    parts = Parts(step.model, step.loss_fn)
    is_real = not any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in flat.tensors)

    def export_step() -> JointExport:
        try:
            export = export_joint(flat, flat.tensors, correct=corrected, kernels=KERNELS, answers=flat.answers)
            flat.refuse_changes_since()
        finally:
            flat.close()
            forget_traced_results()
        return export

    try:
        with torch.enable_grad(), only_in_graph(flat.unchanged):
            if flat.regions:
                _refuse_regions_without_data(is_real)
                flat.ask()
            try:
                export = export_step()
            except DATA_DEPENDENT:
                if not is_real or flat.answers is not None:
                    raise
                flat.ask()
                export = export_step()
    except ActsolveError as error:
        leaked_tensors()  # whoever keeps the error keeps its tensors, which are no matter to the next trace
        if is_real and isinstance(error, CaptureError) and error.draws:
            error.blame(parts_that_draw(flat.ask, parts))
        raise
    except Exception as error:
        leaked_tensors()
        to_blame = parts_that_raised(error, parts) if is_real else ()
        remedy = "one call in eager mode, to see if it runs by itself"
        if isinstance(error, DATA_DEPENDENT) or _NESTED in str(error):
            remedy = _REAL_DATA if not is_real else _IN_A_PART if not to_blame else _NO_DATA_IN_BACKWARD
        failed = CaptureError(
            f"cannot trace {type(step.model).__name__}",
            where=_user_frame(error) or _module_of(error, step.model),
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            try_=f'{remedy}, or on_error="original" to train it as it is',
        )
        failed.blame(to_blame)
        raise failed from error
    if leaked := leaked_tensors():
        raise CaptureError(
            f"{type(step.model).__name__} keeps {len(leaked)} of its intermediate tensors outside of it",
            where=f"tensors of shape {', '.join(str(tuple(t.shape)) for t in leaked[:3])}",
            why="they were made while it was traced; a planned step would not make them anew",
            try_="return them from the forward, or assign them to an attribute of the module",
        )
    note_answers(export.graph_module, None if flat.answers is None else flat.answers.given)
    _refuse_untrained_constants(export.graph_module)
    _refuse_sparse_results(export.graph_module)
    refuse_later_reads(export.graph_module)
    refuse_sums(export.graph_module, given=False)
    names = tuple(state_names(step.model, leave_out))
    leaves = frozenset(i for i, t in enumerate(flat.tensors) if t.is_leaf and t.requires_grad)
    return Joint(export, export.graph_module, flat.layout, names, frozenset(), is_real, leaves, regions=tuple(flat.regions.calls))


def _refuse_regions_without_data(is_real: bool) -> None:
    if not is_real:
        raise CaptureError(
            "a submodule is to be left in eager, and the inputs hold no data",
            why="what it returns and takes is learned from a run",
            try_="real tensors for the model and its inputs",
        )


def _refuse_untrained_constants(module: torch.fx.GraphModule) -> None:
    """Raise if the step uses a tensor to be trained that is no input of the graph: it would get no gradient."""
    for node in module.graph.find_nodes(op="get_attr"):
        constant = functools.reduce(getattr, str(node.target).split("."), module)
        if isinstance(constant, torch.Tensor) and constant.requires_grad:
            origin = next((annotation(user) for user in node.users), None)
            raise CaptureError(
                f"a tensor of shape {tuple(constant.shape)} requires a gradient and is not reached through the module",
                where=origin.source if origin is not None else None,
                why="only parameters and attributes of registered modules, and inputs, get gradients from a planned step",
                try_="nn.ModuleList for modules in a list, nn.Parameter for a tensor, model.weight in a loss for weight",
            )


def _refuse_sparse_results(module: torch.fx.GraphModule) -> None:
    """Raise if an op makes a sparse tensor: its memory is not known before it runs."""
    for node in module.graph.nodes:
        value, origin = node.meta.get("val"), annotation(node)
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                "the step makes a sparse tensor",
                where=origin.source if origin is not None else node.name,
                why="its memory depends on what it holds",
                try_='an embedding with sparse=False, dense tensors, or on_error="original"',
            )


def _refuse_odd_tensors(tensors: tuple[torch.Tensor, ...]) -> None:
    """Raise if a tensor is of a kind that a planned step cannot be given."""
    for tensor in tensors:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or isinstance(tensor, FakeTensor)
        if not plain or tensor.layout is not torch.strided:
            what = type(tensor).__name__ if not plain else f"tensor of layout {tensor.layout}"
            raise CaptureError(
                f"cannot plan for a {what}",
                why="a planned step takes plain dense tensors",
                try_='tensor.as_subclass(torch.Tensor), to_dense(), or on_error="original"',
            )


def _written_only(joint: Joint) -> frozenset[Write]:
    """Return the attributes that the forward assigns and does not read before."""
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    unread = {joint.given(node)[1] for node in placeholders if not node.users}
    given = {name for _, name in joint.state}
    return frozenset(w for w in joint.layout.writes if not w.is_buffer and (w.attribute in unread or w.attribute not in given))


def _module_of(error: BaseException, model: torch.nn.Module) -> str | None:
    """Return which module of ``model`` ran the op that raised ``error``."""
    origin = origin_of(error)
    if origin is None:
        return None
    kind = type(dict(model.named_modules()).get(origin.module, model)).__name__
    return f"the module {origin.module} ({kind})" if origin.module else f"the forward of {kind}"


def _user_frame(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost traceback frame outside torch and actsolve."""
    import traceback
    from pathlib import Path

    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
