"""Plans that offload, made by hand or drawn: what to test with while copies are concerned, whatever planner there is."""

from __future__ import annotations

import random
from dataclasses import replace

from hand_made import HAND_MADE, A, D, S

from actsolve.links import Links
from actsolve.plan import Copies, Plan, Status
from actsolve.problem import Problem

SLOW = Links(d2h=1e6, h2d=2e6, d2h_both=0.75e6, h2d_both=0.5e6)

# A is free once it was split, and back for its last reader; D is free when the forward has ended, and back at once.
HAND_MADE_COPIES = {A: Copies(free_at=2, back_at=7), D: Copies(free_at=6, back_at=6)}


def hand_made_plan() -> Plan:
    """The plan for `HAND_MADE` that offloads two values and keeps the rest, but for the RNG state: nothing is replayed."""
    kept = frozenset(HAND_MADE.decidable) - HAND_MADE_COPIES.keys() - {S}
    return Plan("milp", kept, offloaded=HAND_MADE_COPIES, status=Status.FEASIBLE, bound_s=0.001, solve_s=0.5)


def with_links(problem: Problem, links: Links = SLOW) -> Problem:
    """The problem on a machine with a link, where nothing is too small to be offloaded."""
    return replace(problem, links=links, min_offload_bytes=1)


def drawn_plan(problem: Problem, rng: random.Random) -> Plan:
    """A plan that offloads some values, replays others, and keeps the rest."""
    graph, offloaded = problem.graph, {}
    read_in_backward = [v for v in sorted(problem.offloadable) if graph.backward_readers[v]]
    for value in read_in_backward:
        if rng.random() < 0.6:
            readers = [i for i, op in enumerate(graph.ops[: graph.n_forward]) if value in op.inputs]
            producer = graph.values[value].producer
            assert producer is not None
            first_back = min(i for i, op in enumerate(graph.ops) if i >= graph.n_forward and value in op.inputs)
            free_at = rng.randint(max([producer, *readers]) + 1, first_back)
            offloaded[value] = Copies(free_at, rng.randint(max(free_at, graph.n_forward), first_back))
    return Plan("milp", frozenset(graph.decidable) - offloaded.keys(), offloaded=offloaded)
