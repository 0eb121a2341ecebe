"""The flags that several commands share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actsolve.errors import UsageError
from actsolve.json_file import write_json
from actsolve.units import parse_bytes, parse_speed

if TYPE_CHECKING:
    from actsolve.runtime.switches import Switch
    from actsolve.settings import Settings

_WHAT, _HOW, _OUT = "What to train", "How to plan", "Output"
_AS_THEY_ARE = ("optimizer", "hardware", "planner", "solver", "gap", "shards")
_SIZES = {"static_bytes": "static_bytes", "reserve": "reserve_bytes", "host_budget": "host_budget_bytes"}

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A model of the zoo (gpt-mini, resnet50, ...), path/file.py:factory, or package.module:factory. "
        "Executes that code. The factory returns actsolve.TrainingStep.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A keyword argument of the factory; may be repeated.", rich_help_panel=_WHAT
    ),
]
Fake = Annotated[
    bool | None,
    typer.Option(
        "--fake/--real",
        help="Build the model of fake tensors, which take no memory. The default where nothing is run or measured here.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
MemBudget = Annotated[
    str,
    typer.Option(
        metavar="B",
        help="Cap on device memory of the whole step: 8GiB, 7500MB, bytes; 60% of what keeping everything needs above static; "
        "or min, the smallest that works.",
        show_default=False,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(help="Whose state counts: adamw, adam, sgd, sgd-momentum, adagrad, rmsprop, none.", rich_help_panel=_WHAT),
]
Grads = Annotated[
    str,
    typer.Option(help="none: gradients are None when a step begins; accumulate: they are there.", rich_help_panel=_WHAT),
]
Shards = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Plan for one of N GPUs that share parameters, gradients and optimizer state, as FSDP and ZeRO-3 do. Only a plan: "
        "nothing is run.",
        rich_help_panel=_WHAT,
    ),
]
StaticBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Stands for all memory that is there before the step.", rich_help_panel=_WHAT),
]
Reserve = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Left free for the allocator; by default 0 on a CPU, 5% on a GPU.",
        rich_help_panel=_WHAT,
    ),
]
Hardware = Annotated[
    str,
    typer.Option(
        help="auto: measure each op here. Or a profile: a100, h100, 4090, ..., or its .json file.", rich_help_panel=_HOW
    ),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Cap on host memory for what is offloaded: 32GiB, bytes; 0 offloads nothing. By default 80% of what is available "
        "here; no cap with a profile.",
        rich_help_panel=_HOW,
        show_default=False,
    ),
]
H2d = Annotated[
    str | None,
    typer.Option(
        "--h2d",
        metavar="SPEED",
        help="Copies from host to device: 25GB/s, 800MB/s. By default that of the hardware; a CPU has none, and emulates it.",
        rich_help_panel=_HOW,
        show_default=False,
    ),
]
D2h = Annotated[
    str | None,
    typer.Option(
        "--d2h",
        metavar="SPEED",
        help="Copies from device to host; likewise. Of two unknown directions one given stands for both.",
        rich_help_panel=_HOW,
        show_default=False,
    ),
]
Planner = Annotated[
    str,
    typer.Option(
        help="milp, or a baseline: keep_all, sqrt_l, per_layer, chen_greedy, selective, greedy, treeverse, rotor, checkmate, "
        "torch_budget, offload_all, offload_boundaries, offload_sync.",
        rich_help_panel=_HOW,
    ),
]
Solver = Annotated[str, typer.Option(help="highs, cbc, or another that PuLP knows.", rich_help_panel=_HOW)]
Gap = Annotated[float, typer.Option(help="Share of the extra time that need not be proven.", rich_help_panel=_HOW)]
TimeLimit = Annotated[float, typer.Option(metavar="SECONDS", help="When to take the best plan so far.", rich_help_panel=_HOW)]
Keep = Annotated[
    list[str],
    typer.Option(
        metavar="MODULE", help="Keep what this module computes, such as blocks.0; may be repeated.", rich_help_panel=_HOW
    ),
]
Recompute = Annotated[
    list[str],
    typer.Option(metavar="MODULE", help="Recompute what this module computes; may be repeated.", rich_help_panel=_HOW),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.", rich_help_panel=_OUT)]
Timeline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the simulated step to this file as a Chrome trace, for chrome://tracing or ui.perfetto.dev.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to this file.", rich_help_panel=_OUT)]


def settings(context: typer.Context) -> Settings:
    """Return the settings that the flags of the command that runs name; a flag that it has not is left at its default.

    Raises:
        UsageError: one of them cannot be used.
    """
    from actsolve.planners import require_solver
    from actsolve.settings import Settings

    given = context.params
    if "solver" in given:
        require_solver(given["solver"])
    values: dict[str, Any] = {name: given[name] for name in _AS_THEY_ARE if name in given}
    for flag, field in _SIZES.items():
        if given.get(flag) is not None:
            values[field] = parse_bytes(given[flag], what=_flag(flag))
    for flag in ("h2d", "d2h"):
        if given.get(flag) is not None:
            values[flag] = parse_speed(given[flag], what=_flag(flag))
    return Settings(
        grads="none" if given["grads"] == "set_to_none" else given["grads"],
        time_limit_s=given.get("time_limit", 60.0),
        keep=tuple(given.get("keep") or ()),
        recompute=tuple(given.get("recompute") or ()),
        **values,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def switch_called(name: str, *others: str) -> Switch:
    """Return the switch of a name.

    Raises:
        UsageError: there is none, or others are named besides.
    """
    from actsolve.runtime.switches import SWITCHES

    if others:
        named = ", ".join(map(repr, (name, *others)))
        raise UsageError("one switch at a time", where="--switch", why=f"{named} are given", try_="a run for each")
    if name not in SWITCHES:
        raise UsageError(f"there is no switch {name!r}", where="--switch", try_="one of " + ", ".join(SWITCHES))
    return SWITCHES[name]


def is_fake(fake: bool | None, *, runs: bool, hardware: str | None, shards: int = 1) -> bool:
    """Return whether the model is built of fake tensors: as asked for, else where nothing is run or measured here.

    Raises:
        UsageError: it is to be run, and is fake or one shard of many.
    """
    if runs and shards > 1:
        raise UsageError("a shard cannot be run", where="--shards", why="there is one process here", try_="leave out --run")
    if fake and runs:
        raise UsageError("--fake tensors cannot be run", try_="leave out --fake or --run")
    return (not runs and hardware != "auto") if fake is None else fake


def write_result(path: Path | None, content: dict[str, Any]) -> None:
    """Write what ``--json`` prints to a file, if one is named.

    Raises:
        UsageError: it cannot be written.
    """
    if path is not None:
        write_json(path, content, what="result")


def require_writable(path: Path | None, flag: str = "--out", what: str = "result") -> None:
    """Raise UsageError unless a file can be written there: better now than after a minute of solving."""
    if path is None:
        return
    import os

    folder = path.parent
    reason = None
    if not folder.is_dir():
        reason = f"{folder} is no directory"
    elif path.exists() and not path.is_file():
        reason = "it is no regular file"
    elif not os.access(folder, os.W_OK):
        reason = f"{folder} is not writable"
    if reason is not None:
        raise UsageError(f"cannot write the {what}", where=str(path), why=reason, try_=f"{flag} with a path that you may write")
