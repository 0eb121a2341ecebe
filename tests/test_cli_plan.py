"""``actsolve plan``: what it says of any graph file, replayed here from the words of the format alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dag_samples import random_dag, write_dag
from strategies import random_problem
from typer.testing import CliRunner, Result

from actsolve.cli.main import app
from actsolve.dag import general_dag
from actsolve.graph_file import load_graph, save_graph
from actsolve.planners.dag_search import DagSearch

FIELDS = {
    *("graph", "format", "status", "objective", "base_time", "overhead", "lower_bound", "lower_bound_kind", "gap", "extra_gap"),
    *("peak_bytes", "budget_bytes", "peak_bytes_in_order", "planner", "solve_s", "schedule", "notes"),
}


def called(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def only_object(result: Result) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the JSON")

    assert len(result.stdout.splitlines()) == 1, result.stdout
    return json.loads(result.stdout, parse_constant=refuse)


def done(*arguments: object) -> Any:
    result = called(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return only_object(result)


def refused(*arguments: object, code: int = 2) -> str:
    result = called(*arguments)
    assert result.exit_code == code, (result.exit_code, result.stderr)
    assert result.stdout == "" and "Traceback" not in result.stderr
    return "\n".join(line for line in result.stderr.splitlines() if not line.startswith("actsolve: "))


def replayed(path: Path, schedule: list[int]) -> tuple[int, float, float]:
    """Peak, time, and time of every node once: from the words of the format, with no code of the project."""
    graph = json.loads(path.read_text())
    sizes, times = ([node[key] for node in graph["nodes"]] for key in ("size_bytes", "time"))
    assert list(dict.fromkeys(schedule)) == list(range(len(sizes)))  # each first in the given order
    copies: dict[int, list[int]] = {}  # the newest of a value: [value, made at, last read at]
    intervals = []
    for step, node in enumerate(schedule):
        for producer, consumer in graph["edges"]:
            if consumer == node:
                copies[producer][2] = step  # a KeyError: it was never made
        copies[node] = [node, step, step]
        intervals.append(copies[node])
    live = [sum(sizes[v] for v, made, read in intervals if made <= step <= read) for step in range(len(schedule))]
    return max(live), sum(times[node] for node in schedule), sum(times)


@pytest.fixture
def general(tmp_path: Path) -> Path:
    return write_dag(tmp_path / "general.json", random_dag(2, 14, 6))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    problem = random_problem(8, 10)
    save_graph(tmp_path / "step.json", problem.graph, problem.costs)
    return tmp_path / "step.json"


# -- general graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["95%", "85%", "min"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_schedule_is_what_it_is_said_to_be(tmp_path: Path, seed: int, budget: str) -> None:
    path = write_dag(tmp_path / "general.json", random_dag(seed, 14, 6))
    found = done(path, "--mem-budget", budget, "--time-limit", 2)
    assert set(found) == FIELDS and found["format"] == "actsolve-dag-1" and found["lower_bound_kind"] == "global"
    peak, time, base = replayed(path, found["schedule"])
    assert (found["peak_bytes"], found["objective"], found["base_time"]) == (peak, time, base)
    assert peak <= found["budget_bytes"] and found["peak_bytes_in_order"] == replayed(path, list(range(14)))[0]
    assert found["overhead"] == pytest.approx(time / base - 1, abs=1e-12)
    assert base <= found["lower_bound"] <= found["objective"]
    assert found["gap"] == pytest.approx((time - found["lower_bound"]) / time)
    near = found["extra_gap"] <= 0.01 or time - found["lower_bound"] <= 0.0005 * base
    assert found["status"] == ("optimal" if near else "feasible")


def test_a_share_is_of_the_plain_order(general: Path) -> None:
    found = done(general, "--mem-budget", "100%")
    assert found["budget_bytes"] == found["peak_bytes_in_order"] == found["peak_bytes"]
    assert found["schedule"] == list(range(14))
    assert (found["status"], found["overhead"], found["gap"], found["extra_gap"]) == ("optimal", 0, 0, 0)
    assert "as it is: nothing runs again" in called(general, "--mem-budget", "1GiB").stdout


def test_no_time_at_all_is_no_overhead(tmp_path: Path) -> None:
    path = write_dag(tmp_path / "free.json", general_dag((8, 4, 4, 1), ((), (0,), (1,), (0, 2)), (0,) * 4, 0))
    found = done(path, "--mem-budget", "13")
    assert found["schedule"] == [0, 1, 2, 0, 3]
    assert (found["overhead"], found["gap"], found["extra_gap"], found["status"]) == (0, 0, 0, "optimal")


def test_integers_are_exact_and_others_are_told_apart(tmp_path: Path) -> None:
    big = 2**60 + 1
    path = write_dag(tmp_path / "big.json", general_dag((5, 1), ((), (0,)), (big, 1), 0))
    assert done(path, "--mem-budget", "100%")["objective"] == big + 1
    path = write_dag(tmp_path / "floats.json", general_dag((5, 1), ((), (0,)), (0.1, 0.2), 0))
    assert done(path, "--mem-budget", "100%")["base_time"] == pytest.approx(0.3)


def test_the_report(general: Path, tmp_path: Path) -> None:
    result = called(general, "--mem-budget", "85%", "--time-limit", 2, "--out", tmp_path / "out.json")
    assert result.exit_code == 0
    for words in ("sample within ", "of 14 nodes run", "lower bound", "global: no schedule takes less", "run again most"):
        assert words in result.stdout
    assert "actsolve: planning 14 nodes" in result.stderr
    assert set(json.loads((tmp_path / "out.json").read_text())) == FIELDS


def test_what_cannot_fit_is_proven_and_the_smallest_is_named(general: Path) -> None:
    message = refused(general, "--mem-budget", "3", "--time-limit", 2, code=3)
    assert message.startswith("InfeasibleBudget: no schedule fits 3 B (3 bytes)\n  where  sample, 14 nodes\n  why    node ")
    assert "alone needs" in message and "the smallest found to work" in message
    result = called(general, "--mem-budget", "3", "--time-limit", 2, "--json")
    found = only_object(result)
    assert result.exit_code == 3 and found["status"] == "infeasible" and found["error"]["type"] == "InfeasibleBudget"
    assert found["schedule"] is None is found["objective"]
    smallest = found["smallest_budget_bytes"]
    again = done(general, "--mem-budget", smallest, "--time-limit", 2)
    assert replayed(general, again["schedule"])[0] <= smallest


def test_nothing_found_in_time_is_unknown(general: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DagSearch, "run", lambda self: None)
    result = called(general, "--mem-budget", "99%", "--time-limit", 3, "--json")
    found = only_object(result)
    assert result.exit_code == 3 and found["status"] == "unknown" and found["gap"] is None
    assert found["smallest_budget_bytes"] == found["peak_bytes_in_order"] and found["lower_bound"] == found["base_time"]
    assert "was found for" in found["error"]["what"] and "not proven to be impossible" in found["error"]["why"]


def test_ctrl_c_takes_the_best_so_far(general: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DagSearch.run

    def pressed(self: DagSearch) -> None:
        if self.options.progress is not None:  # the plan itself, not the search for the smallest budget
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(DagSearch, "run", pressed)
    found = done(general, "--mem-budget", "min", "--time-limit", 2)
    assert found["notes"] == ["Interrupted: this is the best so far."]
    assert replayed(general, found["schedule"])[0] <= found["budget_bytes"]
    assert "before Ctrl-C" in refused(general, "--mem-budget", "80%", code=3)


def test_flags_of_training_steps_are_refused(general: Path) -> None:
    message = refused(general, "--mem-budget", "80%", "--hardware", "a100", "--h2d", "1GB/s")
    assert "--hardware, --h2d: of no meaning for this file" in message and "leave out --hardware, --h2d" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mem-budget", "lots"), "cannot read"),
        (("--mem-budget", "0"), "it is not positive"),
        (("--mem-budget", "80%", "--gap", "-1"), "cannot use gap"),
        (("--mem-budget", "80%", "--time-limit", "0"), "cannot use a time limit"),
        (("--mem-budget", "80%", "--solver", "abacus"), "no solver is called"),
        (("--mem-budget", "80%", "--out", "nowhere/out.json"), "cannot write the result"),
    ],
)
def test_wrong_arguments(general: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(general, *arguments)


def test_unreadable_files(tmp_path: Path) -> None:
    assert "it is a directory" in refused(tmp_path, "--mem-budget", "80%")
    assert "no such file" in refused(tmp_path / "none.json", "--mem-budget", "80%")
    (tmp_path / "plan.json").write_text('{"format": "actsolve-plan-1"}')
    assert "not 'actsolve-dag-1' or 'actsolve-graph-1'" in refused(tmp_path / "plan.json", "--mem-budget", "80%")


# -- training steps ----------------------------------------------------------------------------------------------------


def test_a_training_step_has_the_same_fields(step: Path) -> None:
    found = done(step, "--mem-budget", "60", "--static-bytes", "0", "--optimizer", "none")
    assert set(found) - {"copies"} == FIELDS and found["format"] == "actsolve-graph-1"
    assert found["lower_bound_kind"] in ("plan class", "backward", "global") and found["status"] in ("optimal", "feasible")
    graph, costs = load_graph(step)
    assert costs is not None
    first = list(dict.fromkeys(found["schedule"]))
    always = [i for i, op in enumerate(graph.ops) if not op.optional]
    assert [i for i in first if i in always] == always
    again = len(found["schedule"]) - len(first)
    assert again > 0 and found["objective"] > found["base_time"]
    assert found["peak_bytes"] <= found["budget_bytes"] < found["peak_bytes_in_order"]
    assert found["base_time"] <= found["lower_bound"] <= found["objective"]


def test_it_is_the_plan_of_optimize(tmp_path: Path) -> None:
    small = ("gpt-mini", "--set", "layers=1", "--set", "batch=8", "--set", "seq=64", "--set", "width=32", "--set", "vocab=64")
    run = CliRunner().invoke
    assert run(app, ["trace", *small, "--out", str(tmp_path / "g.json")]).exit_code == 0
    flags = ("--hardware", "a100", "--host-budget", "0", "--mem-budget", "90%", "--gap", "0.2")
    optimized = only_object(run(app, ["optimize", *small, *flags, "--json"]))
    found = done(tmp_path / "g.json", *flags)
    assert found["graph"] == "gpt-mini"
    assert (found["budget_bytes"], found["peak_bytes_in_order"]) == (
        optimized["budget_bytes"],
        optimized["keep_all"]["peak_bytes"],
    )
    assert found["objective"] == pytest.approx(optimized["predicted"]["step_s"])
    message = refused(tmp_path / "g.json", "--mem-budget", "60%")
    assert "what the ops cost is not known" in message and "--hardware a100" in message


def test_what_is_offloaded_is_listed(tmp_path: Path) -> None:
    small = ("gpt-mini", "--set", "layers=2", "--set", "batch=8", "--set", "seq=64", "--set", "width=32", "--set", "vocab=64")
    assert CliRunner().invoke(app, ["trace", *small, "--hardware", "a100", "--out", str(tmp_path / "g.json")]).exit_code == 0
    given = (tmp_path / "g.json", "--mem-budget", "70%", "--h2d", "900GB/s", "--d2h", "900GB/s", "--planner", "offload_all")
    found = done(*given)
    assert found["copies"] and set(found["copies"][0]) == {"value", "name", "size_bytes", "free_at", "back_at"}
    assert found["planner"] == "offload_all" and found["lower_bound"] is None is found["gap"]
    assert "copies" not in done(tmp_path / "g.json", "--mem-budget", "80%")


def test_a_training_step_that_does_not_fit(step: Path) -> None:
    message = refused(step, "--mem-budget", "2", code=3)
    assert message.startswith("InfeasibleBudget: no plan fits 2 B (2 bytes)") and "the smallest found to work" in message
    found = only_object(called(step, "--mem-budget", "2", "--json"))
    assert found["status"] == "infeasible" and found["schedule"] is None
    least = done(step, "--mem-budget", found["smallest_budget_bytes"])
    assert least["peak_bytes"] <= found["smallest_budget_bytes"]
    assert done(step, "--mem-budget", "min")["budget_bytes"] == found["smallest_budget_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware", "auto"), "ops cannot be measured here"),
        (("--hardware", "abacus"), "no hardware profile is called"),
        (("--planner", "magic"), "no planner is called"),
        (("--planner", "offload_all"), "does not apply here"),
        (("--optimizer", "magic"), "no optimizer is called"),
        (("--static-bytes", "some"), "cannot read --static-bytes"),
        (("--h2d", "fast"), "cannot read --h2d"),
    ],
)
def test_wrong_arguments_for_a_training_step(step: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(step, "--mem-budget", "80%", *arguments)


# -- without torch -----------------------------------------------------------------------------------------------------


def test_torch_is_never_imported(general: Path, step: Path) -> None:
    assert torch.__version__  # here it is; in a process of its own the command does without
    for path in (general, step):
        code = f"""
import sys
sys.modules["torch"] = None
from actsolve.cli.main import app
try:
    app(["plan", {str(path)!r}, "--mem-budget", "95%", "--json"])
finally:
    assert [name for name in sys.modules if name.split(".")[0] == "torch"] == ["torch"]
"""
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["schedule"]
