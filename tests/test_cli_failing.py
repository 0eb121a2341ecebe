"""The command line where it fails: its exit codes, and that no failure is more than one message."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from cli_calls import FIELDS, PROFILE, SMALL, alone, called, done, folder, only_object, refused

from actsolve.planners.lp import available_solvers

__all__ = ["alone", "folder"]  # fixtures


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


@pytest.mark.slow
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
