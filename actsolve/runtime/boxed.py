"""Python code for a graph, as a function of one list that it empties: arguments are freed at their last use, as locals are.

A step of a small model is hundreds of calls of a few microseconds each, so the way to a kernel counts. What fx writes looks up
``torch.ops.aten.view.default`` at each call, which takes as long as the view itself; here kernels and lists of sizes are looked
up once. Where PyTorch has a binding of its own for a kernel it is called instead, for it reads its arguments in half the time.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from actsolve.capture.torch_internals import bound_kernel
from actsolve.runtime.kernels import kernel_of
from actsolve.runtime.rng import replay_random

aten = torch.ops.aten

_INLINE = (int, bool, str, type(None))
_file_numbers = itertools.count()

# Bindings that take the same arguments and have no other overload which these could mean.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.convolution.default: torch.convolution,
    aten.detach.default: torch.detach,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


def boxed_function(module: fx.GraphModule, name: str) -> Callable[[list[Any]], Any]:
    """Return ``module``'s graph as a function of the list of its arguments.

    Args:
        module: Its placeholders are the arguments; its attributes are bound as they are now.
        name: Of the function, for tracebacks.
    """
    shorten_views(module.graph)
    writer = _Writer(module)
    source = writer.source(name)
    file = f"<actsolve {name} {next(_file_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), writer.bound)
    function: Callable[[list[Any]], Any] = writer.bound[name]
    function._boxed_call = True  # type: ignore[attr-defined]  # tells AOTAutograd how to call it
    return function


def shorten_views(graph: fx.Graph) -> None:
    """Let a transpose of a transpose be what it was made from, and a view of a view a view of its base."""
    for node in list(graph.nodes):
        base = node.args[0] if node.target in (aten.t.default, aten.view.default) else None
        if not isinstance(base, Node) or base.target is not node.target:
            continue
        source = base.args[0]
        assert isinstance(source, Node)
        if node.target is aten.t.default:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif _can_view(source.meta.get("val"), node.args[1]):
            node.replace_input_with(base, source)
        if not base.users:
            graph.erase_node(base)


def _can_view(value: Any, shape: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    stand_in = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
    try:
        stand_in.view(shape)
    except RuntimeError:
        return False
    return True


class _Writer:
    """Writes the code of one graph.

    Attributes:
        bound: The code's globals: kernels and constants.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.bound: dict[str, Any] = {}
        self._module = module
        self._names: dict[int, str] = {}  # of bound objects, by id; `bound` keeps them alive

    def source(self, name: str) -> str:
        """Return the code of a function called ``name``."""
        nodes = list(self._module.graph.nodes)
        arguments = [n.name for n in nodes if n.op == "placeholder"]
        last_use = {used: node for node in nodes for used in node.all_input_nodes}
        lines = [f"{', '.join(arguments)}, = boxed"] if arguments else []
        lines.append("boxed.clear()")
        lines += [f"del {n.name}" for n in nodes if n.op == "placeholder" and n not in last_use]
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            dead = [n.name for n in node.all_input_nodes if last_use[n] is node and n.op != "get_attr"]
            if node.op == "output":
                lines.append(f"return {self._written(tuple(node.args[0]))}")
                break
            if not node.users:
                dead.append(node.name)
            lines.append(f"{node.name} = {self._call(node)}" + (f"; del {', '.join(dead)}" if dead else ""))
        return f"def {name}(boxed):\n" + "".join(f"    {line}\n" for line in lines)

    def _call(self, node: Node) -> str:
        if node.op != "call_function":
            raise NotImplementedError(f"{node.op} in a lowered graph")
        if node.target is operator.getitem:
            return f"{self._written(node.args[0])}[{self._written(node.args[1])}]"
        args = [self._written(a) for a in node.args]
        if node.target is replay_random:
            args[2] = self._bind(_kernel(node.args[2], node.args[3:]), "k")
        args += [f"{k}={self._written(a)}" for k, a in node.kwargs.items()]
        return f"{self._bind(_kernel(node.target, node.args), 'k')}({', '.join(args)})"

    def _written(self, value: Any) -> str:
        """Return an argument as code; what has no short exact form is bound to a name."""
        if isinstance(value, Node):
            return self._bind(_attribute(self._module, str(value.target)), "c") if value.op == "get_attr" else value.name
        if type(value) in _INLINE or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list | tuple) and _holds_node(value):
            inner = ", ".join(map(self._written, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        return self._bind(_plain(value), "c")

    def _bind(self, value: Any, prefix: str) -> str:
        name = self._names.setdefault(id(value), f"_{prefix}{len(self._names)}")
        self.bound[name] = value
        return name


def _kernel(target: Any, args: Sequence[Any]) -> Callable[..., Any]:
    """Return the quickest way to what a call computes."""
    on_tensor = bool(args) and isinstance(args[0], Node) and isinstance(args[0].meta.get("val"), torch.Tensor)
    if on_tensor and target in _BINDINGS:
        return _BINDINGS[target]
    return bound_kernel(kernel_of(target, args))


def _plain(value: Any) -> Any:
    """Return fx's own kinds of list as plain ones."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


def _holds_node(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_node, value))
    return isinstance(value, Node)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module
