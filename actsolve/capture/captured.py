"""Capture: a training step becomes a `Graph`, and stays linked to the joint graph that it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.fx import Node

from actsolve.capture.autocast import share_casts
from actsolve.capture.batch_norm import drop_unread_statistics
from actsolve.capture.dropout import refuse_other_layouts
from actsolve.capture.eager_regions import refuse_sums
from actsolve.capture.gradients import separate
from actsolve.capture.in_place import InPlaceCall
from actsolve.capture.joint import Joint, trace_joint
from actsolve.capture.replay import device_of
from actsolve.capture.tangents import expected, without
from actsolve.capture.to_graph import GraphOfJoint, graph_of
from actsolve.errors import CaptureError
from actsolve.graph import Graph, Kind
from actsolve.training_step import TrainingStep


@dataclass(frozen=True)
class Captured:
    """A traced training step and its graph.

    Attributes:
        joint: Torch's joint graph, and how its outputs are laid out.
        parts: Our graph of it, and which fx nodes its ops and values came from.
        full: The joint graph whose backward starts from every output.
        accumulates: Whether gradients of parameters are added to those that are there as soon as they are made.
    """

    joint: Joint
    parts: GraphOfJoint
    full: Joint
    accumulates: bool = False

    @property
    def graph(self) -> Graph:
        return self.parts.graph

    @property
    def op_nodes(self) -> list[Node | None]:
        return self.parts.op_nodes

    @property
    def value_nodes(self) -> list[Node | None]:
        return self.parts.value_nodes

    @property
    def value_of(self) -> dict[Node, int]:
        return self.parts.value_of

    @property
    def in_place(self) -> dict[int, InPlaceCall]:
        return self.parts.in_place

    @property
    def n_forward_outputs(self) -> int:
        return self.parts.n_forward_outputs

    def rng_device(self, value: int) -> torch.device:
        """Return whose generator's state ``value`` is: that of the op right after the one that saves it."""
        producer = self.graph.values[value].producer
        node = self.op_nodes[producer + 1] if producer is not None else None
        assert node is not None
        return device_of(node)

    def rng_state_val(self, value: int) -> torch.Tensor:
        """Return what the RNG state ``value`` looks like, as a fake tensor of the trace."""
        with self.joint.export.fake_mode:
            return torch.empty(self.graph.values[value].size_bytes, dtype=torch.uint8, device="cpu")

    @property
    def tangents(self) -> frozenset[str]:
        """Names of the tangents that the backward is given."""
        return frozenset(t.name for t in self.joint.tangents) - self.joint.undefined

    def starting_from(self, tangents: frozenset[str]) -> Captured:
        """Return the same step with a backward that is given just ``tangents``."""
        other = _captured(self.full, tangents, self.graph.name)
        return other.accumulating() if self.accumulates else other

    def accumulating(self) -> Captured:
        """Return the same step where the gradients of parameters leave as soon as they are made, for those that are there."""
        leaving = self.of_parameters
        # A gradient that is left to autograd is read after its value is freed: nothing may be written over it.
        ops = tuple(replace(op, in_place=None) if op.in_place and op.in_place[0] in leaving else op for op in self.graph.ops)
        graph = replace(self.graph, ops=ops, gradients=tuple(g for g in self.graph.gradients if g not in leaving))
        return replace(self, parts=replace(self.parts, graph=graph), accumulates=True)

    @cached_property
    def of_parameters(self) -> dict[int, dict[Node, int]]:
        """Per value the gradients of parameters that it holds, each with the index of its parameter among the inputs."""
        (output,) = self.joint.module.graph.find_nodes(op="output")
        found: dict[int, dict[Node, int]] = {}
        others: set[int] = set()  # these also hold a gradient that stays to the end, such as the other part of a cat's
        for index, node in enumerate(output.args[0][self.n_forward_outputs :]):
            of_parameter = index < len(self.joint.state) and self.joint.state[index][0] is Kind.PARAMETER
            if isinstance(node, Node) and of_parameter and index in self.joint.leaf_indices:
                found.setdefault(self.value_of[node], {})[node] = index
            elif isinstance(node, Node):
                others.add(self.value_of[node])
        return {value: nodes for value, nodes in found.items() if value not in others}


def capture(step: TrainingStep, *, name: str = "", tangents: frozenset[str] | None = None) -> Captured:
    """Trace ``step`` and return it with its storage-level graph.

    Works alike for real tensors and for tensors made under a ``FakeTensorMode``; no kernel runs.

    Args:
        step: What to trace.
        name: What it is called in reports.
        tangents: Which outputs the backward starts from, if that is known from an earlier step.

    Raises:
        CaptureError: the model cannot be traced.
    """
    try:
        joint = trace_joint(step)
        refuse_other_layouts(joint.module)
        drop_unread_statistics(joint.module)
        share_casts(joint)
        return _captured(joint, tangents or expected(joint, loss_inside=step.loss_fn is not None), name)
    except NotImplementedError as error:
        raise CaptureError(f"cannot plan {type(step.model).__name__}", why=str(error)) from error


def _captured(full: Joint, tangents: frozenset[str], name: str) -> Captured:
    joint = without(full, frozenset(t.name for t in full.tangents) - tangents)
    refuse_sums(joint.module, given=True)
    separate(joint.module, joint.n_forward_outputs)
    return Captured(joint, graph_of(joint, name), full)
