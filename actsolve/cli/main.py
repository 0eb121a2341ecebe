"""``actsolve``: flags -> api -> print; no decisions."""

from __future__ import annotations

from typing import Annotated

import typer

from actsolve.cli.compare import compare
from actsolve.cli.optimize import optimize
from actsolve.cli.run import run
from actsolve.cli.trace import trace

app = typer.Typer(
    name="actsolve",
    help="Train a PyTorch model within a memory budget, as fast as can be, with a proven gap.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(trace)
app.command()(optimize)
app.command()(compare)
app.command()(run)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"actsolve {version('actsolve')}")
        except PackageNotFoundError:
            print("actsolve, not installed")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train a PyTorch model within a memory budget, as fast as can be, with a proven gap.

    Exit codes: 0 done, 1 internal error, 2 wrong usage or unreadable input, 3 no plan fits or none was found.
    """


def main() -> None:
    """Run the command line."""
    app()
