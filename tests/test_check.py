"""The checker accepts what is valid, and whatever it accepts would compute the same bits.

Schedules are broken in every way that we could think of. A broken one is refused, or it must be equivalent: run on symbols
(tests/symbolic.py) it leaves the same contents on the device as the schedule that keeps everything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from replayed_often import random_replays
from strategies import Oddities, random_problem
from symbolic import Outcome, outcome

from actsolve.check import check
from actsolve.errors import ScheduleError
from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.problem import Costs, Problem
from actsolve.replays import replaying_schedule
from actsolve.schedule import Schedule, Step, StepKind, build_schedule
from actsolve.simulate import simulate

ODD = Oddities(multi_output=0.35, random_op=0.25, in_place=0.5, held_output=0.2, update=0.15)


def cases(n: int) -> Iterator[tuple[Problem, Schedule, Outcome]]:
    """Random problems of unlimited budget, a random schedule of each, and what the step must leave behind.

    Every third schedule replays in the forward, too.
    """
    for seed in range(n):
        rng = random.Random(seed)
        problem = replace(random_problem(rng, odd=ODD if seed % 2 else Oddities()), budget_bytes=2**40)
        graph = problem.graph
        keep = rng.random()
        kept = frozenset(v for v in graph.decidable if rng.random() < keep)
        try:
            schedule = build_schedule(graph, kept)
        except ScheduleError:  # a value that cannot be replayed was not kept
            required = {v for v in graph.decidable if not graph.ops[graph.values[v].producer or 0].replayable}
            schedule = build_schedule(graph, kept | required)
        if seed % 3 == 2:
            schedule = replaying_schedule(graph, random_replays(graph, seed, drop=0.3, anywhere=True))
        yield problem, schedule, outcome(graph, build_schedule(graph, frozenset(graph.decidable)))


def overwritten(graph: Graph, steps: list[Step]) -> set[int]:
    """The values that these steps overwrite."""
    in_place = (graph.ops[s.op].in_place for s in steps if s.in_place and s.op is not None)
    return {pair[0] for pair in in_place if pair is not None}


def accepted(problem: Problem, steps: list[Step]) -> bool:
    try:
        check(problem, Schedule(tuple(steps)))
    except ScheduleError:
        return False
    return True


def test_accepts_every_built_schedule_and_gives_its_exact_peak() -> None:
    replays = 0
    for problem, schedule, expected in cases(600):
        assert check(problem, schedule) == simulate(problem, schedule).peak_bytes
        assert outcome(problem.graph, schedule) == expected
        replays += sum(step.kind is StepKind.REPLAY for step in schedule.steps)
    assert replays > 500


def test_a_budget_of_the_peak_is_met_and_one_byte_less_is_not() -> None:
    for problem, schedule, _ in cases(200):
        peak = check(problem, schedule)
        assert check(replace(problem, budget_bytes=peak), schedule) == peak
        with pytest.raises(ScheduleError, match=f"needs {peak} bytes, more than its budget of {peak - 1} bytes"):
            check(replace(problem, budget_bytes=peak - 1), schedule)


def test_no_run_can_be_left_out() -> None:
    """Each run of a built schedule makes a value that is read, freed or held later."""
    for problem, schedule, _ in cases(150):
        for number, step in enumerate(schedule.steps):
            if step.kind is not StepKind.FREE:
                assert not accepted(problem, [*schedule.steps[:number], *schedule.steps[number + 1 :]])


def test_a_free_can_be_left_out_only_where_that_keeps_the_value() -> None:
    """Without the free of a first copy, the copy of the replay is dropped, and what ends that one ends the first."""
    equivalent = 0
    for problem, schedule, expected in cases(150):
        for number, step in enumerate(schedule.steps):
            if step.kind is not StepKind.FREE:
                continue
            steps = [*schedule.steps[:number], *schedule.steps[number + 1 :]]
            if accepted(problem, steps):
                assert step in schedule.steps[number + 1 :] or step.value in overwritten(problem.graph, steps[number:])
                assert outcome(problem.graph, Schedule(tuple(steps))) == expected
                equivalent += 1
    assert equivalent > 20


def test_a_free_cannot_move_before_the_last_read_or_the_run_that_made_the_value() -> None:
    for problem, schedule, _ in cases(150):
        for number, step in enumerate(schedule.steps):
            if step.kind is not StepKind.FREE:
                continue
            user = next(n for n in range(number - 1, -1, -1) if uses(problem.graph, schedule.steps[n], step.value))
            steps = list(schedule.steps)
            steps.insert(user, steps.pop(number))
            assert not accepted(problem, steps)


def uses(graph: Graph, step: Step, value: int | None) -> bool:
    if step.op is None:
        return False
    op = graph.ops[step.op]
    reads = (*op.inputs, *op.replay_inputs) if step.kind is StepKind.REPLAY else op.inputs
    return value in reads or value in op.outputs


def test_an_in_place_flag_can_be_flipped_only_where_a_replay_makes_the_value_again() -> None:
    """Set: the value is read, freed or held later, unless a replay brings it back. Cleared: it leaks, unless it
    is replayed later, so that the new copy is dropped and its free ends the first.
    """
    refused = {True: 0, False: 0}
    for problem, schedule, expected in cases(200):
        graph = problem.graph
        for number, step in enumerate(schedule.steps):
            if step.op is None:
                continue
            steps = list(schedule.steps)
            steps[number] = replace(step, in_place=not step.in_place)
            if accepted(problem, steps):
                source = graph.ops[step.op].in_place[0]  # type: ignore[index]
                assert any(source in graph.ops[s.op].outputs for s in steps[number:] if s.op is not None)
                assert outcome(graph, Schedule(tuple(steps))) == expected
            else:
                refused[step.in_place] += 1
    assert min(refused.values()) > 30


def test_an_in_place_run_and_a_free_are_interchangeable() -> None:
    """An in-place run that is done out of place, with a free after it, is valid and needs more memory while it runs."""
    for problem, schedule, expected in cases(200):
        for number, step in enumerate(schedule.steps):
            if step.in_place and step.op is not None:
                source = problem.graph.ops[step.op].in_place[0]  # type: ignore[index]
                out_of_place = [replace(step, in_place=False), Step(StepKind.FREE, value=source)]
                changed = Schedule((*schedule.steps[:number], *out_of_place, *schedule.steps[number + 1 :]))
                assert check(problem, changed) >= check(problem, schedule)
                assert outcome(problem.graph, changed) == expected


def test_no_forbidden_replay_can_be_inserted() -> None:
    for problem, schedule, _ in cases(150):
        graph = problem.graph
        for index in [i for i, op in enumerate(graph.ops) if not op.replayable]:
            for number in range(len(schedule.steps) + 1):
                replay = Step(StepKind.REPLAY, op=index)
                assert not accepted(problem, [*schedule.steps[:number], replay, *schedule.steps[number:]])


def test_whatever_is_accepted_computes_the_same_bits() -> None:
    """Swaps, copies, moves and changed kinds: what the checker accepts leaves the same contents behind."""
    rng = random.Random(0)
    n_accepted = n_refused = 0
    for problem, schedule, expected in cases(250):
        for _ in range(60):
            steps = list(schedule.steps)
            for _ in range(rng.choice((1, 1, 2))):
                mutate(steps, problem.graph, rng)
            if tuple(steps) == schedule.steps:
                continue
            if accepted(problem, steps):
                n_accepted += 1
                assert outcome(problem.graph, Schedule(tuple(steps))) == expected
            else:
                n_refused += 1
    assert n_accepted > 300
    assert n_refused > 3 * n_accepted


def mutate(steps: list[Step], graph: Graph, rng: random.Random) -> None:
    number, other = rng.randrange(len(steps)), rng.randrange(len(steps))
    what = rng.choice(("swap", "swap next", "move", "copy", "kind", "replay"))
    if what == "swap":
        steps[number], steps[other] = steps[other], steps[number]
    elif what == "swap next" and number + 1 < len(steps):
        steps[number], steps[number + 1] = steps[number + 1], steps[number]
    elif what == "move":
        steps.insert(other, steps.pop(number))
    elif what == "copy":
        steps.insert(other, steps[number])
    elif what == "kind" and steps[number].op is not None:
        steps[number] = replace(
            steps[number], kind=StepKind.REPLAY if steps[number].kind is StepKind.COMPUTE else StepKind.COMPUTE
        )
    elif what == "replay":  # one that nobody needs, freed at once: valid where its inputs are there
        index = rng.randrange(graph.n_forward)
        frees = [Step(StepKind.FREE, value=v) for v in graph.ops[index].outputs if rng.random() < 0.7]
        steps[number:number] = [Step(StepKind.REPLAY, op=index), *frees]


# One small step by hand: x -> a -> b (held); bn makes `new` for the buffer; the backward reads a.
VALUES = (
    Value("x", 8, Kind.INPUT),
    Value("buffer", 2, Kind.BUFFER),
    Value("a", 4, producer=0),
    Value("new", 2, producer=1),
    Value("b", 4, producer=2),
    Value("tangent", 4, Kind.TANGENT),
    Value("g", 4, producer=3),
)
X, BUFFER, A, NEW, B, TANGENT, G = range(7)
OPS = (
    Op("relu", "test.relu", Phase.FORWARD, (X,), (A,)),
    Op("bn", "test.bn", Phase.FORWARD, (A, BUFFER), (NEW,), replayable=False, why_not="reads a buffer that the step changes"),
    Op("mul", "test.mul", Phase.FORWARD, (A,), (B,), in_place=(A, B)),
    Op("mul_b", "test.mul_b", Phase.BACKWARD, (TANGENT, A), (G,), replayable=False),
)
GRAPH = Graph(OPS, VALUES, outputs=(B,), gradients=(G,), updates=((NEW, BUFFER),)).verify()
PROBLEM = Problem(GRAPH, Costs((1.0,) * 4, (1.0,) * 4, (0, 0, 0, 3)), budget_bytes=100, static_bytes=10, optimizer_bytes=1)


def run(op: int, **fields: object) -> Step:
    return Step(StepKind.COMPUTE, op=op, **fields)  # type: ignore[arg-type]


def replay(op: int, **fields: object) -> Step:
    return Step(StepKind.REPLAY, op=op, **fields)  # type: ignore[arg-type]


def free(value: int, **fields: object) -> Step:
    return Step(StepKind.FREE, value=value, **fields)  # type: ignore[arg-type]


KEEP = [run(0), run(1), run(2), free(NEW), run(3), free(A)]
RECOMPUTE = [run(0), run(1), run(2, in_place=True), free(NEW), replay(0), run(3), free(A)]


IN_FORWARD = [run(0), run(1), free(A), replay(0), run(2, in_place=True), free(NEW), replay(0), run(3), free(A)]


def test_a_replay_in_the_forward_by_hand() -> None:
    """It takes what it makes beside what is there, and no tangent; the last one of the forward is what the backward reads."""
    assert check(PROBLEM, Schedule(tuple(IN_FORWARD))) == 29
    bare = replace(PROBLEM, costs=Costs((1.0,) * 4, (1.0,) * 4, (20, 0, 0, 0)))
    # relu again, in the backward: static 10 + b 4 + tangent 4 + a 4 + workspace 20
    assert check(bare, Schedule(tuple(IN_FORWARD))) == 42
    # and in the forward: static 10 + new 2 + a 4 + workspace 20
    saved = [*IN_FORWARD[:4], run(2), free(NEW), run(3), free(A)]
    assert check(bare, Schedule(tuple(saved))) == 36


def test_the_peak_by_hand() -> None:
    # mul_b: static 10 + a 4 + b 4 + tangent 4 + g 4 + workspace 3
    assert check(PROBLEM, Schedule(tuple(KEEP))) == 29
    assert check(PROBLEM, Schedule(tuple(RECOMPUTE))) == 29
    # the optimizer: static 10 + b 4 + g 4 + its own 20
    assert check(replace(PROBLEM, optimizer_bytes=20), Schedule(tuple(KEEP))) == 38


BROKEN = {
    "computed twice": ([run(0), run(0)], "relu is computed twice or out of order\n  where  step 1: compute relu"),
    "out of order": (
        [run(0), run(2), run(1)],
        "bn was not computed\n  where  step 1: compute mul\n  why    it always runs, before this",
    ),
    "backward too early": ([run(0), run(3)], "bn was not computed\n  where  step 1: compute mul_b"),
    "replay before the first run": ([replay(0), run(0)], "relu is replayed before it was computed\n  where  step 0: replay relu"),
    "replay where bn is to come and does not": ([run(0), replay(0)], "bn was not computed\n  where  step 1: replay relu"),
    "replay in the forward of what must not be": (
        [run(0), run(1), replay(1), run(2)],
        "an op that must not be replayed is\n  where  step 2: replay bn\n  why    reads a buffer that the step changes",
    ),
    "replay of what is still to come": (
        [run(0), run(1), free(A), replay(2), run(2)],
        "mul is replayed before it was computed\n  where  step 3: replay mul",
    ),
    "in place over what the forward has made again": (
        [run(0), replay(0), run(1), run(2), free(NEW), replay(2, in_place=True)],
        "a is overwritten by b, of which a copy is live\n  where  step 5: replay mul",
    ),
    "cut short": (KEEP[:4], "mul_b was not computed\n  where  the end of the schedule"),
    "empty": ([], "relu was not computed"),
    "read of a freed value": ([run(0), free(A), run(1)], "a is read and not live\n  where  step 2: compute bn"),
    "read of an overwritten value": (
        [run(0), run(1), run(2, in_place=True), free(NEW), run(3)],
        "a is read and not live\n  where  step 4: compute mul_b",
    ),
    "freed twice": (
        [run(0), run(1), run(2), free(NEW), free(NEW)],
        "a value is freed that is not live\n  where  step 4: free new",
    ),
    "freed and held": ([*KEEP[:3], free(B)], "a value that the caller holds is freed\n  where  step 3: free b"),
    "freed and given": ([free(X)], "a given value is freed\n  where  step 0: free x"),
    "leak": (KEEP[:-1], "a is still live at the end of the step\n  why    only what the caller holds may be"),
    "freed before its buffer is updated": (
        [run(0), run(1), free(NEW), run(2)],
        "new is freed before it is copied into its buffer\n  where  step 2: free new",
    ),
    "replay of what must not be": (
        [*KEEP[:4], replay(1)],
        "an op that must not be replayed is\n  where  step 4: replay bn\n  why    reads a buffer that the step changes",
    ),
    "replay of a backward op": ([*KEEP[:5], replay(3)], "a backward op is replayed\n  where  step 5: replay mul_b"),
    "forward after the backward began": (
        [*KEEP[:3], replay(0), run(2)],
        "mul is computed twice or out of order\n  where  step 4: compute mul",
    ),
    "in place where it cannot": ([run(0, in_place=True)], "an op works in place that cannot\n  where  step 0: compute relu"),
    "in place over what is live": (
        [*KEEP[:4], replay(2, in_place=True)],
        "a is overwritten by b, of which a copy is live\n  where  step 4: replay mul",
    ),
    "no such op": ([run(4)], "step 0 runs no op of the graph"),
    "a negative op": ([run(-1)], "step 0 runs no op of the graph"),
    "a truth value for an op": ([run(False)], "step 0 runs no op of the graph"),
    "no op": ([Step(StepKind.COMPUTE)], "step 0 runs no op of the graph"),
    "a run with a value": ([run(0, value=A)], "step 0 runs no op of the graph"),
    "no such value": ([free(7)], "step 0 frees no value of the graph"),
    "no value": ([Step(StepKind.FREE)], "step 0 frees no value of the graph"),
    "a free with an op": ([run(0), free(A, op=0)], "step 1 frees no value of the graph"),
    "a free in place": ([run(0), free(A, in_place=True)], "step 1 frees no value of the graph"),
    "no such kind": ([Step("copy", op=0)], "step 0 is of no known kind\n  why    'copy'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_by_hand(name: str) -> None:
    steps, message = BROKEN[name]
    with pytest.raises(ScheduleError) as raised:
        check(PROBLEM, Schedule(tuple(steps)))
    assert str(raised.value).startswith(f"ScheduleError: {message}")


def test_in_the_backward_only_its_own_copies_are_overwritten() -> None:
    """x -> a -> b -> c (held); the backward reads b: with ``retain_graph`` a second one reads what the forward made again."""
    x, a, b, c, tangent, g = range(6)
    kinds = (Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION, Kind.ACTIVATION, Kind.TANGENT, Kind.ACTIVATION)
    made_by = (None, 0, 1, 2, None, 3)
    values = tuple(Value(n, 1, k, p) for n, k, p in zip("xabctg", kinds, made_by, strict=True))
    ops = (
        Op("f", "t.f", Phase.FORWARD, (x,), (a,)),
        Op("g", "t.g", Phase.FORWARD, (a,), (b,), in_place=(a, b)),
        Op("h", "t.h", Phase.FORWARD, (b,), (c,)),
        Op("h_b", "t.h_b", Phase.BACKWARD, (tangent, b), (g,), replayable=False),
    )
    graph = Graph(ops, values, outputs=(c,), gradients=(g,)).verify()
    problem = Problem(graph, Costs((1.0,) * 4, (1.0,) * 4, (0,) * 4), budget_bytes=100)
    forward = (run(0), run(1, in_place=True))
    check(problem, Schedule((*forward, replay(0), free(b), replay(1, in_place=True), run(2), run(3), free(b))))
    check(problem, Schedule((*forward, run(2), free(b), replay(0), replay(1, in_place=True), run(3), free(b))))
    with pytest.raises(ScheduleError, match="a is overwritten in the backward and the forward made it"):
        check(problem, Schedule((*forward, replay(0), run(2), free(b), replay(1, in_place=True), run(3), free(b))))


def test_a_buffers_new_value_cannot_be_made_again_for_the_copy() -> None:
    ops = (OPS[0], replace(OPS[1], replayable=True, why_not=""), *OPS[2:])
    problem = replace(PROBLEM, graph=replace(GRAPH, ops=ops))
    again = (run(0), run(1), replay(1), run(2), free(NEW), run(3), free(A))
    check(problem, Schedule(again))
    with pytest.raises(ScheduleError, match="new is freed before it is copied into its buffer"):
        check(problem, Schedule((*again[:2], free(NEW), *again[2:])))


def test_what_the_caller_holds_is_not_overwritten() -> None:
    held = replace(GRAPH, outputs=(A, B))
    with pytest.raises(ScheduleError, match="a is overwritten and the caller holds it"):
        check(replace(PROBLEM, graph=held), Schedule((run(0), run(1), run(2, in_place=True))))


def test_a_buffers_new_value_is_not_overwritten_before_the_copy() -> None:
    updated = replace(GRAPH, updates=((NEW, BUFFER), (A, BUFFER)))
    with pytest.raises(ScheduleError, match="a is overwritten before it is copied into its buffer"):
        check(replace(PROBLEM, graph=updated), Schedule((run(0), run(1), run(2, in_place=True))))


def test_a_held_value_of_an_optional_op_must_be_made() -> None:
    optional = replace(GRAPH, ops=(*OPS[:2], replace(OPS[2], optional=True), OPS[3]))
    with pytest.raises(ScheduleError, match="b is not live at the end of the step"):
        check(replace(PROBLEM, graph=optional), Schedule((run(0), run(1), free(NEW), run(3), free(A))))


@pytest.mark.parametrize("workspace", [(0, 0, 0), (0, 0, 0, -1)])
def test_costs_of_another_graph_are_refused(workspace: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="not one non-negative number per op"):
        check(replace(PROBLEM, costs=replace(PROBLEM.costs, workspace_bytes=workspace)), Schedule(tuple(KEEP)))
