"""The command line where values are offloaded: flags, reports, plan files and the timeline."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import PROFILE, called, done, folder, refused
from offload_plans import drawn_plan

from actsolve.plan import Decision, Plan
from actsolve.plan_file import load_plan
from actsolve.planners import PLANNERS, PlannerOptions
from actsolve.problem import Problem

__all__ = ["folder"]  # a fixture

STEP = ("mine.py:step", "--set", "batch=64", "--set", "width=32")
LINK = ("--h2d", "1GB/s", "--d2h", "800MB/s")


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, one thread, and a planner that offloads whatever may be, however small."""

    def planner(problem: Problem, options: PlannerOptions) -> Plan:
        return drawn_plan(replace(problem, min_offload_bytes=1), random.Random(0))

    monkeypatch.setitem(PLANNERS, "milp", planner)
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("folder")
def test_optimize_plans_for_the_link_that_is_given() -> None:
    flags = (*STEP, "--mem-budget", "100%", *PROFILE, *LINK, "--host-budget", "1MiB", "--out", "plan.json")
    found = done("optimize", *flags)
    assert found["links"] == {"d2h": 800e6, "h2d": 1e9, "d2h_both": None, "h2d_both": None} and found["links_source"] == "given"
    assert found["host_budget_bytes"] == 2**20
    predicted, offloaded = found["predicted"], found["decisions"]["offload"]
    assert offloaded["count"] > 0 and predicted["d2h_bytes"] == offloaded["bytes"] == predicted["host_peak_bytes"]
    assert predicted["h2d_bytes"] == predicted["d2h_bytes"] and predicted["stall_s"] > 0
    file = load_plan("plan.json")
    assert file.predicted is not None and file.predicted.model_dump() == predicted
    assert list(file.decisions.values()).count(Decision.OFFLOAD) == offloaded["count"]
    text = called("optimize", *flags).stdout
    assert re.search(r"^mine.py:step within .*values are offloaded", text) and "\noffloading\n  to the host " in text
    assert "800 MB/s out, 1 GB/s back; shared by both directions; given" in text


@pytest.mark.usefixtures("folder")
def test_the_speeds_of_a_profile_and_what_is_not_known() -> None:
    found = done("optimize", *STEP, "--mem-budget", "100%", *PROFILE)
    assert found["links"]["d2h_both"] is not None and found["links_source"].startswith("profile a100")
    assert found["host_budget_bytes"] is None
    nothing = done("optimize", *STEP, "--mem-budget", "100%", *PROFILE, "--host-budget", "0")
    assert nothing["links"] is None and nothing["decisions"]["offload"]["count"] == 0
    assert nothing["notes"] == ["Nothing is offloaded: the host budget is 0."]
    row = {"name": "mine", "memory_gb": 8, "memory_gbps": 500, "fp32_tflops": 10, "source": "a test"}
    Path("mine.json").write_text(json.dumps(row))
    unknown = called("optimize", *STEP, "--mem-budget", "100%", "--hardware", "mine.json")
    assert "Nothing is offloaded: no link speed is known of mine; --h2d and --d2h give it." in unknown.stdout


@pytest.mark.usefixtures("folder")
def test_a_plan_that_offloads_is_run_and_trained_with() -> None:
    flags = (*STEP, "--mem-budget", "100%", *LINK)
    found = done("optimize", *flags, "--run", "--out", "plan.json")
    assert found["measured"]["gradients"] == "bitwise"
    assert any("emulated at the planned speed" in note for note in found["notes"])
    trained = done("run", *STEP, "--plan", "plan.json", "--steps", "2")
    assert trained["d2h_bytes"] == trained["host_peak_bytes"] == found["predicted"]["d2h_bytes"] > 0
    text = called("run", *STEP, "--plan", "plan.json", "--steps", "1").stdout
    assert re.search(r"^host  +[\d.]+ KiB  [\d.]+ KiB out and [\d.]+ KiB back a step; predicted stalls", text, re.MULTILINE)
    assert "\nnote: This machine has no link to a device: copies are emulated" in text
    slower = done("run", *STEP, "--plan", "plan.json", "--steps", "1", "--h2d", "10MB/s", "--d2h", "10MB/s")
    assert slower["predicted_stall_s"] > trained["predicted_stall_s"]
    message = refused("run", *STEP, "--plan", "plan.json", "--host-budget", "1KB", code=3)
    assert "the loaded plan does not fit 1000 B (1000 bytes) of host memory here" in message


@pytest.mark.usefixtures("folder")
def test_a_plan_for_a_profile_that_runs_on_a_cpu_says_that_its_copies_are_emulated() -> None:
    """Only where it runs: a plan alone is for the profile's own device."""
    flags = (*STEP, "--mem-budget", "100%", *PROFILE, *LINK)
    run = ("run", *STEP, *PROFILE, "--plan", "plan.json", "--steps", "1")
    alone, there = done("optimize", *flags, "--out", "plan.json"), done("optimize", *flags, "--run")
    for found, emulated in ((alone, False), (there, True), (done(*run), True), (done("compare", *flags, "--run"), True)):
        assert any("copies are emulated" in note for note in found["notes"]) == emulated


@pytest.mark.usefixtures("folder")
def test_compare_shows_what_goes_over_the_link() -> None:
    flags = ("compare", *STEP, "--mem-budget", "100%", *PROFILE, *LINK, "--host-budget", "1MiB")
    found = done(*flags)
    assert found["links"]["h2d"] == 1e9 and found["host_budget_bytes"] == 2**20
    ours, other = (found["planners"][name] for name in ("milp", "sqrt_l"))
    assert ours["d2h_bytes"] == ours["h2d_bytes"] == ours["host_peak_bytes"] > 0 == other["d2h_bytes"]
    text = called(*flags).stdout
    assert re.search(r"^offloading +values +out +back +stalls +host memory\nmilp +\d+ ", text, re.MULTILINE)
    assert "\nlink: 800 MB/s out, 1 GB/s back; shared by both directions; given\n" in text


@pytest.mark.usefixtures("folder")
def test_the_timeline_is_written_as_a_chrome_trace() -> None:
    flags = ("optimize", *STEP, "--mem-budget", "100%", *PROFILE, *LINK, "--timeline", "step.json")
    found = done(*flags)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    trace: dict[str, Any] = json.loads(Path("step.json").read_text(), parse_constant=refuse)
    events = trace["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {1, 2, 3}
    stalls = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "stall")
    assert stalls / 1e6 == pytest.approx(found["predicted"]["stall_s"], abs=1e-8)
    device = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "device bytes"]
    assert max(device) == found["predicted"]["peak_bytes"]
    assert sorted(p.name for p in Path.cwd().iterdir() if not p.name.startswith("__")) == ["mine.py", "step.json"]


WRONG = {
    "a size": (("--h2d", "25GB"), r"cannot read --h2d '25GB'\n  why    it is a size, and no time is named\n  try    25GB/s"),
    "bits": (("--d2h", "25Gbit/s"), r"cannot read --d2h '25Gbit/s'\n  why    'Gbit' counts bits"),
    "nothing": (("--d2h", "0"), r"nothing would ever arrive"),
    "no speed": (("--h2d", "fast"), r"it is not a number with a unit per second"),
    "a host budget": (("--host-budget", "60%"), r"cannot read --host-budget '60%'"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags_are_one_message(case: str) -> None:
    flags, pattern = WRONG[case]
    for command in (("optimize", *STEP, "--mem-budget", "1GB"), ("compare", *STEP, "--mem-budget", "1GB")):
        assert re.search(pattern, refused(*command, *flags))


@pytest.mark.usefixtures("folder")
def test_a_timeline_that_cannot_be_written_is_told_before_anything_is_built() -> None:
    message = refused("optimize", "mine.py:raises", "--mem-budget", "1GB", "--timeline", "no/step.json")
    assert "cannot write the timeline" in message and "--timeline with a path that you may write" in message


@pytest.mark.usefixtures("folder")
def test_a_planner_that_needs_a_link_says_so() -> None:
    message = refused("optimize", *STEP, "--mem-budget", "80%", "--planner", "offload_all")
    assert "offload_all does not apply here" in message and "no link speed is known" in message and "--h2d" in message


@pytest.mark.usefixtures("folder")
def test_a_plan_is_trained_with_one_thing_broken() -> None:
    done("optimize", *STEP, "--mem-budget", "100%", *LINK, "--planner", "milp", "--out", "plan.json")
    run = ("run", *STEP, "--plan", "plan.json", "--steps", "2")
    planned, broken = done(*run), done(*run, "--switch", "synchronous")
    assert broken["losses"] == planned["losses"] and broken["switch"] == "synchronous" and planned["switch"] is None
    assert broken["predicted_stall_s"] >= planned["predicted_stall_s"]
    assert "one of synchronous, late_out" in refused(*run, "--switch", "sideways")
    twice = refused(*run, "--switch", "synchronous", "--switch", "late_out")
    assert "one switch at a time" in twice and "'synchronous', 'late_out' are given" in twice
