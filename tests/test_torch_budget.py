"""Baselines that look at what was traced: selective recomputation of attention, and what PyTorch's own partitioner saves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_baselines import UNLIMITED, captured_problem, simulated
from test_planners import chain, problem_of
from torch import Tensor, nn

import models_zoo
from actsolve.capture.captured import capture
from actsolve.capture.torch_partitioner import saved_by_torch
from actsolve.check import check
from actsolve.errors import CaptureError
from actsolve.planners import PlannerOptions, plan
from actsolve.planners.keep_all import keep_all
from actsolve.planners.selective import attention_core
from actsolve.planners.torch_budget import MEMORY_BUDGETS
from actsolve.schedule import StepKind
from actsolve.training_step import TrainingStep


class Attention(nn.Module):
    """Unfused, with dropout, as people wrote it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 4.0
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        scores = scores.masked_fill(mask == 0, float("-inf"))
        out: Tensor = self.out(self.dropout(torch.softmax(scores, dim=-1)) @ v)
        return out


def test_selective_drops_the_core_of_attention_and_nothing_else() -> None:
    problem = captured_problem(TrainingStep(Attention(), (torch.randn(2, 8, 16),), loss_fn=lambda y: y.sum()))
    graph = problem.graph
    targets = {graph.ops[op].target for op in attention_core(graph)}
    core = {"bmm", "div", "masked_fill", "_softmax", "native_dropout"}
    assert {t.split(".")[1] for t in targets} == core
    dropped = plan(problem, "keep_all").kept - plan(problem, "selective").kept
    producers = [graph.ops[p].target.split(".")[1] for v in dropped if (p := graph.values[v].producer) is not None]
    assert sorted(producers) == ["_softmax", "native_dropout", "native_dropout"]
    timeline = simulated(problem, plan(problem, "selective"))
    ran_again = {graph.ops[s.op].target.split(".")[1] for s in timeline.schedule.steps if s.kind is StepKind.REPLAY and s.op}
    assert ran_again == core


def test_selective_has_nothing_to_do_where_attention_is_fused_or_absent() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    fused = captured_problem(TrainingStep(Fused(), (torch.randn(2, 8, 16),), loss_fn=lambda y: y.sum()))
    found = plan(fused, "selective")
    assert not found.found and found.note == "attention is fused"
    assert plan(problem_of(chain(4)), "selective").note == "there is no attention"


def test_torch_saves_no_more_with_a_smaller_memory_budget() -> None:
    step = models_zoo.get("conv-chain-mini")(layers=6)
    captured = capture(step)
    problem, saved = captured_problem(step), saved_by_torch(captured)
    sizes = [sum(captured.graph.values[v].size_bytes for v in saved(budget)) for budget in MEMORY_BUDGETS]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1] == 0
    assert not plan(problem, "torch_budget").found
    options = PlannerOptions(torch_saved=saved)
    assert plan(problem, "torch_budget", options).note == "activation_memory_budget 1"
    hurried = plan(replace(problem, budget_bytes=1), "torch_budget", replace(options, time_limit_s=1e-9))
    assert hurried.note == "activation_memory_budget 1; time is up"
    most = simulated(problem, keep_all(problem)).peak_bytes
    for share in (0.9, 0.6):
        limited = replace(problem, budget_bytes=int(share * most))
        timeline = simulated(limited, plan(limited, "torch_budget", options))
        assert check(replace(limited, budget_bytes=UNLIMITED), timeline.schedule) == timeline.peak_bytes


def test_a_partitioner_that_fails_is_a_reason() -> None:
    def fails(_: float) -> frozenset[int]:
        raise CaptureError("PyTorch's partitioner fails on this step", why="it is odd")

    found = plan(problem_of(chain(4)), "torch_budget", PlannerOptions(torch_saved=fails))
    assert found.note == "PyTorch's partitioner fails on this step: it is odd"
    broken: Any = SimpleNamespace(graph=chain(3), value_of={}, joint=SimpleNamespace(module=None), n_forward_outputs=1)
    with pytest.raises(CaptureError, match="partitioner fails"):
        saved_by_torch(broken)(0.5)
