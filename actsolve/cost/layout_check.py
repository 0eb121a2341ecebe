"""Each kernel of a trace is run once, to see whether it lays out its results as the trace believes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from actsolve.capture.captured import Captured, capture
from actsolve.capture.layouts import Layout, note
from actsolve.capture.to_graph import tensors_of
from actsolve.cost.sample_call import sample_call
from actsolve.errors import CaptureError
from actsolve.runtime.grad_mode import in_training, looks_at_grad_mode
from actsolve.training_step import TrainingStep

_ROUNDS = 50  # a corrected layout may change the calls that follow, and so on: one a round, for in-place ops on views
_CHECKED: set[str] = set()  # calls that were run in this process


def capture_as_laid_out(step: TrainingStep, *, name: str = "", tangents: frozenset[str] | None = None) -> Captured:
    """Return the trace of ``step`` with its tensors as the kernels of this device lay them out.

    For fake tensors nothing runs, and torch's meta functions are believed. What a kernel has shown is
    remembered while the process lasts.

    Raises:
        CaptureError: the model cannot be traced.
    """
    for _ in range(_ROUNDS):
        captured = capture(step, name=name, tangents=tangents)
        if not captured.joint.is_real or not _note_layouts(captured):
            return captured
        step = replace(step, eager=captured.joint.eager)  # found once
    raise CaptureError(f"cannot trace {type(step.model).__name__}", why="its kernels lay out their results differently each time")


def _note_layouts(captured: Captured) -> bool:
    """Run what was not run yet; return whether a result is laid out in another way than traced.

    What reads such a result waits for the next trace: a kernel may crash where it is given less than it expects.
    """
    doubtful: set[int] = set()
    for op, node in zip(captured.graph.ops, captured.op_nodes, strict=True):
        if not doubtful.isdisjoint(op.inputs):
            doubtful.update(op.outputs)
        elif node is not None and op.signature not in _CHECKED:
            _CHECKED.add(op.signature)
            traced = tensors_of(node)
            results = _results(node)
            if len(results) != len(traced):
                continue  # could not be run
            real = [Layout.of(r) if isinstance(r, torch.Tensor) else _NOTHING for r in results]
            wrong = [r if r.differs(Layout.of(t)) else None for r, t in zip(real, traced, strict=True)]
            if any(wrong):
                note(node.target, op.signature, wrong)
                doubtful.update(op.outputs)
    return bool(doubtful)


@contextlib.contextmanager
def _without_autocast(gpus: list[torch.device]) -> Iterator[None]:
    """Run kernels as the graph does: where the step is planned in an autocast region, its casts are ops of the graph."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", *(gpu.type for gpu in gpus)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


_NOTHING = Layout((0,), (1,), 0, 0)  # an output that its mask leaves out


def _results(node: Node) -> list[torch.Tensor | None]:
    """Return what the kernel of ``node`` makes of made-up arguments; an empty list where it cannot be run by itself."""
    traced = tensors_of(node)
    gpus = list({t.device for t in traced if t.device.type == "cuda"})
    try:
        with torch.no_grad(), torch.random.fork_rng(gpus), _without_autocast(gpus):
            call = sample_call(node)
            run = functools.partial(in_training, call.target) if looks_at_grad_mode(call.target) else call.target
            results = run(*call.args, **call.kwargs)
    except (TypeError, RuntimeError, IndexError, ValueError, NotImplementedError):
        return []
    return [leaf for leaf in tree_leaves(results) if leaf is None or isinstance(leaf, torch.Tensor)]
