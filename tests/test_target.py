"""From what the user names to a training step, and every way in which that fails: one message, exit code 2."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from actsolve.capture.captured import capture
from actsolve.capture.torch_internals import FakeTensor
from actsolve.errors import UsageError
from actsolve.target import load_target

GOOD = """
import torch
from actsolve import TrainingStep
import beside

class Choice:
    @staticmethod
    def make():
        return step()

def step(*, batch: int = 4, width=8, dropout: float = 0.5, bias=True, name="x", seed: "int | None" = None, free=None, shape=()):
    step.got = dict(batch=batch, width=width, dropout=dropout, bias=bias, name=name, seed=seed, free=free)
    return TrainingStep(torch.nn.Linear(width, width, bias=bias), args=(torch.ones(batch, width),), loss_fn=beside.loss)

def needs(depth: int):
    return step()

def anything(**settings):
    step.got = settings
    return step()

def reads():
    if torch.ones(3).sum().item() > 2:
        return step()

not_callable = 3
"""

BAD = """
import torch
from actsolve import TrainingStep

def raises():
    layers = 3
    raise ValueError(f"{layers} layers are too few\\nand more lines")

def deep():
    return [torch.zeros(2) @ torch.zeros(3)]

def exits():
    raise SystemExit("bye")

def quits():
    raise KeyboardInterrupt

def a_tuple():
    return torch.nn.Linear(2, 2), torch.ones(2, 2)

def a_wrong_model():
    return TrainingStep(torch.nn.Linear)

def a_wrong_args():
    return TrainingStep(torch.nn.Linear(2, 2), args=torch.ones(2, 2))

def a_wrong_loss():
    return TrainingStep(torch.nn.Linear(2, 2), args=(torch.ones(2, 2),), loss_fn="mse")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "beside.py").write_text("def loss(y):\n    return y.mean()\n")
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "imports.py").write_text("import torch\n\nimport no_such_package\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("from good import step\n")
    for name in ("beside", "good", "pack", "pack.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def settings_of(target: str, *overrides: str) -> dict[str, object]:
    step = load_target(target, overrides)
    got: dict[str, object] = getattr(sys.modules["actsolve_target_good"], "step").got  # noqa: B009
    assert isinstance(step.model, torch.nn.Module)
    return got


def test_a_factory_in_a_file_a_module_and_a_class(folder: Path) -> None:
    for target in ("good.py:step", "./good.py:step", str(folder / "good.py:step"), "good:step", "pack.inner:step"):
        step = load_target(target, ("batch=3",))
        assert step.args[0].shape == (3, 8)
        assert step.loss_fn is not None and step.loss_fn(torch.ones(2)) == 1
    assert load_target("good.py:Choice.make").args[0].shape == (4, 8)


def test_overrides_take_the_type_of_the_default(folder: Path) -> None:
    assert settings_of("good.py:step") == dict(batch=4, width=8, dropout=0.5, bias=True, name="x", seed=None, free=None)
    given = ("batch=2", "width=16", "dropout=1", "bias=no", "name=12", "seed=7", "free=0.5")
    assert settings_of("good.py:step", *given) == dict(batch=2, width=16, dropout=1.0, bias=False, name="12", seed=7, free=0.5)
    assert type(settings_of("good.py:step", "dropout=1")["dropout"]) is float
    assert settings_of("good.py:step", "seed=none", "free=None", "name=a=b", "bias=True")["name"] == "a=b"


def test_without_a_default_an_override_is_what_it_looks_like(folder: Path) -> None:
    given = ("a=1", "b=1.5", "c=true", "d=text", "e=none")
    load_target("good.py:anything", given)
    # `step` was called without settings after `anything` was.
    assert settings_of("good.py:anything", *given)["batch"] == 4
    assert load_target("good.py:needs", ["depth=3"]).args[0].shape == (4, 8)


def test_a_zoo_name() -> None:
    step = load_target("mlp-mini" if "mlp-mini" in zoo_names() else "mlp", ["batch=2"])
    assert step.args[0].shape[0] == 2
    assert load_target("gpt", ["layers=1", "batch=1", "seq=8", "dtype=bf16"]).model.head.weight.dtype == torch.bfloat16


def zoo_names() -> list[str]:
    import models_zoo

    return models_zoo.names()


def test_two_loads_are_equal_and_fake_tensors_take_no_memory(folder: Path) -> None:
    first, second = (load_target("good.py:step").model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    big = load_target("llama-70b", fake=True)
    assert sum(p.numel() for p in big.model.parameters()) > 7e10
    assert all(isinstance(p, FakeTensor) for p in big.model.parameters())


CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "near": ("gpt-mimi", (), r"there is no target 'gpt-mimi'(.|\n)*try    gpt-mini or"),
    "far": ("#", (), r"there is no target '#'(.|\n)*one of gpt, llama(.|\n)*file.py:factory"),
    "half": ("good.py:", (), r"a side of the colon is empty"),
    "file": ("none.py:step", (), r"where  none.py\n  why    there is no such file"),
    "folder": ("pack/:step", (), r"it is a directory"),
    "module": ("no_such.module:step", (), r"there is no module 'no_such.module'"),
    "relative": (".:step", (), r"there is no module '.'"),
    "factory": ("good.py:stap", (), r"there is no stap in it\n  try    one of its functions: step"),
    "callable": ("good.py:not_callable", (), r"it is a int, not a function"),
    "syntax": ("syntax.py:f", (), r"cannot be imported\n  where  .*syntax.py:2\n  why    SyntaxError"),
    "imports": ("imports.py:f", (), r"where  imports.py:3\n  why    ModuleNotFoundError: No module named 'no_such_package'"),
    "leaves": ("leaves.py:f", (), r"where  leaves.py:2\n  why    SystemExit: 3"),
    "raises": ("bad.py:raises", (), r"cannot be built\n  where  bad.py:7\n  why    ValueError: 3 layers are too few$"),
    "deep": ("bad.py:deep", (), r"where  bad.py:10\n  why    RuntimeError: "),
    "exits": ("bad.py:exits", (), r"where  bad.py:13\n  why    SystemExit: bye"),
    "tuple": ("bad.py:a_tuple", (), r"returns a tuple\n(.|\n)*return actsolve.TrainingStep\("),
    "model": ("bad.py:a_wrong_model", (), r"has a wrong model\n  why    it is a type, not a torch.nn.Module"),
    "args": ("bad.py:a_wrong_args", (), r"has a wrong args\n  why    it is a Tensor, not a tuple of inputs"),
    "loss": ("bad.py:a_wrong_loss", (), r"has a wrong loss_fn\n  why    it is a str"),
    "zoo": ("gpt-mini", ("width=100",), r"where  .*models_zoo/\w+.py:\d+\n  why    ValueError: width 100 is not a multiple"),
    "unknown": ("good.py:step", ("bach=2",), r"no setting 'bach'\n  why    it takes batch, width(.|\n)*try    --set batch=2"),
    "type": ("good.py:step", ("batch=many",), r"cannot set batch to 'many'\n  why    it is of type int, 4 by default"),
    "half an int": ("good.py:step", ("batch=1.5",), r"it is of type int"),
    "bool": ("good.py:step", ("bias=2",), r"it is of type bool, True by default"),
    "shape": ("good.py:step", ("shape=3",), r"it is a tuple; only numbers, true or false, and text"),
    "no value": ("good.py:step", ("batch",), r"it is not name=value"),
    "twice": ("good.py:step", ("batch=1", "batch=2"), r"batch is given twice"),
    "needed": ("good.py:needs", (), r"needs a value for depth\n  try    --set depth=..."),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_one_message(case: str, folder: Path) -> None:
    target, overrides, pattern = CASES[case]
    with pytest.raises(UsageError) as raised:
        load_target(target, overrides)
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert re.search(pattern, message), message
    assert len(message.splitlines()) <= 4 and "Traceback" not in message


CONVERTED = """
import torch
from torch import nn
from actsolve import TrainingStep

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rnn, self.norm = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.norm(self.rnn(self.tokens(x))[0].transpose(1, 2)).transpose(1, 2))

def step():
    model = Tied().to("cpu").to(torch.float64).train()
    return TrainingStep(model, (torch.zeros(2, 3, dtype=torch.int64),), loss_fn=lambda y: y.sum())
"""


def test_fake_modules_can_be_converted(folder: Path) -> None:
    """``module.to`` of fake tensors raises in torch itself."""
    (folder / "converted.py").write_text(CONVERTED)
    fake, real = (load_target("converted.py:step", fake=fake).model for fake in (True, False))
    assert fake.head.weight is fake.tokens.weight
    shapes = [{name: (t.shape, t.dtype) for name, t in m.state_dict().items()} for m in (fake, real)]
    assert shapes[0] == shapes[1] and shapes[0]["norm.running_mean"][1] == torch.float64
    graphs = [capture(load_target("converted.py:step", fake=fake)).graph for fake in (True, False)]
    assert graphs[0].fingerprint == graphs[1].fingerprint


def test_under_fake_tensors_the_message_says_so(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"good.py:\d+\n(.|\n)*try    --real, if"):
        load_target("good.py:reads", fake=True)


def test_ctrl_c_goes_through(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_target("bad.py:quits")
