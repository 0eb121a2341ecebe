"""What is private in autograd's engine: which gradients the backward that runs now adds up, and where.

A second shim beside `torch_internals`, with the same promise: nothing else looks there. Written against torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch


def accumulates_into(index: int) -> torch.Tensor | None:
    """Return the leaf to whose ``.grad`` the running backward will add the gradient of input ``index``, if nobody else sees it.

    To be called in the backward of a function of `compile_joint`. None where the input is no leaf, or not trained any more; where
    its gradient is returned (``torch.autograd.grad``), not wanted or differentiated; where more of it comes from elsewhere in the
    graph, for autograd adds that up first; where a hook sees it; where several backwards run; and where processes share it.
    """
    node = torch._C._current_autograd_node()
    assert node is not None
    accumulator = node.next_functions[index][0]
    leaf: torch.Tensor | None = getattr(accumulator, "variable", None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (
        accumulator is None
        or leaf is None
        or distributed
        or torch.is_grad_enabled()
        or _RUNNING.in_graph
        or not leaf.requires_grad  # it was frozen since the forward
        or _edges_into(accumulator) != 1  # autograd adds up all that arrives before it adds that
        or _has_hooks(accumulator)
        or leaf._backward_hooks
        or leaf._post_accumulate_grad_hooks
    ):
        return None
    try:
        added = torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # so torch says that its gradient is captured for `torch.autograd.grad`
        return None
    return leaf if added else None


def _has_hooks(node: Any) -> bool:
    """Whether a hook is called before or after ``node`` runs: torch has one dict of each kind, which every handle refers to."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        n_hooks = len(handle.hooks_dict_ref())
        handle.remove()
        if n_hooks > 1:
            return True
    return False


def _edges_into(accumulator: Any) -> int | None:
    """Return how many edges of the graph of the running backward lead to ``accumulator``; None if that cannot be seen."""
    task = torch._C._current_graph_task_id()
    if _RUNNING.task != task:
        _RUNNING.task, _RUNNING.into = task, _edges_of_running()
    return None if _RUNNING.into is None else _RUNNING.into.get(accumulator, 0)


def _edges_of_running() -> dict[Any, int] | None:
    """Count the edges to each accumulator, from the roots that the caller of the backward gave."""
    pending = [edge.node for root in _roots_of_running() for edge in [_edge(root)]]
    if not pending:
        return None
    into: dict[Any, int] = {node: 1 for node in pending if hasattr(node, "variable")}
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                into[following] = into.get(following, 0) + 1
            elif following is not None:
                pending.append(following)
    return into


def _edge(root: Any) -> Any:
    return root if isinstance(root, torch.autograd.graph.GradientEdge) else torch.autograd.graph.get_gradient_edge(root)


def _roots_of_running() -> list[Any]:
    """Return what the backward that runs now was called with; nothing if several run, or none is found.

    Its caller waits for it in torch's Python, in this thread or, on a GPU, in another.
    """
    code = torch.autograd.graph._engine_run_backward.__code__
    running = []
    caller: Any = None
    for caller in sys._current_frames().values():
        while caller is not None:
            if caller.f_code is code:
                running.append(list(caller.f_locals["t_outputs"]))
            caller = caller.f_back
    return running[0] if len(running) == 1 else []  # no frame is held by now: its locals, gradients among them, would be


class _Running(threading.local):
    """What is known of the backward that runs in this thread."""

    task: int = -1
    into: dict[Any, int] | None = None
    in_graph = False


_RUNNING = _Running()


@contextlib.contextmanager
def gradients_in_graph() -> Iterator[None]:
    """Within this context the gradients that a backward makes are part of autograd's graph, whatever its mode says."""
    _RUNNING.in_graph = True
    try:
        yield
    finally:
        _RUNNING.in_graph = False


def forget_running() -> None:
    """Let go of the graph of the backward that ran: it holds parameters."""
    _RUNNING.task, _RUNNING.into = -1, None
