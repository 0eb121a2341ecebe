"""The command line: what it prints where, its exit codes, and that no failure is more than one message."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from actsolve.cli.main import app
from actsolve.planners import PLANNERS
from actsolve.cli.session import Session
from actsolve.plan_file import load_plan
from actsolve.planners import BASELINES, QUICK
from actsolve.planners.lp import available_solvers

ROOT = Path(__file__).parents[1]
SMALL = ("gpt-mini", "--set", "layers=2", "--set", "batch=8", "--set", "seq=64", "--set", "width=32", "--set", "vocab=64")
PROFILE = ("--hardware", "a100")

# Proving this one to the last bit takes HiGHS about 10 s.
SLOW_TO_PROVE = ("optimize", "unet", "--mem-budget", "50%", *PROFILE, "--gap", "0")

FACTORY = """
import torch
from actsolve import TrainingStep

print("noise from the factory")

def step(batch=8, width=16):
    print("more noise")
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())))
    return TrainingStep(model, (torch.ones(batch, width),), loss_fn=lambda y: y.square().mean())

def no_loss():
    return TrainingStep(torch.nn.Linear(4, 4), (torch.ones(2, 4),))

def raises():
    raise RuntimeError("out of ideas")

def odd():
    raise BaseException("odd")

def gone():
    raise GeneratorExit
"""


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of costs for this file alone; and one thread, since two that wait for each other are slow on a busy machine."""
    threads, before = torch.get_num_threads(), os.environ.get("ACTSOLVE_CACHE_DIR")
    torch.set_num_threads(1)
    os.environ["ACTSOLVE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    torch.set_num_threads(threads)
    os.environ.pop("ACTSOLVE_CACHE_DIR")
    if before is not None:
        os.environ["ACTSOLVE_CACHE_DIR"] = before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FACTORY)
    return tmp_path


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def done(*arguments: str) -> Any:
    """The JSON object of a command that must succeed."""
    result = called(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return only_object(result.stdout)


def only_object(stdout: str) -> Any:
    """The one object on stdout; there must be nothing else, and no number that JSON has not."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the JSON")

    lines = stdout.splitlines()
    assert len(lines) == 1, stdout
    return json.loads(lines[0], parse_constant=refuse)


def refused(*arguments: str, code: int = 2) -> str:
    """The message of a command that must fail: one block on stderr, nothing on stdout."""
    result = called(*arguments)
    assert result.exit_code == code, (result.exit_code, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("actsolve: ", "noise", "more noise"))]
    assert 1 <= len(lines) <= 4, result.stderr
    return "\n".join(lines)


# -- optimize ----------------------------------------------------------------------------------------------------------

FIELDS = {
    *("target", "budget_bytes", "static_bytes", "status", "objective_s", "bound_s", "gap", "step_gap", "global_bound_s"),
    *("planner", "solve_s", "capture_s", "predicted", "decisions", "keep_all", "baselines"),
}


def test_optimize_says_what_it_planned(folder: Path) -> None:
    found = done("optimize", *SMALL, "--mem-budget", "60%", *PROFILE, "--out", "plan.json")
    assert set(found) >= FIELDS
    assert "measured" not in found
    assert set(found["predicted"]) == {
        *("peak_bytes", "step_s", "recompute_s", "stall_s", "d2h_bytes", "h2d_bytes", "host_peak_bytes")
    }
    assert set(found["decisions"]) == {"keep", "recompute", "offload"}
    assert set(found["baselines"]) == set(QUICK)
    assert set(found["baselines"]["sqrt_l"]) >= {"peak_bytes", "step_s", "fits"}
    assert (found["target"], found["planner"], found["status"]) == ("gpt-mini", "milp", "optimal")
    assert found["predicted"]["peak_bytes"] <= found["budget_bytes"] < found["keep_all"]["peak_bytes"]
    assert found["decisions"]["recompute"]["count"] > 0 and found["predicted"]["recompute_s"] > 0
    assert 0 <= found["gap"] <= 0.01 or found["step_gap"] <= 0.0005
    assert found["static_bytes"] == sum(found["static"].values())
    plan = load_plan(folder / "plan.json")
    assert plan.budget_bytes == found["budget_bytes"] and plan.target == "gpt-mini"


def test_the_report_is_on_stdout_and_the_progress_on_stderr(folder: Path) -> None:
    result = called("optimize", "mine.py:step", "--mem-budget", "100%", *PROFILE)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("mine.py:step fits ")
    assert "nothing is recomputed" in result.stdout.splitlines()[0]
    assert "noise" not in result.stdout and "noise from the factory" in result.stderr and "more noise" in result.stderr
    assert "actsolve: tracing" in result.stderr and "actsolve: planning by milp" in result.stderr


def test_a_share_is_of_what_keeping_everything_needs_above_static() -> None:
    found = {
        share: done("optimize", *SMALL, "--mem-budget", share, "--hardware", "a100", "--reserve", "0")
        for share in ("100%", "80%")
    }
    static, keep_all = found["100%"]["static_bytes"], found["100%"]["keep_all"]["peak_bytes"]
    assert found["100%"]["budget_bytes"] == keep_all
    assert found["80%"]["budget_bytes"] == static + int(0.8 * (keep_all - static))
    assert found["100%"]["decisions"]["recompute"]["count"] == 0 and found["100%"]["objective_s"] == 0


@pytest.mark.slow
def test_a_gpu_has_a_reserve_and_a_flag_overrides_it() -> None:
    found = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE)
    assert found["static"]["reserve"] == int(0.05 * found["budget_bytes"])
    given = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE, "--reserve", "1MiB")
    assert given["static"]["reserve"] == 2**20
    assert given["budget_bytes"] - 2**20 == pytest.approx(0.95 * found["budget_bytes"], abs=2)
    static = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE, "--static-bytes", "10MB")
    assert static["static"] == {"given": 10_000_000}


def test_flags_change_what_is_static() -> None:
    adamw, sgd, accumulated = (
        done("optimize", *SMALL, "--mem-budget", "100%", *PROFILE, *flags)["static"]
        for flags in ((), ("--optimizer", "sgd"), ("--grads", "accumulate"))
    )
    assert adamw["optimizer_state"] > 2 * adamw["parameters"] and sgd["optimizer_state"] == 0
    assert (adamw["gradients"], accumulated["gradients"]) == (0, adamw["parameters"])


def test_a_shard_holds_its_part_and_no_gradients_but_its_own() -> None:
    wide = ("gpt-mini", "--set", "layers=1", "--set", "width=256", "--set", "vocab=64", "--set", "seq=64", "--set", "batch=4")
    whole, part = (done("optimize", *wide, "--mem-budget", "100%", *PROFILE, *flags) for flags in ((), ("--shards", "4")))
    shared = whole["static"]["parameters"], whole["static"]["optimizer_state"], whole["static"]["parameters"]
    held = part["static"]["parameters"], part["static"]["optimizer_state"], part["static"]["gradients"]
    assert all(4 * own - 4 < of_all <= 4 * own for own, of_all in zip(held, shared, strict=True))
    without_static = [found["keep_all"]["peak_bytes"] - sum(found["static"].values()) for found in (whole, part)]
    assert without_static[1] < without_static[0]  # no gradient is there but while it is made
    assert "a shard cannot be run" in refused("optimize", *SMALL, "--mem-budget", "100%", "--shards", "2", "--run")
    assert "shards=0" in refused("optimize", *SMALL, "--mem-budget", "100%", *PROFILE, "--shards", "0")


def test_pins_are_kept() -> None:
    free = done("optimize", *SMALL, "--mem-budget", "100%", *PROFILE)
    pinned = done("optimize", *SMALL, "--mem-budget", "100%", *PROFILE, "--recompute", "blocks.0")
    assert free["objective_s"] == 0 < pinned["objective_s"]


def test_run_measures_what_was_planned(folder: Path) -> None:
    found = done("optimize", "mine.py:step", "--set", "batch=64", "--set", "width=32", "--mem-budget", "85%", "--run")
    measured = found["measured"]
    assert set(measured) >= {"peak_bytes", "step_s", "eager_peak_bytes", "eager_step_s", "gradients"}
    assert measured["gradients"] == "bitwise"
    assert measured["peak_bytes"] <= found["budget_bytes"]
    assert measured["step_s"] > 0 and measured["eager_step_s"] > 0


def test_a_plan_is_trained_with_again(folder: Path) -> None:
    planned = done("optimize", *SMALL, "--mem-budget", "75%", "--out", "plan.json")
    trained = done("run", *SMALL, "--plan", "plan.json", "--steps", "4")
    assert len(trained["losses"]) == 4 and trained["losses"][3] < trained["losses"][0]
    assert trained["peak_bytes"] <= trained["budget_bytes"] == planned["budget_bytes"]
    assert trained["predicted_peak_bytes"] == planned["predicted"]["peak_bytes"]
    text = called("run", *SMALL, "--plan", "plan.json", "--steps", "1").stdout
    assert re.search(r"^step 1  4\.\d{6}\n\npeak  [\d.]+ MiB  within the budget of [\d.]+ MiB; predicted", text), text


# -- compare, trace ----------------------------------------------------------------------------------------------------


def test_compare_puts_planners_side_by_side() -> None:
    found = done("compare", *SMALL, "--mem-budget", "85%", *PROFILE)
    planners = found["planners"]
    assert set(planners) == {"milp", *BASELINES}
    ours = planners["milp"]
    assert ours["fits"] and ours["peak_bytes"] <= found["budget_bytes"]
    assert not planners["keep_all"]["fits"] and planners["keep_all"]["overhead"] == 0
    for name in ("sqrt_l", "per_layer"):
        assert ours["below"][name] == pytest.approx(1 - ours["step_s"] / planners[name]["step_s"])
        assert ours["step_s"] <= planners[name]["step_s"] or not planners[name]["fits"]
    text = called("compare", *SMALL, "--mem-budget", "85%", *PROFILE).stdout
    assert [line.split()[0] for line in text.splitlines()[3:7]] == ["milp", "keep_all", "sqrt_l", "per_layer"]


def test_compare_runs_what_fits(folder: Path) -> None:
    found = done("compare", "mine.py:step", "--set", "batch=64", "--mem-budget", "100%", "--run", "--out", "table.json")
    assert json.loads(Path("table.json").read_text()) == found
    for name, figures in found["planners"].items():
        assert figures["fits"] == ("measured" in figures), name
        if figures["fits"]:
            assert figures["measured"]["gradients"] == "bitwise", name
            assert figures["measured"]["peak_bytes"] <= found["budget_bytes"], name


def test_compare_where_nothing_fits() -> None:
    result = called("compare", *SMALL, "--mem-budget", "1MB", *PROFILE, "--json")
    assert result.exit_code == 3
    planners = only_object(result.stdout)["planners"]
    assert planners["milp"]["status"] == "infeasible" and planners["milp"]["peak_bytes"] is None
    assert planners["milp"]["smallest_budget_bytes"] > 10**6
    assert not any(p["fits"] for p in planners.values())


def test_trace_prints_the_graph_and_writes_it(folder: Path) -> None:
    text = called("trace", "mine.py:step").stdout
    assert text.startswith("graph mine.py:step: ") and "aten.addmm.default" in text and "mine.py:" in text
    summary = called("trace", "mine.py:step", "--summary").stdout
    assert text.startswith(summary) and "aten" not in summary
    found = done("trace", "mine.py:step", "--out", "graph.json", *PROFILE)
    from actsolve.graph_file import load_graph

    graph, costs = load_graph("graph.json")
    assert (found["forward_ops"], found["backward_ops"]) == (graph.n_forward, len(graph.ops) - graph.n_forward)
    assert costs is not None and found["step_s"] == sum(costs.seconds)
    assert found["graph"] == json.loads(Path("graph.json").read_text())
    assert found["fingerprint"] == graph.fingerprint


def test_a_model_of_any_size_is_traced_without_its_memory() -> None:
    found = done("trace", "llama-70b", "--set", "layers=2", "--set", "batch=1")
    assert found["values"]["parameter"]["bytes"] > 4e9
    assert done("trace", "mlp")["values"]["constant"]["count"] == 1  # the targets that its loss closes over


# -- failing well ------------------------------------------------------------------------------------------------------

BUDGETS = {
    "8 GB": r"a space stands before the unit\n  try    8GB",
    "0": r"it is not positive",
    "0%": r"above 0% and at most 100%",
    "-1": r"it is negative",
    "150%": r"above 0% and at most 100%",
    "abc": r"it is not a number with a unit",
    "": r"it is not a number with a unit",
    "nan": r"it is not a number with a unit",
    "8XB": r"'XB' is not a unit of bytes",
    "1e400": r"it is not a number with a unit\n  try    8GiB, 7500MB or plain bytes; or 60% or min",
    "8G": r"'G' is not a unit of bytes\n  try    KB, .* or TiB; or 60% or min",
    "0.6": r"it has a decimal point and no unit: a share is written with %\n  try    60%",
    ".5": r"a share is written with %\n  try    50%",
    "60.5": r"a share is written with %\n  try    8GiB, .*60%",
    "\uff19GB": r"it is not a number with a unit",
    "9" * 5000: r"cannot read memory budget '9{37}\.\.\.'\n  why    it is more than 2\*\*62 bytes",
    "9" * 5000 + "%": r"cannot use the memory budget '9{37}\.\.\.'\n  why    a share is of",
    "x" * 5000: r"cannot read memory budget 'x{37}\.\.\.'",
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_that_cannot_be_used(budget: str) -> None:
    for command in ("optimize", "compare"):
        message = refused(command, *SMALL, "--mem-budget", budget)
        assert re.search(BUDGETS[budget], message) and len(message) < 400


MISUSE: dict[str, tuple[tuple[str, ...], str]] = {
    "target": (("trace", "gtp-mini"), r"there is no target 'gtp-mini'(.|\n)*gpt-mini"),
    "file": (("optimize", "none.py:f", "--mem-budget", "1GB"), r"where  none.py\n  why    there is no such file"),
    "factory": (("optimize", "mine.py:raises", "--mem-budget", "1GB"), r"where  mine.py:16\n  why    RuntimeError: out of ideas"),
    "base exception": (("trace", "mine.py:odd"), r"where  mine.py:19\n  why    BaseException: odd"),
    "generator exit": (("trace", "mine.py:gone"), r"where  mine.py:22\n  why    GeneratorExit"),
    "override": (("trace", "mine.py:step", "--set", "batch=big"), r"cannot set batch to 'big'"),
    "hardware": (("optimize", *SMALL, "--mem-budget", "1GB", "--hardware", "a10O"), r"no hardware profile is called 'a10O'"),
    "planner": (("optimize", *SMALL, "--mem-budget", "1GB", "--planner", "magic"), r"no planner is called 'magic'"),
    "optimizer": (
        ("optimize", *SMALL, "--mem-budget", "1GB", *PROFILE, "--optimizer", "adamx"),
        r"no optimizer is called 'adamx'",
    ),
    "grads": (("optimize", *SMALL, "--mem-budget", "1GB", "--grads", "maybe"), r"grads='maybe' is not known"),
    "solver": (("optimize", *SMALL, "--mem-budget", "70%", *PROFILE, "--solver", "abacus"), r"no solver is called 'abacus'"),
    "pin": (("optimize", *SMALL, "--mem-budget", "1GB", *PROFILE, "--keep", "blocks.7"), r"no op comes from a module called"),
    "fake run": (("optimize", *SMALL, "--mem-budget", "1GB", "--fake", "--run"), r"--fake tensors cannot be run"),
    "gap": (("optimize", *SMALL, "--mem-budget", "1GB", "--gap", "nan"), r"cannot use gap=nan"),
    "time": (("optimize", *SMALL, "--mem-budget", "1GB", "--time-limit", "0"), r"cannot use a time limit of 0.0 s"),
    "static": (("optimize", *SMALL, "--mem-budget", "1GB", "--static-bytes", "lots"), r"cannot read --static-bytes 'lots'"),
    "no loss": (("optimize", "mine.py:no_loss", "--mem-budget", "1GB", "--run"), r"it has no loss(.|\n)*loss_fn"),
    "out": (("optimize", *SMALL, "--mem-budget", "1GB", "--out", "no/where/plan.json"), r"no/where is no directory"),
    "out is a folder": (("trace", *SMALL, "--out", "."), r"it is no regular file"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_wrong_usage_is_one_message(case: str, folder: Path) -> None:
    arguments, pattern = MISUSE[case]
    message = refused(*arguments)
    assert re.search(pattern, message), message
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("__")) == ["mine.py"]


def test_a_failing_disk_leaves_no_half_written_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "no space left on device" in refused("optimize", "mine.py:step", "--mem-budget", "1GB", *PROFILE, "--out", "plan.json")
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("__")) == ["mine.py"]


def test_errors_are_json_too(folder: Path) -> None:
    result = called("optimize", "mine.py:raises", "--mem-budget", "1GB", "--json")
    assert result.exit_code == 2
    error = only_object(result.stdout)["error"]
    assert (error["type"], error["where"], error["why"]) == ("UsageError", "mine.py:16", "RuntimeError: out of ideas")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("optimize", "gpt-mini"), "Missing option '--mem-budget'"),
        (("optimize", "gpt-mini", "--mem-budget", "60%", "--time-limit", "abc"), "Invalid value for '--time-limit'"),
        (("trace", "gpt-mini", "--nope"), "No such option"),
        (("trace",), "Missing argument"),
        (("optimise",), "No such command 'optimise'"),
        (("--nope",), "No such option"),
    ],
)
def test_wrong_flags_are_json_too(arguments: tuple[str, ...], what: str) -> None:
    result = called(*arguments, "--json")
    assert result.exit_code == 2
    error = only_object(result.stdout)["error"]
    assert error["type"] == "UsageError" and error["what"].startswith(what) and error["try"].endswith(" --help")
    assert what in result.stderr
    text = called(*arguments)
    assert text.exit_code == 2 and text.stdout == "" and what.split()[0] in text.stderr


@pytest.mark.parametrize("flags", [("--solver", "zzz"), ("--optimizer", "zzz")])
def test_names_that_are_none_are_refused_before_anything_is_built(flags: tuple[str, str]) -> None:
    for name in ("optimize", "compare"):
        result = called(name, *SMALL, "--mem-budget", "60%", *flags)
        assert result.exit_code == 2 and f"no {flags[0].strip('-')} is called 'zzz'" in result.stderr
        assert "building" not in result.stderr


def test_another_solver_is_taken() -> None:
    if "PULP_CBC_CMD" not in available_solvers():
        pytest.skip("CBC is not installed")
    found = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE, "--host-budget", "0", "--solver", "cbc", "--gap", "0.5")
    assert found["decisions"]["recompute"]["count"] > 0


def test_plan_files_that_cannot_be_used(folder: Path) -> None:
    done("optimize", "mine.py:step", "--mem-budget", "100%", *PROFILE, "--out", "plan.json")
    whole = Path("plan.json").read_text()
    run = ("run", "mine.py:step", *PROFILE, "--plan")
    assert done(*run, "plan.json", "--steps", "1")["steps"] == 1
    Path("cut.json").write_text(whole[: len(whole) // 2])
    assert "it is not JSON, or cut short" in refused(*run, "cut.json")
    Path("old.json").write_text(whole.replace("actsolve-plan-1", "actsolve-plan-0"))
    assert "its format is 'actsolve-plan-0', not 'actsolve-plan-1'" in refused(*run, "old.json")
    assert "no such file or directory" in refused(*run, "none.json")
    Path("magic.json").write_text(whole.replace('"planner": "milp"', '"planner": "magic"'))
    assert "its planner, 'magic', is none of milp" in refused(*run, "magic.json")
    Path("flipped.json").write_text(whole.replace(': "keep"', ': "offload"'))
    assert "is 'offload', and the steps say otherwise" in refused(*run, "flipped.json")
    other = refused("run", "mine.py:step", "--set", "batch=9", *PROFILE, "--plan", "plan.json")
    assert "the plan was made for another training step" in other and "mine.py:step" in other
    too_small = refused(*run, "plan.json", "--mem-budget", "1KB", code=3)
    assert "the loaded plan does not fit 1000 B" in too_small


def test_an_impossible_budget_names_one_that_works() -> None:
    result = called("optimize", *SMALL, "--mem-budget", "100KB", "--time-limit", "6", "--json")
    assert result.exit_code == 3
    found = only_object(result.stdout)
    assert set(found) >= FIELDS and found["status"] == "infeasible" and found["predicted"] is None
    message = result.stderr
    assert re.search(r"InfeasibleBudget: no plan fits 97.66 KiB \(100000 bytes\)\n  where  \S+", message), message
    assert re.search(r"\n  why    the smallest peak found is [\d.]+ [KM]iB: static [\d.]+ [KM]iB \(.+\) \+ ", message), message
    by_kind = found["peak"]["bytes"]
    assert sum(by_kind.pop("static").values()) + sum(by_kind.values()) == found["peak"]["peak_bytes"]
    smallest = re.search(r"--mem-budget (\d+) ", message)
    assert smallest is not None and int(smallest.group(1)) == found["smallest_budget_bytes"]
    quick = ("--time-limit", "3")  # what a message has named is found again, however little time there is
    again = done("optimize", *SMALL, "--mem-budget", smallest.group(1), *quick)
    assert again["predicted"]["peak_bytes"] <= int(smallest.group(1))
    least = done("optimize", *SMALL, "--mem-budget", "min", *quick)
    assert least["budget_bytes"] <= int(smallest.group(1))


@pytest.mark.slow
def test_the_smallest_budget_of_a_gpu_has_room_for_its_reserve() -> None:
    result = called("optimize", *SMALL, "--mem-budget", "1MB", *PROFILE, "--json")
    smallest = only_object(result.stdout)["smallest_budget_bytes"]
    found = done("optimize", *SMALL, "--mem-budget", str(smallest), *PROFILE)
    assert found["predicted"]["peak_bytes"] <= smallest
    assert found["static"]["reserve"] == int(0.05 * smallest)


def test_a_baseline_that_does_not_fit() -> None:
    message = refused("optimize", *SMALL, "--mem-budget", "90%", *PROFILE, "--planner", "keep_all", code=3)
    assert "the plan of keep_all does not fit" in message and "--planner milp" in message


def test_an_internal_error_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import actsolve.planning

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(actsolve.planning, "capture_as_laid_out", broken)
    result = called("optimize", *SMALL, "--mem-budget", "1GB", *PROFILE)
    assert result.exit_code == 1 and result.stdout == ""
    assert "ZeroDivisionError: a fault of ours" in result.stderr and "please report it" in result.stderr
    result = called("optimize", *SMALL, "--mem-budget", "1GB", *PROFILE, "--json")
    assert only_object(result.stdout)["error"]["what"] == "internal error: ZeroDivisionError: a fault of ours"


# -- as a process of its own -------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "actsolve", *arguments]


def test_help_is_quick_and_says_that_code_is_executed() -> None:
    start = time.perf_counter()
    shown = subprocess.run(command("optimize", "--help"), capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert "Executes that code" in shown.stdout
    assert all(name in shown.stdout for name in PLANNERS)
    assert "torch" not in shown.stderr
    assert time.perf_counter() - start < 20  # it takes 0.4 s where torch is not imported, on an idle machine
    wrong = subprocess.run(command("optimise"), capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert wrong.returncode == 2 and "No such command" in wrong.stderr


LOUD = """
import ctypes, os, subprocess, sys
import torch
from actsolve import TrainingStep

def step():
    print("from Python")
    os.write(1, b"from a descriptor\\n")
    ctypes.CDLL(None).puts(b"from C")
    subprocess.run([sys.executable, "-c", "print('from a child')"])
    return TrainingStep(torch.nn.Linear(8, 8), (torch.ones(4, 8),), loss_fn=lambda y: y.sum())
"""


@pytest.mark.slow
def test_nothing_but_the_object_is_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    arguments = command("optimize", "loud.py:step", "--mem-budget", "100%", *PROFILE, "--json")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    assert only_object(shown.stdout)["status"] == "optimal"
    for words in ("from Python", "from a descriptor", "from C", "from a child"):
        assert words in shown.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stdout_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        shown = subprocess.run(
            command("trace", "mlp-mini", "--json"), stdout=full, stderr=PIPE, text=True, cwd=ROOT, timeout=120, check=False
        )
    assert shown.returncode == 2
    message = [line for line in shown.stderr.splitlines() if not line.startswith("actsolve: ")]
    assert message == ["UsageError: cannot write the result", "  where  stdout", "  why    no space left on device"]


def test_a_closed_stdout_is_one_message() -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command("trace", "mlp-mini", "--json")]
    shown = subprocess.run(shell, stderr=PIPE, text=True, cwd=ROOT, timeout=120, check=False)
    assert shown.returncode == 2 and "Traceback" not in shown.stderr, shown.stderr
    assert "UsageError: cannot write the result\n  where  stdout\n  why    bad file descriptor" in shown.stderr


def test_ctrl_c_during_a_solve_returns_the_incumbent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed: list[float] = []

    def press(_: Session, elapsed_s: float, incumbent_s: float | None, __: float | None) -> None:
        if incumbent_s is not None and not pressed:
            pressed.append(elapsed_s)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Session, "solving", press)
    found = done(*SLOW_TO_PROVE, "--out", "plan.json")
    assert pressed
    assert found["predicted"]["peak_bytes"] <= found["budget_bytes"]
    assert found["solve_s"] < pressed[0] + 60
    assert load_plan(folder / "plan.json").steps


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_the_solver() -> None:
    """The signal comes from outside, while HiGHS runs in its thread."""
    process = subprocess.Popen(command(*SLOW_TO_PROVE, "--json"), stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    assert any("planning by milp" in line for line in process.stderr)
    time.sleep(1.5)
    assert process.poll() is None, "it was solved before it could be interrupted"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    found = only_object(stdout)
    assert found["predicted"]["peak_bytes"] <= found["budget_bytes"]


@pytest.mark.slow
def test_ctrl_c_elsewhere_ends_it() -> None:
    process = subprocess.Popen(command("trace", "llama-70b"), stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    assert any("building" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130 and stdout == "" and "Traceback" not in stderr, stderr
