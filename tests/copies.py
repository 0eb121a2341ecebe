"""Random schedules that offload: which values, and when each leaves the device and returns."""

from __future__ import annotations

import random

from alike import required

from actsolve.graph import Graph
from actsolve.links import Links
from actsolve.plan import Copies
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, StepKind, build_schedule, first_run_at, runs_of

LINKS = Links(d2h=2e9, h2d=2e9)


def offload_problem(graph: Graph, *, links: Links = LINKS) -> Problem:
    """``graph`` with an unlimited budget and every value large enough to be offloaded."""
    ones = Costs((1.0,) * len(graph.ops), (1.0,) * len(graph.ops), (0,) * len(graph.ops))
    return Problem(graph, ones, 1 << 62, 0, links=links, min_offload_bytes=1)


def random_schedule(problem: Problem, rng: random.Random, *, share: float | None = None) -> Schedule:
    """Some of what can be offloaded is, the rest is kept or recomputed, all at random.

    Args:
        problem: Its graph is what is scheduled.
        rng: Draws.
        share: Of the values that are offloaded if they can be; drawn if left out.
    """
    graph = problem.graph
    share = rng.random() if share is None else share
    keep = rng.random()
    drawn = {v for v in sorted(problem.offloadable) if rng.random() < share}
    kept = {v for v in graph.decidable if v not in drawn and (rng.random() < keep or v in required(graph))}
    early = {
        op: rng.randint(graph.n_forward, late) for op, late in enumerate(graph.late) if late is not None and rng.random() < 0.3
    }
    offloaded = random_copies(graph, frozenset(kept), drawn, early, rng)
    return build_schedule(graph, frozenset(kept), early, offloaded)


def random_copies(
    graph: Graph, kept: frozenset[int], drawn: set[int], early: dict[int, int], rng: random.Random
) -> dict[int, Copies]:
    """When to free and fetch each of ``drawn`` that the backward reads; any time at which that is right."""
    runs = runs_of(graph, kept | drawn, early)
    starts = first_run_at(graph, runs)
    left: dict[int, int] = {}  # value -> the last run of the forward that makes or reads it
    arrives: dict[int, int] = {}
    for time, (kind, index) in enumerate(runs):
        op = graph.ops[index]
        if kind is StepKind.COMPUTE and index < graph.n_forward:
            left.update((v, time) for v in (*op.inputs, *op.outputs))
        else:
            for v in (*op.inputs, *op.replay_inputs) if kind is StepKind.REPLAY else op.inputs:
                arrives.setdefault(v, time)
    found = {}
    for v in sorted(drawn & arrives.keys()):
        back = [i for i in range(graph.n_forward, len(graph.ops)) if starts[i] <= arrives[v]]
        back_at = rng.choice(back[-3:] if rng.random() < 0.5 else back)
        free = [i for i in range(back_at + 1) if left[v] < starts[i] <= starts[back_at]]
        found[v] = Copies(rng.choice(free[:3] if rng.random() < 0.5 else free), back_at)
    return found


def prompt_copies(graph: Graph, problem: Problem, ops: int = 4) -> Schedule:
    """All that can be offloaded is, freed ``ops`` forward ops after its last read and fetched as many before the first one."""
    read = [v for v in sorted(problem.offloadable) if graph.backward_readers[v]]
    last = {v: max(graph.values[v].producer or 0, *graph.forward_readers[v], -1) for v in read}
    times = {
        v: Copies(min(graph.n_forward, last[v] + 1 + ops), max(graph.n_forward, graph.backward_readers[v][0] - ops)) for v in read
    }
    return build_schedule(graph, frozenset(graph.decidable) - times.keys(), offloaded=times)
