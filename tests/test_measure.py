"""Measured costs: workspace against an independent observation, made-up inputs, and the cache on disk."""

from __future__ import annotations

import logging
import math
import multiprocessing
import operator
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from actsolve.cache_dir import cache_dir
from actsolve.cost import measure, timing
from actsolve.cost.machine import environment, free_bytes, require_device
from actsolve.cost.measure import measure_costs
from actsolve.cost.measured_cache import Measured, MeasuredCache
from actsolve.cost.sample_call import sample_call
from actsolve.errors import UsageError
from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op, Phase, Value
from actsolve.problem import Costs

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread_and_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the cores are shared, kernels of several threads wait for each other and the tests would take minutes."""
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "_BUSY", math.inf)  # so that figures are kept even if this machine is
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def traced(fn: Callable[..., Any], *args: Any) -> tuple[Graph, list[Node]]:
    """Return the calls that ``fn`` makes as a graph of forward ops, each with the node that it came from."""
    joint = make_fx(fn, tracing_mode="fake")(*args)
    values: list[Value] = []
    place: dict[Node, list[int]] = {}
    ops: list[Op] = []
    nodes: list[Node] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            place[node] = [len(values)]
            values.append(value_of(node.meta["val"], f"in{len(values)}", None))
        elif node.target is operator.getitem:
            place[node] = place[node.args[0]]
        elif node.op == "call_function":
            leaves = [t for t in tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor)]
            place[node] = list(range(len(values), len(values) + len(leaves)))
            values += [value_of(t, f"{node.name}.{i}", len(ops)) for i, t in enumerate(leaves)]
            inputs = dict.fromkeys(v for n in node.all_input_nodes for v in place[n])
            shapes = [n.meta["val"].shape if isinstance(n.meta["val"], torch.Tensor) else "" for n in node.all_input_nodes]
            ops.append(
                Op(
                    node.name,
                    str(node.target),
                    Phase.FORWARD,
                    tuple(inputs),
                    tuple(place[node]),
                    signature=f"{node.target}{shapes}",
                )
            )
            nodes.append(node)
    return Graph(tuple(ops), tuple(values)).verify(), nodes


def value_of(tensor: torch.Tensor, name: str, producer: int | None) -> Value:
    kind = Kind.INPUT if producer is None else Kind.ACTIVATION
    return Value(
        name, tensor.untyped_storage().nbytes(), kind, producer, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    )


def observed_workspace(fn: Callable[[], Any]) -> int:
    """Workspace by torch's profiler alone: the peak of its memory events less what is left when ``fn`` has returned."""
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = fn()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    del result
    return peak - live


# -- workspace ---------------------------------------------------------------------------------------------------------


def test_workspace_of_a_convolution_forward_and_backward() -> None:
    x, weight = torch.randn(4, 8, 24, 24), torch.randn(8, 8, 3, 3)
    how = [1, 1], [1, 1], [1, 1], False, [0, 0], 1

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return aten.convolution(x, weight, None, *how)

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return aten.convolution_backward(grad, x, weight, None, *how, [True, True, False])[:2]

    for fn, args in ((forward, (x, weight)), (backward, (x, x, weight))):
        costs = measure_costs(*traced(fn, *args))
        expected = observed_workspace(lambda fn=fn, args=args: fn(*args))  # type: ignore[misc]
        assert costs.workspace_bytes == (expected,)
        assert expected > 0
        assert costs.unknown == ()


def test_pointwise_takes_no_workspace() -> None:
    costs = measure_costs(*traced(lambda x: torch.relu(x), torch.randn(1000)))
    assert costs.workspace_bytes == (0,)
    assert 0 < costs.seconds[0] < 0.1
    assert costs.replay_seconds == costs.seconds
    assert costs.source.startswith("measured on ")


def test_batch_norm_backward_takes_workspace() -> None:
    x, stats = torch.randn(8, 4, 16, 16), torch.ones(4)

    def backward(x: torch.Tensor, s: torch.Tensor) -> Any:
        return aten.native_batch_norm_backward(x, x, s, s, s, s, s, True, 1e-5, [True, True, True])

    costs = measure_costs(*traced(backward, x, stats))
    assert costs.workspace_bytes == (observed_workspace(lambda: backward(x, stats)),)


# -- made-up inputs ----------------------------------------------------------------------------------------------------


def long(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


X = torch.randn(6, 5)
INDEX_CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "embedding": (lambda w, i: aten.embedding(w, i), (torch.randn(50, 4), long(3, 7))),
    "embedding_dense_backward": (
        lambda g, i: aten.embedding_dense_backward(g, i, 50, -1, False),
        (torch.randn(3, 7, 4), long(3, 7)),
    ),
    "nll_loss": (lambda x, t: F.nll_loss(x, t), (X, long(6))),
    "nll_loss2d": (lambda x, t: F.nll_loss(x, t), (torch.randn(2, 5, 3, 3), long(2, 3, 3))),
    "gather": (lambda x, i: x.gather(1, i), (X, long(6, 3))),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (X, long(6, 3), torch.randn(6, 3))),
    "index": (lambda x, i, j: x[i, j], (X, long(9), long(9))),
    "index_second": (lambda x, i: x[:, i], (X, long(9))),
    "index_put": (lambda x, i, v: x.index_put((i,), v, accumulate=True), (X, long(9), torch.randn(9, 5))),
    "index_select": (lambda x, i: x.index_select(1, i), (X, long(9))),
    "max_pool_backward": (
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i),
        (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 8, 8), long(2, 3, 4, 4)),
    ),
    "adaptive_max_pool_backward": (
        lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i),
        (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 8, 8), long(2, 3, 4, 4)),
    ),
    "bernoulli": (lambda x: torch.bernoulli(x), (torch.rand(10),)),
    "binary_cross_entropy": (lambda x, y: F.binary_cross_entropy(x, y), (torch.rand(10), torch.rand(10))),
    "integer_division": (lambda a, b: a // b, (long(10), long(10) + 1)),
    "embedding_bag": (lambda w, i, o: aten._embedding_bag(w, i, o)[0], (torch.randn(50, 4), long(12), long(3))),
    "strided": (lambda x: x.relu(), (torch.randn(6, 10).t(),)),
    "half_precision": (lambda x: x.relu(), (X.to(torch.bfloat16),)),
    "complex": (lambda x: x * 2, (torch.randn(6, dtype=torch.complex64),)),
}


@pytest.mark.parametrize("name", INDEX_CASES)
def test_ops_whose_data_matters_can_be_measured(name: str) -> None:
    fn, args = INDEX_CASES[name]
    graph, nodes = traced(fn, *args)
    costs = measure_costs(graph, nodes)
    assert costs.unknown == ()
    assert all(s > 0 for s in costs.seconds)


def test_indices_spread_over_the_table() -> None:
    _, [node] = traced(lambda w, i: aten.embedding(w, i), torch.randn(1000, 4), long(5000))
    indices = sample_call(node).args[1]
    assert indices.min() >= 0 and indices.max() < 1000
    assert indices.unique().numel() > 900


def test_tensors_keep_their_layout_and_shared_storage() -> None:
    base = torch.randn(4, 6)
    _, nodes = traced(lambda x: x[:, 1:3] * x[:, 3:5], base)
    call = sample_call(nodes[-1])
    first, second = call.args
    assert first.shape == second.shape == (4, 2)
    assert first.stride() == (6, 1)
    assert (first.storage_offset(), second.storage_offset()) == (1, 3)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == base.nbytes


def test_a_mutating_op_starts_from_the_same_content_each_time() -> None:
    with FakeTensorMode():
        fake = torch.empty(10)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake
    node = graph.call_function(aten.mul_.Tensor, (x, 1e-30))
    node.meta["val"] = fake
    call = sample_call(node)
    before = call.args[0].clone()
    call()
    call.reset()
    assert torch.equal(call.args[0], before)


# -- random ops --------------------------------------------------------------------------------------------------------


def test_random_ops_cost_more_to_replay_and_leave_the_generator_alone() -> None:
    graph, nodes = traced(lambda x: aten.native_dropout(x, 0.5, True), torch.randn(100))
    [dropout] = graph.ops
    shift = len(graph.values)
    state = Op(
        "state", RNG_STATE_TARGET, Phase.FORWARD, (), (shift,), replayable=False, optional=True, signature=RNG_STATE_TARGET
    )
    values = [*graph.values, Value("state", 5056, producer=0)]
    moved = [v if v.producer is None else Value(v.name, v.size_bytes, producer=1) for v in values[:-1]]
    random = Op(**{**{f: getattr(dropout, f) for f in Op.__slots__}, "random": True, "replay_inputs": (shift,)})
    graph = Graph((state, random), (*moved, values[-1])).verify()

    before = torch.get_rng_state()
    costs = measure_costs(graph, [None, *nodes])
    assert torch.equal(torch.get_rng_state(), before)
    assert costs.seconds[0] == 0.0  # what it takes is the replay's to pay
    assert costs.seconds[1] < costs.replay_seconds[1] < costs.seconds[1] + 1e-3


# -- what cannot be measured -------------------------------------------------------------------------------------------


@torch.library.custom_op("actsolve_test::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("only on Sundays")


refuses.register_fake(torch.empty_like)


def test_an_op_that_fails_is_listed_and_costed_by_bytes(caplog: pytest.LogCaptureFixture) -> None:
    graph, nodes = traced(lambda x: torch.relu(torch.ops.actsolve_test.refuses(x)), torch.randn(1000))
    costs = measure_costs(graph, nodes)
    assert costs.unknown == ("refuses",)
    assert costs.seconds[0] > 0
    assert "refuses cannot be measured alone (RuntimeError: only on Sundays) and is costed by its bytes" in caplog.text


def test_an_op_too_large_for_this_machine_is_listed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda device: 5000)
    graph, nodes = traced(lambda x: torch.relu(x), torch.randn(1000))
    assert measure_costs(graph, nodes).unknown == ("relu",)
    assert "it may take 15.62 KiB, and 4.88 KiB are free" in caplog.text


def test_free_bytes_is_some_memory() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(UsageError, match="only cpu and cuda can be measured"):
        require_device(torch.device("meta"))


def test_works_inside_a_fake_mode_and_autocast() -> None:
    graph, nodes = traced(lambda x, y: x @ y, torch.randn(64, 64), torch.randn(64, 64))
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        assert measure_costs(graph, nodes).unknown == ()


# -- the cache ---------------------------------------------------------------------------------------------------------


def relu_costs(cache: MeasuredCache | None = None) -> Costs:
    return measure_costs(*traced(lambda x: torch.relu(x), torch.randn(100)), cache=cache)


def test_a_second_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = relu_costs()
    assert len(list(cache_dir().glob("costs-*.json"))) == 1

    def fail(*_: Any) -> timing.Timed:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "timed", fail)
    assert relu_costs() == first


@pytest.mark.parametrize(("then", "again"), [(1.9, False), (4.0, True)])
def test_figures_of_a_machine_that_was_busy_all_the_while_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, then: float, again: bool
) -> None:
    """They serve for an hour all the same, and where it cannot be told."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(measure, "timed", lambda *_: timing.Timed(seconds=then * 1e-3, median_s=then * 1e-3))
    assert then * 1e-3 in relu_costs().seconds
    monkeypatch.setattr(measure, "timed", lambda *_: timing.Timed(seconds=1e-3, median_s=1e-3))
    now += 3599
    assert then * 1e-3 in relu_costs().seconds
    now += 2
    with monkeypatch.context() as short:
        short.setattr(measure, "free_bytes", lambda _: 0)
        assert then * 1e-3 in relu_costs().seconds
    assert (1e-3 in relu_costs().seconds) == again


def test_rough_figures_serve_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_BUSY", 1.5)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(measure, "timed", lambda *_: timing.Timed(seconds=1e-3, median_s=2e-3))
    assert 1e-3 in relu_costs().seconds
    monkeypatch.setattr(measure, "timed", lambda *_: timing.Timed(seconds=2e-3, median_s=2e-3))
    now += 3599
    assert 1e-3 in relu_costs().seconds
    now += 2
    assert 2e-3 in relu_costs().seconds
    now += 10**6
    monkeypatch.setattr(measure, "timed", lambda *_: timing.Timed(seconds=3e-3, median_s=3e-3))
    assert 3e-3 not in relu_costs().seconds


def test_threads_and_settings_have_figures_of_their_own() -> None:
    before = environment(CPU)
    torch.set_num_threads(2)
    assert environment(CPU) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"format": "actsolve-costs-0", "environment": "", "measured": {}}',
        b'{"format": "actsolve-costs-1", "environment": "another", "measured": {}}',
        b'{"format": "actsolve-costs-1", "environment": "ENV", "measured": {"x": {"seconds": NaN}}}',
        b'{"format": "actsolve-costs-1", "environment": "ENV", "measured": {"x": {"seconds": -1}}}',
        b"[" * 100_000,
    ],
)
def test_a_corrupt_cache_is_rebuilt_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    cache = MeasuredCache("ENV", tmp_path)
    cache.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.read() == {}
    assert "will be rebuilt" in caplog.text
    cache.add({"x": Measured(seconds=1.0)})
    assert cache.read() == {"x": Measured(seconds=1.0)}


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    costs = relu_costs(MeasuredCache("ENV", blocked))
    assert costs.seconds[0] > 0
    assert "measured costs are not kept" in caplog.text


def add_many(directory: str, who: int) -> None:
    for i in range(20):
        MeasuredCache("ENV", Path(directory)).add({f"{who}.{i}": Measured(seconds=i)})


def test_two_processes_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(str(tmp_path), who)) for who in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    known = MeasuredCache("ENV", tmp_path).read()
    assert known.keys() == {f"{who}.{i}" for who in range(2) for i in range(20)}
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == [MeasuredCache("ENV", tmp_path).path.name]


# -- timing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("takes", "n_runs"),
    [
        ([0.01] * 9, 5),  # settled, and 30 ms are over
        ([0.001] * 99, 30),
        ([0.3] * 9, 2),  # half a second is over
        ([0.2, 0.001, 0.1] * 9, 4),
        ([0.05, 0.01, 0.03, 0.012, 0.02, 0.011, 0.0105, 0.9], 7),  # until three agree
    ],
)
def test_how_often_an_op_is_run(takes: list[float], n_runs: int) -> None:
    times: list[float] = []
    while not timing._enough(times):
        times.append(takes[len(times)])
    assert len(times) in (n_runs, n_runs + 1)  # sums of floats


def test_a_busy_machine_is_said_to_be(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(timing, "_BUSY", 1.5)
    spread = timing.Spread()
    spread.add(timing.Timed(seconds=0.01, median_s=0.03))
    spread.warn_if_busy()
    assert "half of the runs took over 3.0 times as long" in caplog.text
