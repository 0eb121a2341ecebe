"""The order in which a CUDA engine lets copies and the computation wait for each other, on streams that only note it.

What runs on a device is in tests/gpu/test_cuda_offload.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from actsolve.runtime import cuda_engine
from actsolve.runtime.copy_engine import CopyOptions
from actsolve.runtime.cuda_engine import CudaEngine

CPU = torch.device("cpu")


class Event:
    """Done when the test says so; a wait of the host makes it so."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.done, self.log = name, False, log

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        self.done = True


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, []  # type: ignore[var-annotated]

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events.append(Event(f"{self.name} {len(self.events)}", self.log))
        return self.events[-1]  # type: ignore[no-any-return]


class Device:
    """What the engine sees of CUDA."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.compute = Stream("compute", self.log)
        self.streams = [Stream("out", self.log), Stream("back", self.log)]
        made = iter(self.streams)
        patch.setattr(torch.cuda, "Stream", lambda _: next(made))
        patch.setattr(torch.cuda, "current_stream", lambda _: self.compute)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(cuda_engine, "_pinned", lambda memory, _: memory)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"{stream.name} copies")
        yield

    def new(self, since: int = 0) -> list[str]:
        """What was noted, and forget it."""
        noted, self.log[:] = list(self.log), []
        return noted


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def engine_of(*sizes: int) -> tuple[CudaEngine, list[int]]:
    engine = CudaEngine(CPU, CopyOptions())
    places = [engine.place(n) for n in sizes]
    engine.prepare()
    return engine, places


def test_a_value_goes_out_and_comes_back_in_this_order(device: Device) -> None:
    engine, (place, second) = engine_of(4 * 6, 8)
    assert (place, second) == (0, 512)
    value = torch.arange(6.0).reshape(2, 3).t()
    host = engine.copy_out(engine.lease(), value, place, 24)
    assert device.new() == ["out waits for compute", "out copies"]
    engine.wait_out(host, value)
    assert device.new() == ["compute waits for out 0"]
    arriving = engine.copy_back(host, CPU)
    assert device.new() == ["back waits for compute", "back waits for out 0", "back copies"]
    again = engine.wait_back(arriving, value.dtype, tuple(value.shape), value.stride(), 0)
    assert device.new() == ["compute waits for back 0"]
    assert torch.equal(again, value) and again.stride() == value.stride()


def test_the_next_step_writes_when_the_last_one_has_read(device: Device) -> None:
    engine, (place,) = engine_of(8)
    for step in range(2):
        value = torch.ones(2)
        host = engine.copy_out(engine.lease(), value, place, 8)
        assert ("out waits for back 0" in device.new()) == (step == 1)
        engine.wait_out(host, value)
        engine.wait_back(engine.copy_back(host, CPU), value.dtype, (2,), (1,), 0)
        del host, value
    assert engine.n_arenas == 1


def test_what_a_copy_needs_is_held_until_it_is_waited_for(device: Device) -> None:
    engine, (place,) = engine_of(8)
    value = torch.ones(2)
    gone = weakref.ref(value.untyped_storage())
    storage = torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage())
    host = engine.copy_out(engine.lease(), value, place, 8)
    del value, gone
    assert not storage.expired()
    engine.wait_out(host, torch.ones(2))
    assert storage.expired()


def test_after_an_exception_it_is_held_until_the_copy_is_done(device: Device) -> None:
    engine, (place,) = engine_of(8)

    def step() -> Any:
        value = torch.ones(2)
        storage = torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage())
        engine.copy_out(engine.lease(), value, place, 8)
        return storage  # as if an exception had ended it here

    storage = step()
    assert not storage.expired()
    device.streams[0].events[0].done = True
    assert engine.lease() is not None, "the host waits for what is in flight before more memory is taken"
    assert engine.n_arenas == 1 and storage.expired()


def test_before_more_host_memory_is_taken_copies_in_flight_are_waited_for(device: Device) -> None:
    engine, (place,) = engine_of(8)
    engine.copy_out(engine.lease(), torch.ones(2), place, 8)
    device.new()
    lease = engine.lease()
    assert device.new() == ["host waits for out 0"] and engine.n_arenas == 1
    assert engine.lease() is not lease and engine.n_arenas == 2


def test_an_engine_that_is_dropped_waits_for_its_copies(device: Device) -> None:
    engine, (place,) = engine_of(8)
    engine.copy_out(engine.lease(), torch.ones(2), place, 8)
    device.new()
    del engine
    gc.collect()
    assert device.new() == ["host waits for out 0"]
