"""The tree is the architecture (STYLE.md): a file imports only from lines above it.

Torch and the solvers stay where they belong. The tree here is that of STYLE.md, a line per file where order within a
package matters.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "actsolve"

# From the top: a file imports only from lines above its own, or from its own line where that is a package.
TREE = (
    "errors",
    "cache_dir",
    "units",
    "links",
    "copy_queues",
    "json_file",
    "graph",
    "problem",
    "dag",
    "check_dag",
    "cost/hardware",
    "cost/roofline",
    "cost/known_links",
    "plan",
    "schedule",
    "replays",
    "split",
    "experiments",
    "plan_schedule",
    "check",
    "simulate",
    "static_memory",
    "cost/optimizer_kinds",
    "graph_file",
    "dag_file",
    "plan_file",
    "planners/*",
    "kept_plan",
    "known_least",
    "known_plans",
    "pins",
    "peak",
    "remedy",
    "planned",
    "not_fitting",
    "frontier",
    "graph_plan",
    "dag_planning",
    "graph_planning",
    "report/*",
    "eager_parts",
    "training_step",
    "runtime/memory_events",
    "capture/*",
    "runtime/*",
    "cost/*",
    "emitter",
    "lower",
    "compiled",
    "signature",
    "ways",
    "module",
    "settings",
    "step_problem",
    "remedies",
    "infeasible",
    "planning",
    "frontier_planning",
    "api",
    "inductor/*",
    "target",
    "smaller_batch",
    "cli/*",
    "__main__",
)

# At the top of the file.
PIPELINE = {
    "emitter",
    "lower",
    "compiled",
    "signature",
    "ways",
    "module",
    "settings",
    "remedies",
    "infeasible",
    "planning",
    "api",
}
PIPELINE |= {"target", "smaller_batch", "step_problem", "inductor/*"}
TORCH = {"eager_parts", "training_step", "capture/*", "runtime/memory_events", "runtime/*", "cost/*"} | PIPELINE
TORCH_LATER = {"cli/*", "__main__"}  # only inside functions, so that `actsolve --help` is quick
SOLVERS = {"planners/*"}


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p.name != "__init__.py" or p.parent.name == "planners")


def line_of(path: Path) -> str:
    """The line of the tree that a file belongs to: its own, or its package's."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    return name if name in TREE else name.rsplit("/", 1)[0] + "/*"


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether that is done as soon as the file is imported."""
    tree = ast.parse(path.read_text())
    later = {inner for node in ast.walk(tree) if isinstance(node, FUNCTIONS) or is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in later
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield (module if file_of(module) is not None else str(node.module)), node not in later


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def file_of(module: str) -> Path | None:
    """The file of a module of ours; None for a package without code, and for what is not ours."""
    parts = module.split(".")
    if parts[0] != "actsolve" or len(parts) == 1:
        return None
    path = ROOT.joinpath(*parts[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((p for p in candidates if p.exists() and p in files()), None)


def forbidden(path: Path) -> list[str]:
    """What a file imports and must not."""
    line = line_of(path)
    if line not in TREE:
        return ["the file is on no line of the tree: add one to TREE here and in STYLE.md"]
    found = []
    for module, at_once in imports(path):
        top = module.split(".")[0]
        target = file_of(module)
        if target is not None and target != path:
            above = TREE.index(line_of(target)) < TREE.index(line)
            if not above and not (line_of(target) == line and line.endswith("/*")):
                found.append(f"{module}, which is not above it")
        elif not may_import(line, top, at_once):
            found.append(f"{module}, which has no place there")
    return found


def may_import(line: str, package: str, at_once: bool) -> bool:
    """Whether the files of a line may import a package that is not ours."""
    if package in ("torch", "torchvision"):
        return line in TORCH or (line in TORCH_LATER and not at_once)
    return package not in ("pulp", "highspy") or line in SOLVERS


@pytest.mark.parametrize("path", files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_file_imports_only_from_above(path: Path) -> None:
    assert forbidden(path) == []


def test_the_tree_names_no_file_twice() -> None:
    assert len(set(TREE)) == len(TREE)


def test_packages_without_code_stay_empty() -> None:
    """What `import actsolve.capture` runs is what the rule sees."""
    for path in ROOT.rglob("__init__.py"):
        if path.parent != ROOT and path not in files():
            code = [n for n in ast.parse(path.read_text()).body if not isinstance(n, ast.Expr)]
            assert code == [], path


def test_the_rule_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself: each kind of wrong import, tried on a small tree."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "planners").mkdir()
    (tmp_path / "simulate.py").write_text("")
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "main.py").write_text("def main():\n    import torch\n")
    (tmp_path / "planners" / "greedy.py").write_text("import pulp\nfrom actsolve.simulate import simulate\n")
    assert [forbidden(p) for p in files()] == [[], [], []]

    (tmp_path / "cli" / "main.py").write_text("import torch\n")
    assert forbidden(tmp_path / "cli" / "main.py") == ["torch, which has no place there"]
    for code in ("from torch import nn", "def f():\n    import torch.nn", "import pulp", "from highspy import Highs"):
        (tmp_path / "simulate.py").write_text(code)
        assert len(forbidden(tmp_path / "simulate.py")) == 1, code
    for code in (
        "from actsolve.planners.greedy import greedy",
        "from actsolve.planners import greedy",
        "import actsolve.planners.greedy",
        "def f():\n    from actsolve.cli.main import main",
    ):
        (tmp_path / "simulate.py").write_text(code)
        assert len(forbidden(tmp_path / "simulate.py")) == 1, code
    (tmp_path / "utils.py").write_text("")
    assert "on no line of the tree" in forbidden(tmp_path / "utils.py")[0]


def test_everything_between_capture_and_lowering_runs_without_torch() -> None:
    """Imported in a process of its own, these load no torch, not even through others."""
    names = "graph problem plan schedule check simulate graph_file plan_file planners cost.roofline"
    names += " report.graph_text report.plan_text"
    code = f"""
import sys
sys.modules["torch"] = None
for name in {names.split()!r}:
    __import__("actsolve." + name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
