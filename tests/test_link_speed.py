"""Where the speeds of a link come from: the user, a profile, or a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actsolve.cost import link_speed
from actsolve.cost.hardware import profile, profiles
from actsolve.cost.link_speed import host_budget_of, links_of
from actsolve.cost.measure_links import MeasuredLinks
from actsolve.links import Links

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MEASURED = MeasuredLinks(Links(24e9, 25e9, 20e9, 11e9), Links(6e9, 5e9), "measured on a stopwatch")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "measure_links", lambda _: MEASURED)


@pytest.fixture
def half(tmp_path: Path) -> str:
    """A profile that knows one direction only."""
    row = {"name": "half", "memory_gb": 8, "memory_gbps": 500, "h2d_gbps": 12, "source": "a test"}
    (tmp_path / "half.json").write_text(json.dumps(row))
    return str(tmp_path / "half.json")


def test_what_is_given_counts_and_shares_one_link() -> None:
    for hardware, device in (("a100", CPU), ("auto", CUDA), ("auto", CPU)):
        found = links_of(hardware, device, h2d=3e9, d2h=2e9)
        assert found.links == Links(d2h=2e9, h2d=3e9) and found.source == "given"
        assert ("emulated" in found.note) == (hardware == "auto" and device is CPU)


def test_a_profile_gives_all_that_it_knows() -> None:
    a100 = profile("a100")
    found = links_of("a100", CPU)
    assert found.links is not None and found.note == "" and found.source == f"profile {a100.name}"
    assert (found.links.d2h, found.links.h2d) == (a100.d2h_bytes_per_s, a100.h2d_bytes_per_s)
    assert (found.links.d2h_both, found.links.h2d_both) == (a100.d2h_both_bytes_per_s, a100.h2d_both_bytes_per_s)
    for name, p in profiles().items():
        assert (links_of(name, CPU).links is None) == (None in (p.d2h_bytes_per_s, p.h2d_bytes_per_s)), name


def test_the_direction_that_is_not_given_is_the_profile_s_or_equal(half: str) -> None:
    a100 = profile("a100")
    assert links_of("a100", CPU, h2d=1e9).links == Links(d2h=a100.d2h_bytes_per_s or 0, h2d=1e9)
    assert links_of("a100", CPU, d2h=1e9).links == Links(d2h=1e9, h2d=a100.h2d_bytes_per_s or 0)
    assert links_of(half, CPU, d2h=1e9).links == Links(d2h=1e9, h2d=12e9)
    found = links_of(half, CPU, h2d=1e9)
    assert found.links == Links(d2h=1e9, h2d=1e9) and found.source == "h2d given, the other taken to be equal"
    assert links_of("auto", CPU, d2h=5).links == Links(5.0, 5.0)


def test_an_unknown_speed_is_no_link_and_said_so(half: str) -> None:
    found = links_of(half, CPU)
    assert found.links is None and "no link speed is known of half; --h2d and --d2h give it" in found.note
    assert links_of("auto", CPU) == link_speed.LinkSpeed(None)
    assert "a CPU has no link to a device" in links_of("auto", CPU, host_budget_bytes=5000).note
    assert "the host budget is 0" in links_of("a100", CPU, h2d=1e9, d2h=1e9, host_budget_bytes=0).note


@pytest.mark.usefixtures("measured")
def test_a_device_that_is_here_is_measured() -> None:
    found = links_of("auto", CUDA)
    assert (found.links, found.source, found.note) == (MEASURED.pinned, "measured on a stopwatch", "")
    assert links_of("auto", CUDA, h2d=1e9).links == Links(d2h=24e9, h2d=1e9)
    assert links_of("auto", CUDA, d2h=1e9).source == "d2h given, the other measured on a stopwatch"


def test_the_host_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "available_host_bytes", lambda: 1000)
    assert host_budget_of("auto", None) == 800
    assert host_budget_of("a100", None) is None
    for hardware in ("auto", "a100"):
        assert host_budget_of(hardware, 5000) == 5000 and host_budget_of(hardware, 0) == 0
