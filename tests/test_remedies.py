"""What exit 3 says would help is followed here: planned for by itself, it needs what was said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from actsolve.cli.main import app

PROFILE = ("--hardware", "h200", "--reserve", "0", "--time-limit", "1")  # no link is known of it
GPT = ("gpt-mini", "--set", "layers=1", "--set", "width=32", "--set", "seq=64", "--set", "batch=4")
WIDE = ("gpt-mini", "--set", "layers=1", "--set", "width=256", "--set", "vocab=64", "--set", "seq=64", "--set", "batch=4")
LINKS = ("--h2d", "25GB/s", "--d2h", "25GB/s")

FACTORY = """
import torch
import torch.nn.functional as F
from torch import nn
from actsolve import TrainingStep

class Model(nn.Module):
    def __init__(self, vocab, chunks):
        super().__init__()
        self.tokens, self.out, self.chunks = nn.Embedding(vocab, 32), nn.Linear(32, vocab, bias=False), chunks

    def forward(self, tokens, targets):
        hidden = self.tokens(tokens).flatten(0, 1)
        pairs = zip(hidden.chunk(self.chunks), targets.flatten().chunk(self.chunks))
        return sum(F.cross_entropy(self.out(h), t, reduction="sum") for h, t in pairs) / targets.numel()

def step(batch=8, vocab=2048, chunks=1):
    tokens = torch.zeros(batch, 64, dtype=torch.int64)
    return TrainingStep(Model(vocab, chunks), args=(tokens, tokens), loss_fn=lambda loss: loss)

@torch.library.custom_op("remedies_test::wave", mutates_args=())
def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin()

wave.register_fake(lambda x: torch.empty_like(x))
wave.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)

class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = x * self.scale
        for _ in range(8):
            x = wave(x)
        return x.sum()

def waves():
    # custom ops are not replayed: their outputs are kept, or offloaded
    return TrainingStep(Waves(), args=(torch.zeros(2**18),), loss_fn=lambda loss: loss)

def even(batch=8):
    assert batch % 4 == 0, "batches come in fours"
    return step(batch)
"""


def called(*command: str) -> Result:
    return CliRunner().invoke(app, ["optimize", *command, *PROFILE])


def refused(*command: str) -> dict[str, Any]:
    result = called(*command, "--json")
    assert result.exit_code == 3, result.stderr
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    return found


def remedies(*command: str) -> dict[str, dict[str, Any]]:
    """The remedies that exit 3 names, by their first word that tells them apart."""
    return {r["what"].split(" (")[0]: r for r in refused(*command)["remedies"]}


def smallest_with(*command: str) -> int:
    result = called(*command, "--mem-budget", "1KB", "--json")
    found: int = json.loads(result.stdout)["smallest_budget_bytes"]
    return found


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FACTORY)
    return "mine.py"


def test_another_optimizer() -> None:
    """Also where gradients accumulate; they are added as they are made, so that to drop them before the step saves little."""
    for grads in ("none", "accumulate"):
        found = remedies(*WIDE, "--mem-budget", "6MB", "--grads", grads)
        needs_bytes = found["--optimizer sgd"]["needs_bytes"]
        flags = ["--grads", grads, "--optimizer", "sgd"]
        assert called(*WIDE, "--mem-budget", str(needs_bytes), *flags).exit_code == 0
        assert 0.9 * needs_bytes <= smallest_with(*WIDE, *flags) <= needs_bytes
        assert "--grads none" not in found


def test_what_is_pinned_and_what_is_left_free_are_named() -> None:
    free = smallest_with(*GPT)
    found = remedies(*GPT, "--mem-budget", str(free), "--keep", "blocks.0")
    assert found["no --keep"]["fits"] and found["no --keep"]["needs_bytes"] <= free
    reserved = CliRunner().invoke(app, ["optimize", *GPT, *PROFILE, "--mem-budget", str(free), "--reserve", "64KiB", "--json"])
    assert reserved.exit_code == 3
    [what] = [r for r in json.loads(reserved.stdout)["remedies"] if r["what"] == "a smaller --reserve"]
    assert what["fits"] and what["at_best"] and what["needs_bytes"] <= free


def test_a_hint_is_in_bytes_for_a_share_would_be_of_something_else() -> None:
    result = called(*WIDE, "--mem-budget", "20%")
    budget = re.search(r"or --optimizer sgd: .*needs --mem-budget (\d+) ", result.stderr)
    assert result.exit_code == 3 and budget is not None
    assert called(*WIDE, "--mem-budget", budget.group(1), "--optimizer", "sgd").exit_code == 0


def test_what_would_not_help_is_not_named() -> None:
    """An optimizer without state, gradients that are not there, a loss of few classes, a batch where weights are too much."""
    found = remedies(*WIDE, "--mem-budget", "2MB", "--optimizer", "none")
    assert list(found) == ["a smaller model"]
    assert called(*WIDE[:-1], "batch=1", "--mem-budget", "2MB", "--optimizer", "none").exit_code == 3


def test_host_memory(factory: str) -> None:
    """Without links, with a small host budget, and with one of 0; where there is no cap, nothing is left to say of it."""
    target = f"{factory}:waves"
    for flags in ((), ("--host-budget", "1100KB", *LINKS), ("--host-budget", "0", *LINKS)):
        [what] = [r for r in refused(target, "--mem-budget", "5MB", *flags)["remedies"] if r["what"].startswith("--h")]
        assert what["fits"] and what["what"].startswith("--host-budget" if flags else "--h2d and --d2h")
        followed = ("--host-budget", what["what"].split()[1]) if flags else ()
        assert called(target, "--mem-budget", str(what["needs_bytes"]), *LINKS, *followed).exit_code == 0
    assert not [w for w in remedies(target, "--mem-budget", "1500KB", *LINKS) if w.startswith("--h")]


def test_links_never_make_the_smallest_budget_larger() -> None:
    assert smallest_with(*GPT, *LINKS, "--host-budget", "256KiB") <= smallest_with(*GPT)


def test_the_loss_in_chunks(factory: str) -> None:
    """Its figure is the best that chunks can do: a program with 16 of them is near it, and not below."""
    target = f"{factory}:step"
    found = refused(target, "--mem-budget", "3MB")
    assert found["peak"]["bytes"]["logits"] > 0.5 * found["peak"]["peak_bytes"]
    assert found["peak"]["largest"][0]["kind"] == "logits" and found["peak"]["largest"][0]["shape"] == [512, 2048]
    chunks = next(r for r in found["remedies"] if r["what"].startswith("the loss in chunks"))
    with_chunks = smallest_with(target, "--set", "chunks=16")
    assert chunks["needs_bytes"] <= with_chunks <= 0.6 * found["smallest_budget_bytes"]


def test_the_largest_batch(factory: str) -> None:
    """It fits, and the next does not; of the zoo, and of a file."""
    for target, budget in ((GPT, "900KB"), ((f"{factory}:step", "--set", "batch=8"), "8MB")):
        found = remedies(*target, "--mem-budget", budget)
        [what] = [w for w in found if w.startswith("--set batch=")]
        batch = int(what.partition("=")[2])
        assert found[what]["fits"] and f"{batch + 1} does not" in found[what]["note"]
        assert called(*target[:-1], f"batch={batch}", "--mem-budget", str(found[what]["needs_bytes"])).exit_code == 0
        assert called(*target[:-1], f"batch={batch + 1}", "--mem-budget", budget).exit_code == 3


def test_a_factory_that_refuses_a_batch(factory: str) -> None:
    found = remedies(f"{factory}:even", "--mem-budget", "8MB")
    assert "a batch of 1 cannot be planned: mine.py:even cannot be built" in found["a smaller batch"]["note"]


def test_a_factory_without_a_batch(factory: str) -> None:
    Path(factory).write_text(FACTORY + "\ndef fixed():\n    return step(8)\n")
    found = remedies(f"{factory}:fixed", "--mem-budget", "8MB")
    assert found["a smaller batch"]["needs_bytes"] is None and not found["a smaller batch"]["note"]
