"""What the two graphs of a schedule that copies hold: which calls, in which order, and what is saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from copies import LINKS
from kinds import of, step, x
from torch import fx, nn

from actsolve.capture.captured import Captured, capture
from actsolve.compiled import compile_step
from actsolve.cost.link_speed import EMULATED
from actsolve.errors import ScheduleError, UsageError
from actsolve.lower import Lowered, lower, lower_backward
from actsolve.plan import Copies
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.emulated_engine import EmulatedEngine
from actsolve.runtime.engines import new_engine
from actsolve.schedule import Schedule, StepKind, build_schedule

aten = torch.ops.aten


def mlp() -> Captured:
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Sigmoid())]
    return capture(step(nn.Sequential(*layers), x(3, 4), loss_fn=lambda y: y.square().sum()))


def scheduled(captured: Captured, *, free_at: int, back_at: int) -> Schedule:
    """``sigmoid`` is offloaded, all else kept. The ops are counted from the beginning of the backward."""
    graph = captured.graph
    value = next(v for v, found in enumerate(graph.values) if found.name == "sigmoid")
    copies = {value: Copies(graph.n_forward + free_at, graph.n_forward + back_at)}
    return build_schedule(graph, frozenset(graph.decidable) - {value}, offloaded=copies)


def lowered(captured: Captured, schedule: Schedule) -> tuple[Lowered, CopyEngine[Any]]:
    engine = EmulatedEngine(LINKS, CopyOptions())
    return lower(captured, schedule, engine), engine


def copies(module: fx.GraphModule) -> list[str]:
    return [
        n.target.__name__
        for n in module.graph.nodes
        if getattr(n.target, "__self__", None) is not None
        and n.op == "call_function"
        and isinstance(n.target.__self__, CopyEngine)
    ]


def test_what_left_in_the_forward_is_saved_on_the_host_only() -> None:
    captured = mlp()
    both, engine = lowered(captured, scheduled(captured, free_at=0, back_at=2))
    assert copies(both.forward) == ["lease", "copy_out", "wait_out"]
    assert copies(both.backward) == ["copy_back", "wait_back"]
    assert "sigmoid.host" in both.saved and "sigmoid" not in both.saved
    assert engine.host_bytes == 3 * 4 * 4


def test_what_leaves_in_the_backward_is_saved_on_both_sides_until_then() -> None:
    captured = mlp()
    both, _ = lowered(captured, scheduled(captured, free_at=2, back_at=4))
    assert copies(both.forward) == ["lease", "copy_out"]
    assert copies(both.backward) == ["wait_out", "copy_back", "wait_back"]
    assert {"sigmoid.host", "sigmoid"} <= set(both.saved)
    nodes = list(both.backward.graph.nodes)
    wait = next(n for n in nodes if n.target.__class__.__name__ == "method" and n.target.__name__ == "wait_out")
    device = next(n for n in nodes if n.name == "saved_sigmoid")
    assert list(device.users) == [wait], "after the wait its memory is free"


def test_a_backward_made_later_copies_back_on_demand() -> None:
    captured = mlp()
    both, engine = lowered(captured, scheduled(captured, free_at=0, back_at=1))
    other = lower_backward(captured, both.saved, any_layout=True, engine=engine)
    assert copies(other) == ["copy_back", "wait_back"]
    calls = [n for n in other.graph.nodes if n.op == "call_function"]
    back = next(i for i, n in enumerate(calls) if n.target == engine.copy_back)
    assert calls[back + 1].target == engine.wait_back
    assert sum(n.target is aten.addmm.default for n in calls) == 0, "nothing is replayed"


def test_a_backward_made_later_reads_what_is_on_the_device_too() -> None:
    captured = mlp()
    both, engine = lowered(captured, scheduled(captured, free_at=2, back_at=4))
    other = lower_backward(captured, both.saved, any_layout=True, engine=engine)
    assert copies(other) == ["wait_out"], "for its memory may not be freed before"


def test_nothing_that_copies_is_refused() -> None:
    captured = mlp()
    with pytest.raises(ScheduleError, match="copy_back of sigmoid, and there is nothing that copies"):
        lower(captured, scheduled(captured, free_at=0, back_at=2))
    schedule = scheduled(captured, free_at=0, back_at=2)
    planned: Any = SimpleNamespace(schedule=schedule, problem=SimpleNamespace(links=None), notes=(EMULATED,))
    with pytest.raises(ScheduleError, match="no link is known"):
        compile_step(captured, planned)


def test_a_copy_out_in_the_backward_is_refused() -> None:
    captured = mlp()
    steps = list(scheduled(captured, free_at=0, back_at=2).steps)
    out = next(s for s in steps if s.kind is StepKind.COPY_OUT)
    steps.remove(out)
    with pytest.raises(ScheduleError, match="sigmoid is copied out in the backward"):
        lowered(captured, Schedule((*steps, out)))


@pytest.mark.parametrize("device", ["mps", "xpu:1"])
def test_a_device_without_an_engine_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=f"nothing can be offloaded from {device}"):
        new_engine(torch.device(device), LINKS, CopyOptions())


def test_a_real_link_is_not_slowed_down() -> None:
    with pytest.raises(UsageError, match="the link of cuda:0 cannot be slowed down"):
        new_engine(torch.device("cuda:0"), LINKS, CopyOptions(speed=0.5))


def test_a_storage_of_another_size_is_refused() -> None:
    engine = EmulatedEngine(LINKS, CopyOptions())
    place = engine.place(16)
    engine.prepare()
    with pytest.raises(ScheduleError, match="a value of 16 bytes is copied out and has 24 bytes"):
        engine.copy_out(engine.lease(), torch.ones(6)[:4], place, 16)


def test_a_step_without_copies_has_no_engine() -> None:
    captured = capture(of(lambda m, h: m.a(h).sum()))
    graph = captured.graph
    planned: Any = SimpleNamespace(schedule=build_schedule(graph, frozenset(graph.decidable)), notes=(EMULATED,))
    assert compile_step(captured, planned).backward.engine is None
