"""``actsolve plan``: the planner alone, on any graph file. It never imports torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actsolve.cli import flags
from actsolve.cli.session import Session, session
from actsolve.errors import UsageError
from actsolve.units import parse_bytes, parse_speed

if TYPE_CHECKING:
    from actsolve.dag import Dag
    from actsolve.graph_planning import GraphTask
    from actsolve.planners import PlannerOptions

_OURS = "Training steps only (actsolve-graph-1)"

GraphPath = Annotated[
    Path,
    typer.Argument(
        metavar="GRAPH",
        help="A graph file: of actsolve trace --out (actsolve-graph-1), or nodes in execution order with a size and a time each, "
        "and edges (actsolve-dag-1).",
        show_default=False,
    ),
]
MemBudget = Annotated[
    str,
    typer.Option(
        metavar="B",
        help="Cap on memory: 8GiB, 7500MB, bytes; 60% of the peak of running every node once, above static; "
        "or min, the smallest that works.",
        show_default=False,
    ),
]


def _ours(help_: str, metavar: str | None = None, name: str | None = None) -> Any:
    names = (name,) if name else ()
    return typer.Option(*names, metavar=metavar, help=help_, rich_help_panel=_OURS, show_default=False)


def plan(
    graph: GraphPath,
    mem_budget: MemBudget,
    solver: flags.Solver = "highs",
    gap: flags.Gap = 0.01,
    time_limit: flags.TimeLimit = 60.0,
    planner: Annotated[str | None, _ours("milp (the default), keep_all, sqrt_l, ...: any that compare shows.")] = None,
    hardware: Annotated[
        str | None, _ours("Costs by a profile (a100, h100, 4090, ..., or its .json file), in place of those of the file.")
    ] = None,
    optimizer: Annotated[str | None, _ours("Whose state counts: adamw (the default), ..., none.")] = None,
    static_bytes: Annotated[str | None, _ours("Stands for all memory that is there before the step.", "SIZE")] = None,
    reserve: Annotated[
        str | None, _ours("Left free for the allocator; by default 5% where costs are a profile's, else 0.", "SIZE")
    ] = None,
    host_budget: Annotated[str | None, _ours("Cap on host memory for what is offloaded; by default none.", "SIZE")] = None,
    h2d: Annotated[
        str | None, _ours("Copies from host to device: 25GB/s. By default those of --hardware, else nothing.", "SPEED", "--h2d")
    ] = None,
    d2h: Annotated[str | None, _ours("Copies from device to host; likewise.", "SPEED", "--d2h")] = None,
    out: flags.Out = None,
    as_json: flags.Json = False,
) -> None:
    """Plan any graph file within a memory budget, without a model and without torch.

    The file is that of a training step, or nodes of any kind that may all run again: then what is proven holds for every
    schedule with their order of first runs.
    """
    with session(as_json) as s:
        from actsolve.dag import Dag
        from actsolve.dag_file import load_any
        from actsolve.graph_planning import GraphTask
        from actsolve.planners import PlannerOptions, require_solver
        from actsolve.static_memory import parse_budget

        parse_budget(mem_budget)
        flags.require_writable(out)
        _refuse_limits(gap, time_limit)
        require_solver(solver)
        options = PlannerOptions(gap=gap, time_limit_s=time_limit, solver=solver)
        s.stage(f"reading {graph}")
        name, loaded = load_any(graph)
        if isinstance(loaded, Dag):
            given = {"--planner": planner, "--hardware": hardware, "--optimizer": optimizer, "--static-bytes": static_bytes}
            given |= {"--reserve": reserve, "--host-budget": host_budget, "--h2d": h2d, "--d2h": d2h}
            _refuse_given(given)
            content, text = _general(s, name, loaded, options, mem_budget)
        else:
            task = GraphTask(
                name,
                *loaded,
                options,
                planner=planner or "milp",
                hardware=hardware,
                optimizer=optimizer or "adamw",
                static_bytes=None if static_bytes is None else parse_bytes(static_bytes, what="--static-bytes"),
                reserve_bytes=None if reserve is None else parse_bytes(reserve, what="--reserve"),
                host_budget_bytes=None if host_budget is None else parse_bytes(host_budget, what="--host-budget"),
                h2d=None if h2d is None else parse_speed(h2d, what="--h2d"),
                d2h=None if d2h is None else parse_speed(d2h, what="--d2h"),
                stage=s.stage,
            )
            content, text = _training_step(s, task, mem_budget)
        flags.write_result(out, content)
        s.result(content, text)


def _general(s: Session, name: str, dag: Dag, options: PlannerOptions, mem_budget: str) -> tuple[dict[str, Any], str]:
    from dataclasses import replace

    from actsolve.dag_planning import DagTask, plan_dag_within
    from actsolve.report.graph_plan_text import graph_plan_text

    base = sum(dag.time) or 1.0
    shown = partial(s.solving, as_text=lambda extra: f"{extra / base:.3%}")
    found = plan_dag_within(DagTask(name, dag, replace(options, progress=shown), s.stage), mem_budget)
    return found.as_json(), graph_plan_text(found, dag)


def _training_step(s: Session, task: GraphTask, mem_budget: str) -> tuple[dict[str, Any], str]:
    from dataclasses import replace

    from actsolve.graph_planning import graph_plan_of, plan_graph_within
    from actsolve.report.plan_text import plan_text

    task = replace(task, options=replace(task.options, progress=s.solving))
    planned = plan_graph_within(task, mem_budget)
    return graph_plan_of(planned, task.options.gap).as_json(), plan_text(planned)


def _refuse_limits(gap: float, time_limit: float) -> None:
    if not 0 <= gap < float("inf"):
        raise UsageError(f"cannot use gap={gap!r}", why="it is a share of the extra time", try_="0.01")
    if not 0 < time_limit < float("inf"):
        raise UsageError(f"cannot use a time limit of {time_limit!r} s", why="it is not positive", try_="60")


def _refuse_given(given: dict[str, str | None]) -> None:
    """Raise if a flag is given that means nothing for a general graph."""
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)}: of no meaning for this file",
            why="its format is actsolve-dag-1: nodes have a size and a time, and there is no device, optimizer or host",
            try_=f"leave out {', '.join(wrong)}",
        )
