"""Offloading as it runs: bit for bit what eager computes, whatever is copied when, and however late copies come."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import kinds_of_autograd  # noqa: F401  # they register themselves
import kinds_of_layers  # noqa: F401
import kinds_of_state  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from alike import assert_equal_training, made, step_loss
from copies import LINKS, offload_problem, prompt_copies, random_schedule
from kinds import KINDS, of, x
from offloaded import (
    MODELS,
    PLAIN,
    Trained,
    assert_bitwise,
    captured_of,
    conv_skip,
    copy_threads,
    drawn,
    eager_gradients,
    mlp,
    trained,
    transformer,
)
from torch.multiprocessing.reductions import StorageWeakRef

from actsolve.capture.captured import capture
from actsolve.check import check
from actsolve.cost.layout_check import capture_as_laid_out
from actsolve.errors import UsageError
from actsolve.experiments import late_out, on_demand, synchronous
from actsolve.links import Links
from actsolve.plan import Copies
from actsolve.runtime import host_memory
from actsolve.runtime.copy_engine import CopyEngine, CopyOptions
from actsolve.runtime.emulated_link import Copy
from actsolve.runtime.exactness import bitwise_equal
from actsolve.runtime.measure_step import interleaved_times, measured_peak
from actsolve.schedule import Schedule, StepKind, build_schedule
from actsolve.simulate import simulate
from actsolve.training_step import TrainingStep


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_eager_does(name: str, seed: int) -> None:
    make = MODELS[name]
    captured, _, schedule = drawn(make, seed)
    ours = Trained(made(make), captured, schedule, PLAIN, LINKS)
    assert_equal_training(made(make), ours.step, ours.module, step_loss(ours.step), 3, nullcontext, str(seed))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if i % 20 else []) for i, n in enumerate(KINDS)])
def test_every_kind_trains_as_eager_does(name: str) -> None:
    kind = KINDS[name]
    given = made(kind.make)
    with kind.context():
        captured = capture_as_laid_out(given)
    problem = offload_problem(captured.graph)
    if not problem.offloadable:
        pytest.skip("nothing of it can be offloaded")
    schedule = random_schedule(problem, random.Random(1), share=0.8)
    check(problem, schedule)
    ours = made(kind.make)
    with kind.context():
        module = Trained(ours, captured, schedule, PLAIN, LINKS).module
    assert_equal_training(made(kind.make), ours, module, kind.loss or step_loss(given), 2, kind.context, name)


@pytest.mark.parametrize("change", [synchronous, late_out, on_demand])
@pytest.mark.parametrize("options", [PLAIN, CopyOptions(pageable=True), CopyOptions(speed=0.5)])
@pytest.mark.parametrize("name", ["transformer"])
def test_experiments_train_as_eager_does(name: str, options: CopyOptions, change: Callable[..., Schedule]) -> None:
    make = MODELS[name]
    captured, problem, schedule = drawn(make, 5)
    other = change(captured.graph, schedule)
    check(problem, other)
    ours = Trained(made(make), captured, other, options, LINKS)
    assert_equal_training(made(make), ours.step, ours.module, step_loss(ours.step), 2, nullcontext, name)


# -- backwards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_a_second_backward_copies_back_again(name: str, seed: int) -> None:
    ours = trained(MODELS[name], seed, share=0.7)
    torch.manual_seed(0)
    loss = ours.loss()
    loss.backward(retain_graph=True)
    once = ours.gradients()
    assert_bitwise(once, eager_gradients(MODELS[name]))
    ours.module.zero_grad()
    loss.backward()
    assert_bitwise(ours.gradients(), once)


@pytest.mark.parametrize("last_first", [True, False])
def test_two_forwards_before_their_backwards(last_first: bool) -> None:
    ours = trained(transformer, 2)
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses.append(ours.loss())
    assert ours.engine.n_arenas == 2
    for seed in (1, 0) if last_first else (0, 1):
        ours.module.zero_grad()
        losses[seed].backward()
        assert_bitwise(ours.gradients(), eager_gradients(transformer, seed=seed))
    for _ in range(3):
        ours.loss().backward()
    assert ours.engine.n_arenas == 2, "both are used again"


def two_outputs() -> TrainingStep:
    return of(lambda m, h: (m.a(m.b(h).tanh()).tanh(), m.b(F.dropout(m.a(h).exp(), 0.5)).tanh()))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("which", [0, 1])
def test_a_backward_from_one_of_two_outputs(which: int, seed: int) -> None:
    """It was planned for both: what it needs and is on the host is copied back, or replayed."""
    captured, problem, _ = drawn(two_outputs, 0)
    rng = random.Random(seed)
    schedule = random_schedule(problem, rng, share=1.0)
    check(problem, schedule)
    ours = Trained(made(two_outputs), captured, schedule, PLAIN, LINKS)
    torch.manual_seed(4)
    ours.module(*ours.step.args)[which].square().sum().backward()
    reference = made(two_outputs)
    torch.manual_seed(4)
    reference.model(*reference.args)[which].square().sum().backward()
    for p, q in zip(reference.model.parameters(), ours.module.parameters(), strict=True):
        assert bitwise_equal(p.grad, q.grad)


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_in_another_layout(seed: int) -> None:
    """The mean outside of the step passes one expanded element."""

    def make() -> TrainingStep:
        return of(lambda m, h: m.b(m.a(h).tanh().relu().exp().tanh()).tanh(), x(5, 4))

    ours = trained(make, seed)
    ours.module(*ours.step.args).mean().backward()
    reference = made(make)
    reference.model(*reference.args).mean().backward()
    for p, q in zip(reference.model.parameters(), ours.module.parameters(), strict=True):
        assert bitwise_equal(p.grad, q.grad)


def test_saved_tensors_that_were_replaced_are_refused() -> None:
    ours = trained(mlp)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = ours.loss()
    with pytest.raises(UsageError, match="saved_tensors_hooks"):
        loss.backward()


# -- exceptions, threads, memory --------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("call", ["copy_out", "wait_out", "copy_back", "wait_back"])
def test_after_an_exception_the_next_step_is_right(call: str, seed: int) -> None:
    """It comes at any of the calls, with copies in flight."""
    fails_at = seed

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            nonlocal fails_at
            fails_at -= 1
            if fails_at == -1:
                raise Interrupted
            return original(self, *args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyEngine, call, failing(getattr(CopyEngine, call)))  # before the graphs are written: they call it
        ours = trained(mlp, seed, links=Links(d2h=2e5, h2d=2e5))
    with pytest.raises(Interrupted):
        for _ in range(4):
            ours.loss().backward()
    ours.module.zero_grad()
    ours.loss().backward()
    assert_bitwise(ours.gradients(), eager_gradients(mlp))
    assert ours.engine.n_arenas == 1, "once its copies were done it was free again"


def test_threads_begin_with_a_copy_and_end_with_the_module() -> None:
    gc.collect()
    assert copy_threads() == []
    ours = trained(mlp)
    engine = weakref.ref(ours.engine)
    assert copy_threads() == []
    loss = ours.loss()
    assert copy_threads() == ["actsolve-out"]
    loss.backward()
    assert sorted(copy_threads()) == ["actsolve-back", "actsolve-out"]
    del ours
    gc.collect()
    assert engine() is not None, "a loss that can still be differentiated"
    del loss
    gc.collect()
    assert engine() is None and copy_threads() == []


def test_no_thread_is_left_after_an_exception_with_copies_in_flight() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyEngine, "wait_out", lambda *_: 1 / 0)
        ours = trained(mlp, links=Links(d2h=1e5, h2d=1e5))
    with pytest.raises(ZeroDivisionError):
        ours.loss()
    del ours
    gc.collect()
    assert copy_threads() == []


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """As many tensors and copies are alive after any number of steps, but for a copy that ends just then; and one arena."""

    def alive() -> list[int]:
        gc.collect()
        return [sum(issubclass(type(o), kind) for o in gc.get_objects()) for kind in (torch.Tensor, Copy, StorageWeakRef)]

    ours = trained(transformer, 3)
    ours.loss().backward()
    before = alive()
    for _ in range(100):
        ours.loss().backward()
    assert all(now < then + 50 for now, then in zip(alive(), before, strict=True))  # one object a step would be 100
    assert ours.engine.n_arenas == 1


def test_no_host_memory_is_taken_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trained(mlp)

    def refuse(_: int) -> Any:
        raise AssertionError("host memory is taken in a step")

    monkeypatch.setattr("actsolve.runtime.emulated_engine.new_host_memory", refuse)
    for _ in range(3):
        ours.loss().backward()


def test_host_memory_that_is_not_there_is_refused_when_the_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 100)
    with pytest.raises(UsageError, match="of host memory are needed for what is offloaded"):
        trained(mlp)


def test_each_value_has_a_place_of_its_own() -> None:
    captured, _, schedule = drawn(conv_skip, 0, share=1.0)
    sizes = [captured.graph.values[s.value].size_bytes for s in schedule.steps if s.kind is StepKind.COPY_OUT]  # type: ignore[index]
    ours = Trained(made(conv_skip), captured, schedule, PLAIN, LINKS)
    assert sum(sizes) <= ours.engine.host_bytes < sum(sizes) + 64 * len(sizes)


# -- late copies, peak, time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_late_copies_change_nothing(name: str) -> None:
    """Each piece is held up for a random while: what is read too early would be read wrong."""
    expected = eager_gradients(MODELS[name])
    for seed in range(8):
        draw = random.Random(seed)
        delays = CopyOptions(delay=lambda draw=draw: draw.choice((0.0, 0.0, 0.001, 0.004)))  # type: ignore[misc]
        ours = trained(MODELS[name], seed, share=0.7, options=delays)
        for _ in range(2):
            ours.module.zero_grad()
            torch.manual_seed(0)
            ours.loss().backward()
            assert_bitwise(ours.gradients(), expected)


def test_a_copy_that_is_not_waited_for_is_seen() -> None:
    """The test above sees what it is for: without waits the gradients are wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actsolve.runtime.emulated_engine.EmulatedEngine._wait", lambda *_: None)
        ours = trained(mlp, options=CopyOptions(delay=lambda: 0.01))
        torch.manual_seed(0)
        ours.loss().backward()
    assert not all(map(bitwise_equal, ours.gradients(), eager_gradients(mlp)))


def wide() -> TrainingStep:
    return mlp(width=512, layers=6)


def test_the_peak_is_that_of_the_simulator_and_the_host_does_not_count() -> None:
    def make() -> TrainingStep:
        return replace(mlp(256, 6), args=(x(2048, 256),))

    captured = capture(made(make))
    graph, problem = captured.graph, offload_problem(captured.graph)
    layers = [v for v in sorted(problem.offloadable) if graph.backward_readers[v]][:5]
    assert {graph.values[v].size_bytes for v in layers} == {2048 * 256 * 4}
    soon = {v: Copies(graph.forward_readers[v][-1] + 2, graph.backward_readers[v][0]) for v in layers}
    schedule = build_schedule(graph, frozenset(graph.decidable) - soon.keys(), offloaded=soon)
    ours = Trained(made(make), captured, schedule, PLAIN, Links(d2h=20e9, h2d=20e9))

    def run() -> None:
        result = ours.module(*ours.step.args)  # the caller holds the output, too
        result[0].backward()

    predicted = simulate(problem, schedule).peak_bytes
    assert measured_peak(run, 0, before=ours.module.zero_grad) == pytest.approx(predicted, rel=0.005)
    assert ours.engine.host_bytes == 5 * 2048 * 256 * 4
    keep_all = simulate(problem, build_schedule(graph, frozenset(graph.decidable)))
    assert predicted < 0.7 * keep_all.peak_bytes


def test_stalls_are_as_long_as_the_link_is_slow() -> None:
    links = Links(d2h=20e6, h2d=20e6, d2h_both=20e6, h2d_both=20e6)
    captured, _, schedule = drawn(wide, 0, share=1.0)
    ours = Trained(made(wide), captured, synchronous(captured.graph, schedule), PLAIN, links)
    ours.loss().backward()
    begin = time.perf_counter()
    ours.loss().backward()
    took_s = time.perf_counter() - begin
    assert (
        took_s
        > 0.95
        * 2
        * sum(
            captured.graph.values[s.value].size_bytes
            for s in schedule.steps
            if s.kind is StepKind.COPY_OUT and s.value is not None
        )
        / 20e6
    )


@pytest.mark.slow
def test_copies_overlap_the_computation() -> None:
    """What synchronous copies add to a step is the link's time; of copies that are queued early most of it is hidden."""

    def make() -> TrainingStep:
        return replace(mlp(512, 8), args=(x(2048, 512),))

    captured = captured_of(make)
    problem = replace(offload_problem(captured.graph), min_offload_bytes=1 << 20)
    planned = prompt_copies(captured.graph, problem)
    n_bytes = simulate(problem, planned).d2h_bytes
    links = Links(d2h=1e9, h2d=1e9, d2h_both=1e9, h2d_both=1e9)
    steps = {}
    for name, schedule in (("planned", planned), ("synchronous", synchronous(captured.graph, planned))):
        ours = Trained(made(make), captured, schedule, PLAIN, links)
        steps[name] = lambda ours=ours: ours.loss().backward()
    times = interleaved_times(steps, 9)
    hidden_s = median(b - a for a, b in zip(times["planned"], times["synchronous"], strict=True))
    assert hidden_s > 0.5 * 2 * n_bytes / 1e9
