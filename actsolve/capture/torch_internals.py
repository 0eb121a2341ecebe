"""All that is private in torch, in one place.

Everything else imports these few names, so that a new torch release needs only this file and its tests looked at.
Written against torch 2.11 to 2.13 (`torch._functorch.aot_autograd`, the joint-graph export with descriptors).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils
import torch.fx.traceback
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "InputRole",
    "JointExport",
    "annotation",
    "bound_kernel",
    "annotate",
    "compile_joint",
    "export_joint",
    "fake_building",
    "input_role",
    "preserved_annotations",
    "storage_key",
]

BoxedFunction = Callable[[list[Any]], Any]
Compiler = Callable[[torch.fx.GraphModule, str], BoxedFunction]
JointExport = Any  # torch's JointWithDescriptors
_ANNOTATION = "actsolve"


def export_joint(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> JointExport:
    """Return the joint forward and backward graph of ``module(*args)``, functionalised, on fake tensors.

    No kernel runs and the RNG state is left as it was. Tensors that are neither parameters, buffers nor arguments (those
    that a loss function closes over) become constants of the graph.
    """
    tensors = [*args, *module.parameters(), *module.buffers()]
    given_mode = detect_fake_mode(tensors)
    fake_mode = given_mode or FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack, tracing(TracingContext(fake_mode)), preserved_annotations():
        if given_mode is not None:
            stack.enter_context(_fake_constants())
        return aot_export_joint_with_descriptors(stack, module, args, {})


def _fake_constants() -> contextlib.AbstractContextManager[Any]:
    """Let constants be fake, which torch refuses: where a whole step is, so are the tensors that its loss closes over."""
    return mock.patch.object(torch._dynamo.utils, "assert_no_fake_params_or_buffers", lambda _: None)


def compile_joint(export: JointExport, partition: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    """Return a differentiable function of the flat parameters, buffers and inputs of an exported joint graph.

    Args:
        export: From `export_joint`.
        partition: Called as ``partition(joint, inputs, num_fwd_outputs=...)``; returns the forward and the backward module.
        compiler: Turns each of the two, with its name, into a function of one list, which it empties.
    """

    def compiled_as(name: str) -> Callable[..., BoxedFunction]:
        return lambda module, _inputs: compiler(module, name)

    function: Callable[..., Any] = aot_compile_joint_with_descriptors(
        _fresh(export), partition_fn=partition, fw_compiler=compiled_as("forward"), bw_compiler=compiled_as("backward")
    )
    return function


def _fresh(export: JointExport) -> JointExport:
    """Return ``export`` with metadata of its own: compiling strips it, and one capture is compiled once per plan."""
    state = export._aot_state
    metadata = dataclasses.replace(state.fw_metadata)
    return dataclasses.replace(export, _aot_state=dataclasses.replace(state, fw_metadata=metadata))


@contextlib.contextmanager
def fake_building() -> Iterator[None]:
    """Build modules and inputs of fake CPU tensors: shapes and dtypes without memory.

    ``module.to(...)`` and its kin, which swap the contents of tensors, refuse fake ones; here they set new parameters. A
    parameter that modules share stays shared.
    """
    made: dict[tuple[int, int], tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def converted(fn: Callable[[torch.Tensor], torch.Tensor], old: torch.Tensor) -> torch.Tensor:
        if (id(fn), id(old)) not in made:
            with torch.no_grad():
                new = fn(old)
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            made[id(fn), id(old)] = (fn, old, new)  # the first two are held, so that their ids stay theirs
        return made[id(fn), id(old)][2]

    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        for tensors in (self._parameters, self._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = converted(fn, old)  # type: ignore[assignment]
        return self

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), mock.patch.object(torch.nn.Module, "_apply", apply):
        yield


@dataclass(frozen=True)
class InputRole:
    """What an input of a joint graph stands for.

    Attributes:
        is_tangent: Whether it is the gradient of an output.
        index: Position among the flat inputs of the traced module, if it is one of them.
    """

    is_tangent: bool = False
    index: int = -1


def input_role(placeholder: torch.fx.Node) -> InputRole:
    """Return what ``placeholder`` stands for; kinds that we do not know are refused, never guessed."""
    desc = placeholder.meta.get("desc")
    if isinstance(desc, descriptors.TangentAOTInput):
        return InputRole(is_tangent=True)
    if isinstance(desc, descriptors.PlainAOTInput):
        return InputRole(index=desc.idx)
    raise NotImplementedError(f"joint-graph input {placeholder.name} of kind {type(desc).__name__}")


def mutated_input(output_desc: Any) -> Any | None:
    """Return the descriptor of the input that a joint-graph output is copied into, or None."""
    if isinstance(output_desc, descriptors.InputMutationAOTOutput):
        return output_desc.mutated_input
    return None


def output_descriptors(joint: torch.fx.GraphModule) -> list[Any]:
    """Return torch's descriptor of each output of a joint graph, in order."""
    (output,) = joint.graph.find_nodes(op="output")
    return list(output.meta["desc"])


def n_forward_outputs(joint: torch.fx.GraphModule) -> int:
    """Return how many outputs of a joint graph the forward returns: all but one for each of its inputs, the gradients."""
    descs = output_descriptors(joint)
    n_primals = sum(n.op == "placeholder" and not input_role(n).is_tangent for n in joint.graph.nodes)
    n_forward: int = len(descs) - n_primals
    if any(desc.is_grad() for desc in descs[:n_forward]):
        raise NotImplementedError("a joint graph whose gradients do not follow its outputs")
    return n_forward


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors are real, also inside a ``FakeTensorMode``."""
    return unset_fake_temporarily()


@contextlib.contextmanager
def preserved_annotations() -> Any:
    """Let nodes made while tracing carry what `annotate` says."""
    with torch.fx.traceback.preserve_node_meta():
        yield


def annotate(value: Any) -> None:
    """Attach ``value`` to every node traced from here on, and to the backward nodes of those."""
    meta = torch.fx.traceback.get_current_meta()
    meta["custom"] = {**meta.get("custom", {}), _ANNOTATION: value}


def annotation(node: torch.fx.Node) -> Any | None:
    """Return what `annotate` attached to ``node``, or None."""
    return (node.meta.get("custom") or {}).get(_ANNOTATION)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share a storage, while both are alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def bound_kernel(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return what an ATen overload calls: one Python frame less."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target
