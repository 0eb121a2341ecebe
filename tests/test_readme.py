"""The README's code runs, and its commands are commands."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from actsolve.cli.main import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def test_the_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path))
    first, *_ = blocks("python")
    exec(compile(first, "README.md", "exec"), {"__name__": "readme"})
    assert "values are recomputed" in capsys.readouterr().out.splitlines()[0]
    assert (tmp_path / "plan.json").exists()


def test_the_factory_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_model.py").write_text(blocks("python")[1])
    command = next(line for line in shell_lines() if "my_model.py" in line and "--out" in line)
    arguments = [a for a in shlex.split(command)[1:] if a != "--run"]
    result = CliRunner().invoke(app, [*arguments, "--hardware", "a100"])
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "plan.json").exists()


def test_the_graph_of_nodes_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(blocks("json")[0])
    command = next(line for line in shell_lines() if line.startswith("actsolve plan "))
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["peak_bytes"], found["peak_bytes_in_order"], found["base_time"], found["objective"]) == (13, 16, 15, 18)


def shell_lines() -> list[str]:
    return [line for text in blocks("sh") for line in text.splitlines()]


@pytest.mark.parametrize("line", [line for line in shell_lines() if line.startswith("actsolve ")])
def test_a_command_line_is_understood(line: str) -> None:
    program, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    with command.make_context(f"{program} {name}", arguments):
        pass


def test_the_commands_that_are_checked_are_marked() -> None:
    for name in ("main", "tests"):
        assert re.search(rf"^<!-- ci: {name} -->\n```sh\n.+\n```$", README, flags=re.MULTILINE), name


def test_there_are_two_and_they_are_installed_for() -> None:
    lines = shell_lines()
    assert lines[0] == "pip install torch==2.13.0 && pip install '.[test]'"
    assert lines[1] == "actsolve optimize gpt-mini --mem-budget 60% --run"
    assert lines[2] == "pytest"
