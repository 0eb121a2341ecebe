"""The command line as a process of its own: descriptors, signals, pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from cli_calls import PROFILE, ROOT, SLOW_TO_PROVE, alone, done, folder, only_object

from actsolve.cli.session import Session
from actsolve.plan_file import load_plan
from actsolve.planners import PLANNERS

__all__ = ["alone", "folder"]  # fixtures


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
