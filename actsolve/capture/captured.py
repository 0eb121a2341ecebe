"""Capture: a training step becomes a `Graph`, and stays linked to the joint graph that it came from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from actsolve.capture.batch_norm import drop_unread_statistics
from actsolve.capture.dropout import make_dropout_exact
from actsolve.capture.in_place import InPlaceCall
from actsolve.capture.joint import Joint, trace_joint
from actsolve.capture.to_graph import GraphOfJoint, graph_of
from actsolve.graph import Graph
from actsolve.training_step import TrainingStep


@dataclass(frozen=True)
class Captured:
    """A traced training step and its graph.

    Attributes:
        joint: Torch's joint graph, and how its outputs are laid out.
        parts: Our graph of it, and which fx nodes its ops and values came from.
    """

    joint: Joint
    parts: GraphOfJoint

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

    @cached_property
    def rng_state_val(self) -> torch.Tensor:
        """What a saved RNG state looks like, as a fake tensor of the trace."""
        size_bytes = torch.get_rng_state().nbytes
        with self._fake_mode:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    @property
    def _fake_mode(self) -> Any:
        return self.joint.export.fake_mode


def capture(step: TrainingStep, *, name: str = "") -> Captured:
    """Trace ``step`` and return it with its storage-level graph.

    Works alike for real tensors and for tensors made under a ``FakeTensorMode``; no kernel runs.

    Raises:
        CaptureError: the model cannot be traced.
    """
    joint = trace_joint(step)
    make_dropout_exact(joint.module)
    drop_unread_statistics(joint.module)
    return Captured(joint, graph_of(joint, name))
