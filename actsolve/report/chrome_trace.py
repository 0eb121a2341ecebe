"""A simulated step as a Chrome trace, which chrome://tracing and ui.perfetto.dev show.

Three threads: what is computed, with each stall as an event of its own, the copies out, and the copies back. Two counters: the
device memory and the host memory in use. Times are in microseconds from the beginning of the step, to the nanosecond.

Source:
    "Trace Event Format", the Chromium project: complete events (``X``), counters (``C``) and metadata (``M``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actsolve.graph import Phase
from actsolve.json_file import shown
from actsolve.schedule import Step, StepKind
from actsolve.simulate import Timeline

COMPUTE, OUT, BACK = 1, 2, 3
_THREADS = {COMPUTE: "compute", OUT: "copy out", BACK: "copy back"}
_PROCESS = 1

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return ``timeline`` in the Trace Event Format, as plain JSON data; events are in the order of time, names escaped.

    ``device bytes`` is the memory while a step of the schedule runs, so its largest is `Timeline.peak_bytes`; at the end stands
    the optimizer step. ``host bytes`` grow as copies out are queued.
    """
    events = sorted((*_computed(timeline), *_copied(timeline), *_counted(timeline)), key=lambda event: event["ts"])
    problem = timeline.problem
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": shown(problem.graph.name),
            "costs": shown(problem.costs.source),
            "budget_bytes": problem.budget_bytes,
            "peak_bytes": timeline.peak_bytes,
            "step_s": timeline.step_s,
            "recompute_s": timeline.recompute_s,
            "stall_s": timeline.stall_s,
        },
        "traceEvents": [*_names(), *events],
    }


def _names() -> Iterator[Event]:
    yield _metadata("process_name", 0, {"name": "training step, simulated"})
    for thread, name in _THREADS.items():
        yield _metadata("thread_name", thread, {"name": name})
        yield _metadata("thread_sort_index", thread, {"sort_index": thread})


def _metadata(name: str, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": thread, "args": args}


def _computed(timeline: Timeline) -> Iterator[Event]:
    """Every run, and every wait that was a stall."""
    graph = timeline.problem.graph
    for step, start_s, end_s in zip(timeline.schedule.steps, timeline.start_s, timeline.start_s[1:], strict=False):
        if step.op is not None:
            op = graph.ops[step.op]
            args = {"target": shown(op.target), "module": shown(op.module), "source": shown(op.source)}
            yield _complete(shown(op.name), _category(step, op.phase), COMPUTE, start_s, end_s, args)
        elif step.value is not None and step.kind in (StepKind.WAIT_OUT, StepKind.WAIT_BACK) and end_s > start_s:
            value = graph.values[step.value]
            way = "copy out" if step.kind is StepKind.WAIT_OUT else "copy back"
            yield _complete(
                f"wait for {way} of {shown(value.name)}", "stall", COMPUTE, start_s, end_s, {"bytes": value.size_bytes}
            )


def _category(step: Step, phase: Phase) -> str:
    return "replay" if step.kind is StepKind.REPLAY else phase.value


def _copied(timeline: Timeline) -> Iterator[Event]:
    for copy in timeline.copies:
        assert copy.began_s is not None and copy.ended_s is not None, "a copy that is never waited for has no end"
        value = timeline.problem.graph.values[copy.value]
        args = {"bytes": value.size_bytes, "queued_us": _us(copy.queued_s)}
        category, thread = ("copy out", OUT) if copy.out else ("copy back", BACK)
        yield _complete(shown(value.name), category, thread, copy.began_s, copy.ended_s, args)


def _counted(timeline: Timeline) -> Iterator[Event]:
    """Each counter where it changes."""
    sizes, last, host_bytes = timeline.problem.graph.values, -1, 0
    yield _counter("host bytes", 0.0, 0)
    for index, (memory_bytes, start_s) in enumerate(zip(timeline.memory_bytes, timeline.start_s, strict=True)):
        if memory_bytes != last:
            yield _counter("device bytes", start_s, memory_bytes)
        last = memory_bytes
        step = timeline.schedule.steps[index] if index < len(timeline.schedule.steps) else None
        if step is not None and step.kind is StepKind.COPY_OUT and step.value is not None:
            host_bytes += sizes[step.value].size_bytes
            yield _counter("host bytes", start_s, host_bytes)


def _complete(name: str, category: str, thread: int, start_s: float, end_s: float, args: Event) -> Event:
    start_us = _us(start_s)
    duration_us = round(_us(end_s) - start_us, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": thread,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def _counter(name: str, at_s: float, n_bytes: int) -> Event:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": _us(at_s), "args": {"bytes": n_bytes}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
