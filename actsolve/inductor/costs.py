"""What each kernel of Inductor's takes.

A generated kernel moves its inputs and outputs once, and what it computes between is free. A kernel that is called (a matrix
product, a convolution, attention) is measured here by itself, or modelled by a profile.

A replay of a generated kernel whose outputs are read next by a generated kernel over as many elements becomes part of that one:
then it takes only the reading of what that one does not read anyway. Random numbers, which are made from a saved seed, take
their time on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from actsolve.capture.to_graph import signature
from actsolve.capture.torch_internals import real_tensors
from actsolve.cost.hardware import profile
from actsolve.cost.measure import measure_costs
from actsolve.cost.roofline import LAUNCH_S, moved_bytes, roofline_costs
from actsolve.cost.timing import COPY_BYTES, copy, timed
from actsolve.inductor.kernels import Kernel
from actsolve.inductor.layouts import as_called
from actsolve.inductor.split import Split
from actsolve.inductor.torch_inductor import Strides, computes_with_channels_last, is_random_number
from actsolve.problem import Costs

_RANDOM_S = {"cpu": 5e-9}  # per number on a CPU, whose generated code makes them one at a time


def costs_of(split: Split, hardware: str, device: torch.device, strides: Mapping[str, Strides]) -> Costs:
    """Return what each op of a split step costs.

    Args:
        split: The step.
        hardware: ``auto`` measures what is called on ``device``; else a profile's name.
        device: What the step runs on.
        strides: With which Inductor's own step calls its kernels, by their names (`Partitioner.strides`).
    """
    if hardware == "auto":
        calls = _calls(split, strides)
        known_as = zip(split.graph.ops, calls, strict=True)
        ops = (op if call is None else replace(op, signature=signature(call)) for op, call in known_as)
        called = measure_costs(replace(split.graph, ops=tuple(ops)), calls)
        with real_tensors(), torch.no_grad():
            bytes_per_s = 2 * COPY_BYTES / timed(copy(device), device).seconds
    else:
        called = roofline_costs(split.graph, profile(hardware))
        bytes_per_s = profile(hardware).memory_rate().per_s
    seconds, replay_seconds = list(called.seconds), list(called.replay_seconds)
    for index, (op, kernel) in enumerate(zip(split.graph.ops, split.kernels, strict=True)):
        if kernel.fused:
            random_s = _RANDOM_S.get(device.type, 0.0) * _random_numbers(kernel)
            seconds[index] = LAUNCH_S + moved_bytes(split.graph, op) / bytes_per_s + random_s
            also = _bytes_fused_away(split, index)
            replay_seconds[index] = seconds[index] if also is None else also / bytes_per_s + random_s
    source = f"{called.source}; generated kernels by their bytes"
    return Costs(tuple(seconds), tuple(replay_seconds), called.workspace_bytes, source, called.unknown)


def _calls(split: Split, strides: Mapping[str, Strides]) -> list[Node | None]:
    """Return per op the call that it makes, with what it reads laid out as Inductor does; None for a generated kernel."""
    calls = [None if kernel.fused else kernel.nodes[0] for kernel in split.kernels]
    if not computes_with_channels_last(split.forward):
        return calls
    return [None if call is None else as_called(call, strides) for call in calls]


def _random_numbers(kernel: Kernel) -> int:
    return sum(node.meta["val"].numel() for node in kernel.nodes if is_random_number(node))


def _bytes_fused_away(split: Split, index: int) -> int | None:
    """Return the bytes that a replay moves besides those of its reader, if it becomes part of that; else None."""
    graph = split.graph
    readers = {reader for v in graph.ops[index].outputs for reader in graph.backward_readers[v]}
    if len(readers) != 1:
        return None
    (reader,) = readers
    if not split.kernels[reader].fused or split.kernels[reader].elements != split.kernels[index].elements:
        return None
    read = set(graph.ops[index].inputs) - set(graph.ops[reader].inputs)
    return sum(graph.values[v].size_bytes for v in read)
