"""The command line called from tests: what it must print, or how it must fail, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from actsolve.cli.main import app

ROOT = Path(__file__).parents[1]
SMALL = ("gpt-mini", "--set", "layers=2", "--set", "batch=8", "--set", "seq=64", "--set", "width=32", "--set", "vocab=64")
PROFILE = ("--hardware", "a100")

# Proving this one to the last bit takes HiGHS about 10 s.
SLOW_TO_PROVE = ("optimize", "unet", "--mem-budget", "50%", *PROFILE, "--gap", "0")

FIELDS = {
    *("target", "budget_bytes", "static_bytes", "status", "objective_s", "bound_s", "gap", "step_gap", "global_bound_s"),
    "global_bound_over",
    *("planner", "solve_s", "capture_s", "predicted", "decisions", "keep_all", "baselines"),
}

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
