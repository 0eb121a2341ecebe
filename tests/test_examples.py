"""The example scripts, run at tiny settings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).parents[1] / "examples"
CHARACTERS = [
    "--steps",
    "3",
    "--batch",
    "4",
    "--length",
    "32",
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--time-limit",
    "2",
]
DIGITS = ["--steps", "3", "--batch", "16", "--depth", "18", "--width", "8", "--time-limit", "2"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return what imports an example as Python does that runs it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("ACTSOLVE_CACHE_DIR", str(tmp_path))

    def load(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_character_model_learns_the_same_within_a_budget(script, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("character_model").main([*CHARACTERS, "--mem-budget", "70%"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "losses bitwise equal at 3 of 3 steps; trained weights and buffers bitwise equal; peak within the budget" in output


def test_digits_resnet_learns_the_same_within_a_budget(script, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert script("digits_resnet").main([*DIGITS, "--mem-budget", "85%"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "losses bitwise equal at 3 of 3 steps; trained weights and buffers bitwise equal; peak within the budget" in output
    within, as_it_is = (output.split(name)[1].split("unseen")[0] for name in ("within 85%:", "as it is:"))
    assert within == as_it_is


def test_an_impossible_budget_ends_with_3_and_says_what_would_fit(script, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("character_model").main([*CHARACTERS, "--mem-budget", "500kB"]) == 3
    printed = capsys.readouterr()
    assert not printed.out
    assert "no plan fits 488.28 KiB" in printed.err and "--mem-budget" in printed.err


EQUAL = "losses bitwise equal at 3 of 3 steps; trained weights and buffers bitwise equal; peak within the budget"


def test_a_trainer_of_hugging_face_learns_the_same_within_a_budget(script, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    small = [*CHARACTERS, "--layers", "1"]
    assert script("huggingface_trainer").main([*small, "--mem-budget", "70%"]) == 0
    assert EQUAL in " ".join(capsys.readouterr().out.split())


def test_a_lightning_module_learns_the_same_within_a_budget(script, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    assert script("lightning_module").main([*CHARACTERS, "--mem-budget", "70%"]) == 0
    assert EQUAL in " ".join(capsys.readouterr().out.split())
