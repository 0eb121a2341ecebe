"""The Chrome trace of a simulated step, against the rules of its format and the figures that it shows."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hand_made import HAND_MADE
from offload_plans import SLOW, drawn_plan, hand_made_plan, with_links
from strategies import random_problem
from test_plan_text import PROBLEM

from actsolve.plan import Plan
from actsolve.problem import Problem
from actsolve.report.chrome_trace import BACK, COMPUTE, OUT, chrome_trace
from actsolve.schedule import build_schedule
from actsolve.simulate import Timeline, simulate

KEYS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
}


def timeline_of(problem: Problem, plan: Plan) -> Timeline:
    return simulate(problem, build_schedule(problem.graph, plan.kept, plan.early, plan.offloaded))


def events_of(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    """The events of a kind, having checked what holds for every trace."""
    text = json.dumps(chrome_trace(timeline), allow_nan=False)
    events = json.loads(text)["traceEvents"]
    times = []
    for event in events:
        assert event.keys() == KEYS[event["ph"]] and event["pid"] == 1 and isinstance(event["name"], str)
        if event["ph"] != "M":
            times.append(event["ts"])
    assert all(t >= 0 for t in times) and times == sorted(times)
    return [event for event in events if event["ph"] == phase]


def timelines() -> list[Timeline]:
    found = [
        timeline_of(with_links(PROBLEM), hand_made_plan()),
        timeline_of(PROBLEM, Plan("keep_all", frozenset(HAND_MADE.decidable))),
    ]
    for seed in range(40):
        problem = with_links(random_problem(seed), replace(SLOW, d2h=1e3, h2d=1e3, d2h_both=7e2, h2d_both=5e2))
        found.append(timeline_of(problem, drawn_plan(problem, random.Random(seed))))
    return found


TIMELINES = timelines()


def test_there_is_something_to_see() -> None:
    assert sum(len(t.copies) > 0 for t in TIMELINES) > 15 and sum(t.stall_s > 0 for t in TIMELINES) > 15


@pytest.mark.parametrize("timeline", TIMELINES)
def test_events_of_a_thread_do_not_overlap_and_end_with_the_step(timeline: Timeline) -> None:
    threads = defaultdict(list)
    for event in events_of(timeline, "X"):
        assert event["dur"] >= 0
        threads[event["tid"]].append((event["ts"], event["dur"]))
    assert threads.keys() <= {COMPUTE, OUT, BACK}
    for spans in threads.values():
        for (start, duration), (after, _) in itertools.pairwise(spans):
            assert round(start + duration, 3) <= after
    assert all(round(start + duration, 3) <= round(timeline.step_s * 1e6, 3) for start, duration in threads[COMPUTE])


@pytest.mark.parametrize("timeline", TIMELINES)
def test_times_add_up(timeline: Timeline) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for event in events_of(timeline, "X"):
        seconds[event["cat"]] += event["dur"] / 1e6
    close = 1e-8  # each time is rounded to a nanosecond
    assert seconds["stall"] == pytest.approx(timeline.stall_s, abs=close)
    assert seconds["replay"] == pytest.approx(timeline.recompute_s, abs=close)
    on_device = sum(seconds[category] for category in ("forward", "backward", "replay", "stall"))
    assert on_device == pytest.approx(timeline.step_s, abs=close)


@pytest.mark.parametrize("timeline", TIMELINES)
def test_counters_have_the_peaks(timeline: Timeline) -> None:
    counted = defaultdict(list)
    for event in events_of(timeline, "C"):
        counted[event["name"]].append(event["args"]["bytes"])
    assert max(counted["device bytes"]) == timeline.peak_bytes
    assert counted["device bytes"][-1] == timeline.memory_bytes[-1]
    assert max(counted["host bytes"]) == counted["host bytes"][-1] == timeline.host_peak_bytes


@pytest.mark.parametrize("timeline", TIMELINES)
def test_every_run_and_every_copy_is_there(timeline: Timeline) -> None:
    names = defaultdict(list)
    for event in events_of(timeline, "X"):
        names[event["tid"], event["cat"] == "stall"].append(event["name"])
    graph, copies = timeline.problem.graph, timeline.copies
    assert names[COMPUTE, False] == [graph.ops[s.op].name for s in timeline.schedule.steps if s.op is not None]
    assert names[OUT, False] == [graph.values[c.value].name for c in copies if c.out]
    assert names[BACK, False] == [graph.values[c.value].name for c in copies if not c.out]


def test_threads_and_process_have_names() -> None:
    named = {(e["name"], e["tid"]): e["args"] for e in events_of(TIMELINES[0], "M")}
    assert named["process_name", 0] == {"name": "training step, simulated"}
    assert [named["thread_name", t]["name"] for t in (COMPUTE, OUT, BACK)] == ["compute", "copy out", "copy back"]


def test_the_step_by_hand() -> None:
    """A is made at 1 ms and leaves in 4.096 ms at 1 MB/s; what follows its split waits, for A is to be gone by then."""
    x = {(e["cat"], e["name"]): e for e in events_of(TIMELINES[0], "X")}
    assert (x["copy out", "a"]["ts"], x["copy out", "a"]["dur"]) == (1000, 4096)
    stall = x["stall", "wait for copy out of a"]
    assert stall["args"] == {"bytes": 4096} and (stall["ts"], stall["dur"]) == (3000, 2096)
    assert x["forward", "dropout"]["ts"] == 5096
    assert x["forward", "dropout"]["args"] == {"target": "aten.native_dropout.default", "module": "", "source": "net.py:12"}


def test_names_from_others_are_escaped() -> None:
    graph = replace(
        HAND_MADE, name="mo\x1bdel", ops=(replace(HAND_MADE.ops[0], name="m\u202em", source="a\nb"), *HAND_MADE.ops[1:])
    )
    text = json.dumps(
        chrome_trace(timeline_of(replace(PROBLEM, graph=graph), Plan("x", frozenset(graph.decidable)))), ensure_ascii=False
    )
    assert text.isprintable()
