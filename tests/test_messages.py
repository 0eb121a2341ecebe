"""The full text of every error as a user sees it, reviewed in tests/golden/messages.txt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from golden_text import assert_golden
from hand_made import HAND_MADE, OPS
from strategies import budget_range, random_problem

from actsolve.check import check
from actsolve.errors import ActsolveError, CaptureError, FileFormatError, ForwardError, InfeasibleBudget
from actsolve.graph_file import load_graph, save_graph
from actsolve.plan import Plan
from actsolve.plan_file import PlanFile, load_plan, plan_file
from actsolve.planners import PlannerOptions, plan
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, build_schedule
from actsolve.units import parse_bytes

N = len(OPS)
PROBLEM = Problem(HAND_MADE, Costs((1.0,) * N, (1.0,) * N, (0,) * N), budget_bytes=10**6, static_bytes=5248)
KEPT = frozenset(HAND_MADE.decidable)
SCHEDULE = build_schedule(HAND_MADE, KEPT)


def a_plan() -> PlanFile:
    return plan_file(PROBLEM, Plan("keep_all", KEPT), SCHEDULE, target="gpt_mini")


def tight_problem() -> Problem:
    """A problem that needs the solver: keep-all is a byte over the budget."""
    problem = random_problem(0)
    return replace(problem, budget_bytes=budget_range(problem)[1] - 1)


def plan_of_another_model() -> object:
    return a_plan().check_matches(replace(HAND_MADE, ops=(*OPS[:3], replace(OPS[3], signature="p=0.2"), *OPS[4:])))


def plan_with_a_step_too_few() -> object:
    file = a_plan()
    return file.model_copy(update={"steps": file.steps[:-1]}).decode(HAND_MADE)


def infeasible() -> object:
    raise InfeasibleBudget(  # the example of STYLE.md
        "no plan fits 4.00 GiB (4294967296 bytes).",
        where="aten.mm at models_zoo/gpt.py:88",
        why="inputs + output + static = 5.12 GiB must be live together",
        try_="--mem-budget 5.2GiB, or a smaller batch",
        smallest_bytes=5_583_457_485,
    )


def raises() -> None:
    # As actsolve.capture.joint raises it.
    raise ForwardError("the forward of Net raises", why="ValueError: a bad sample", try_="the model with these inputs")


def untraceable() -> object:
    raise CaptureError(  # as actsolve.capture.joint raises it, which needs torch
        "cannot trace Router",
        where="examples/router.py:31",
        why="GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq(u0, 1)",
        try_='a model without data-dependent Python, or on_error="original" to train it as it is',
    )


def written(content: str, load: Callable[[str], object]) -> Callable[[], object]:
    def action() -> object:
        Path("damaged.json").write_text(content)
        return load("damaged.json")

    return action


def a_backward_edge() -> object:
    """Op 0 reads what op 2 makes."""
    save_graph("graph.json", HAND_MADE)
    text = Path("graph.json").read_text().replace('"inputs": [0, 1]', '"inputs": [0, 7]', 1)
    Path("graph.json").write_text(text)
    return load_graph("graph.json")


MESSAGES: dict[str, Callable[[], object]] = {
    "a size that is none": lambda: parse_bytes("lots", what="--mem-budget"),
    "a unit that is none": lambda: parse_bytes("8 parsecs", what="--mem-budget"),
    "a size with a space": lambda: parse_bytes("8 GB", what="--mem-budget"),
    "a size that is too large": lambda: parse_bytes("9999999TiB", what="--host-budget"),
    "a planner that is none": lambda: plan(PROBLEM, "magic"),
    "a pin on nothing": lambda: plan(replace(PROBLEM, pinned_keep=frozenset({0})), "milp"),
    "a solver that is none": lambda: plan(tight_problem(), "milp", PlannerOptions(solver="abacus")),
    "a malformed graph": lambda: replace(HAND_MADE, ops=(*OPS, OPS[0])).verify(),
    "a file that is not there": lambda: load_plan("plan.json"),
    "a file cut short": written('{"format": "actsolve-plan-1", "steps": [["comp', load_plan),
    "a file of another format": written('{"format": "rockmate-3"}', load_graph),
    "a file with a field too many": written('{"format": "actsolve-graph-1", "values": [], "ops": [], "sizes": []}', load_graph),
    "a file with a number that is none": written('{"format": "actsolve-plan-1", "budget_bytes": NaN}', load_plan),
    "a file with a backward edge": a_backward_edge,
    "a plan of another model": plan_of_another_model,
    "a plan with a step too few": plan_with_a_step_too_few,
    "a path that cannot be written": lambda: a_plan().save("no/such/folder/plan.json"),
    "a figure that is not finite": lambda: plan_file(PROBLEM, Plan("x"), None, target="gpt_mini", gap=float("nan")),
    "a model that cannot be traced": untraceable,
    "a model that raises": raises,
    "a budget that nothing fits": infeasible,
    "a value that is not kept and cannot be replayed": lambda: build_schedule(HAND_MADE, frozenset()),
    "a schedule with a step too few": lambda: check(PROBLEM, Schedule(SCHEDULE.steps[:-1])),
    "a schedule over its budget": lambda: check(replace(PROBLEM, budget_bytes=18_000), SCHEDULE),
}


def raised(action: Callable[[], object], name: str = "") -> ActsolveError:
    try:
        action()
    except ActsolveError as error:
        return error
    raise AssertionError(f"no error: {name}")


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ActsolveError]:
    monkeypatch.chdir(tmp_path)
    return {name: raised(action, name) for name, action in MESSAGES.items()}


def test_the_text_of_every_error(errors: dict[str, ActsolveError]) -> None:
    parts = [f"# {name} (exit code {error.exit_code})\n{error}\n" for name, error in errors.items()]
    # Which solvers are installed differs, and a new planner is no new message.
    text = re.sub(r"one of (highs|milp), .*", r"one of \1, ...", "\n".join(parts))
    assert_golden("messages.txt", text)


def test_every_error_class_has_a_message_here(errors: dict[str, ActsolveError]) -> None:
    shown = {type(error) for error in errors.values()}
    assert set(subclasses(ActsolveError)) - shown == set()


def subclasses(cls: type[ActsolveError]) -> Iterator[type[ActsolveError]]:
    """Those of actsolve itself, not those that a test defines."""
    for sub in cls.__subclasses__():
        if sub.__module__.startswith("actsolve."):
            yield sub
        yield from subclasses(sub)


def test_a_message_is_one_block_of_readable_lines(errors: dict[str, ActsolveError]) -> None:
    """What, where, why, try: in this order, each at most once, and no traceback or address."""
    for name, error in errors.items():
        first, *rest = str(error).split("\n")
        assert first.startswith(f"{type(error).__name__}: "), name
        labels = [line[2:7].strip() for line in rest]
        assert labels == [label for label in ("where", "why", "try") if label in labels], name
        assert all(line.isprintable() and len(line) < 300 for line in rest), name
        assert "Traceback" not in str(error) and "0x7" not in str(error), name
        assert error.where or error.why or error.try_, name


def test_exit_codes() -> None:
    codes = {cls.__name__: cls.exit_code for cls in subclasses(ActsolveError)}
    assert codes == {
        "UsageError": 2,
        "FileFormatError": 2,
        "CaptureError": 2,
        "ForwardError": 2,
        "GraphError": 2,
        "SolverError": 2,
        "InfeasibleBudget": 3,
        "ScheduleError": 1,
    }


def test_the_parts_of_an_error_can_be_read() -> None:
    error = raised(infeasible)
    assert isinstance(error, InfeasibleBudget)
    assert error.smallest_bytes == 5_583_457_485
    assert error.where == "aten.mm at models_zoo/gpt.py:88"
    assert raised(lambda: load_plan("/no/plan.json")).why == "no such file or directory"
    assert str(FileFormatError("only what")) == "FileFormatError: only what"
