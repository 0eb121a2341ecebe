"""What the benchmarks share: their flags, one process per model, peaks, tables and JSON.

Each model runs in a process of its own, one after another, so that none inherits another's caches, threads or heap. Progress
goes to stderr, the table or the JSON to stdout.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses import FakeTensorMode

import models_zoo
from actsolve.cost.optimizers import new_optimizer
from actsolve.planning import Prepared, prepare, with_budget
from actsolve.problem import Problem
from actsolve.runtime.measure_step import measured_peak
from actsolve.runtime.trainer import Trainer
from actsolve.settings import Settings
from actsolve.training_step import TrainingStep

Row = dict[str, Any]
FILE_WIDTH = 200  # of a table in a file or pipe
adamw = partial(new_optimizer, "adamw")
_HEAP = {-1: 2**31 - 1, -2: 64 << 20, -3: 32 << 20}  # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD at its maximum


def parser(
    about: str | None, *, models: Sequence[str] = (), budgets: Sequence[str] = (), time_limit_s: float = 60.0
) -> argparse.ArgumentParser:
    """Return the flags of every benchmark; ``--models`` and ``--budgets`` where they have defaults."""
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if models:
        flags.add_argument("--models", type=_listed, default=list(models), help=f"default {','.join(models)}")
    if budgets:
        shown = ",".join(budgets).replace("%", "%%")
        flags.add_argument("--budgets", type=_listed, default=list(budgets), help=f"default {shown}")
    flags.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch; default all")
    flags.add_argument("--time-limit", type=float, default=time_limit_s, help=f"seconds for each solve; default {time_limit_s:g}")
    flags.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
    return flags


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def rows_by_model(rows_of: Callable[[str, argparse.Namespace], list[Row]], options: argparse.Namespace) -> list[Row]:
    """Return the rows of all models, each made in a process of its own."""
    rows = []
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit PyTorch's threads
    for name in options.models:
        tell(f"{name} ...")
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=(options.threads,)) as process:
            rows += process.submit(rows_of, name, options).result()
    return rows


def _begin(threads: int) -> None:
    """Set up a process: with ``threads`` of PyTorch, with a heap that stays, and without the plans that were found before.

    glibc returns the top of its heap to the system and faults it in again, page by page. Two modules that are timed in turns
    share a heap; which of them pays, 8% of a convolution chain's step, is an accident of where in it their blocks lie.
    """
    torch.set_num_threads(threads)
    os.environ.setdefault("ACTSOLVE_PLAN_CACHE", "off")  # what solving takes is what is shown
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, size_bytes in _HEAP.items():
            mallopt(parameter, size_bytes)


def prepared_step(name: str, options: argparse.Namespace, **overrides: Any) -> tuple[TrainingStep, Prepared, Settings]:
    """Return a model of the zoo from seed 0, captured and costed by measuring each op here."""
    torch.manual_seed(0)
    step = models_zoo.get(name)(**overrides)
    settings = Settings(time_limit_s=options.time_limit)
    return step, prepare(step, "100%", settings, target=name), settings


def modelled(name: str, options: argparse.Namespace) -> Iterator[tuple[Row, Prepared, Problem]]:
    """Yield a model of the zoo in bf16 on fake tensors within each budget on each profile, and the row that says which it is."""
    for hardware in options.hardware:
        settings = Settings(hardware=hardware, time_limit_s=options.time_limit)
        with FakeTensorMode(allow_non_fake_inputs=True):
            step = models_zoo.get(name)(dtype="bf16")
        prepared = prepare(step, "100%", settings, target=name)
        for budget in options.budgets:
            tell(f"{name} on {hardware} at {budget}")
            problem = with_budget(prepared, budget, settings).problem
            row: Row = {
                "model": name,
                "hardware": hardware,
                "budget": budget,
                "budget_bytes": problem.budget_bytes,
                "ops": [problem.graph.n_forward, len(problem.graph.ops) - problem.graph.n_forward],
            }
            yield row, prepared, problem


def trainer(step: TrainingStep, module: torch.nn.Module | None = None) -> Trainer:
    """Return what trains ``module``, an optimized one of that step, or if None a copy of the original, by AdamW."""
    if module is None:
        step = replace(step, model=copy.deepcopy(step.model))
    return Trainer(step, adamw, module=module)


def peak_bytes(of: Trainer) -> int:
    """Return the measured peak of a whole step, the second one, for which the optimizer's state exists."""
    of.drop_gradients()
    of.step()
    return measured_peak(of.step, of.static_bytes(), before=of.drop_gradients, warmup=0)


def finish(
    title: str,
    rows: list[Row],
    columns: Mapping[str, Callable[[Row], str]],
    options: argparse.Namespace,
    **more: Any,
) -> int:
    """Print what was found; return the exit code: 1 if any row misses what it should show.

    Args:
        title: Of the table.
        rows: What was found. ``missed`` in a row lists what does not hold there.
        columns: How a row is shown, by heading.
        options: The flags.
        more: Further fields of the JSON object.
    """
    missed = [f"{row['model']} {row.get('budget', '')}: {what}" for row in rows for what in row.get("missed", ())]
    if options.json:
        found = {"benchmark": title, "machine": machine(options.threads), "rows": rows, "missed": missed, **more}
        print(json.dumps(_finite(found), indent=1))
        return 1 if missed else 0
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_cell(show, row) for show in columns.values()))
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in {**machine(options.threads), **more}.items()))
    console.print("\n".join(f"[red]missed[/red] {line}" for line in missed) or "all that was to be shown holds")
    return 1 if missed else 0


def _cell(show: Callable[[Row], str], row: Row) -> str:
    """A row without what a column shows has an empty cell there: a budget that nothing fits."""
    try:
        return show(row)
    except (KeyError, TypeError):
        return ""


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def machine(threads: int) -> Row:
    """Return where the figures come from. The load tells how far the times can be trusted."""
    return {
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
    }


def tell(message: str) -> None:
    """Print progress."""
    print(message, file=sys.stderr, flush=True)


def percent(ratio: float | None) -> str:
    """Return a ratio as its distance from 1: ``+3.2%``."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def interval(ratio: Sequence[float]) -> str:
    """Return a median and its 95% interval."""
    return f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"
