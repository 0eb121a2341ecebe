"""``actsolve``: flags -> api -> print; no decisions."""

from __future__ import annotations

from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from actsolve.cli.compare import compare
from actsolve.cli.frontier import frontier
from actsolve.cli.optimize import optimize
from actsolve.cli.plan import plan
from actsolve.cli.run import run
from actsolve.cli.session import Session
from actsolve.cli.trace import trace
from actsolve.errors import UsageError
from actsolve.json_file import shown

# What Typer raises on flags that it cannot read; it has no public name of its own.
_WrongFlags: Final[type[Exception]] = typer.BadParameter.__mro__[1]


class _Commands(TyperGroup):
    """The commands; with ``--json`` also what is wrong with the flags is told as one object."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **more: Any) -> Any:
        as_json = _wants_json(args)
        try:
            context = super().make_context(info_name, args, *others, **more)
        except _WrongFlags as error:
            _tell(error, as_json)
        context.meta[__name__] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _WrongFlags as error:
            _tell(error, ctx.meta[__name__])


def _wants_json(arguments: list[str]) -> bool:
    return "--json" in arguments[: arguments.index("--") if "--" in arguments else None]


def _tell(error: Any, as_json: bool) -> NoReturn:
    if not as_json or not error.format_message():  # without a message it is the help that is wanted
        raise error
    context = error.ctx
    session = Session(as_json=True)
    session.fail(
        UsageError(
            shown(error.format_message().splitlines()[0].rstrip(".")),
            where=None if context is None else context.command_path,
            try_=None if context is None else f"{context.command_path} --help",
        )
    )
    session.print_result()
    raise typer.Exit(UsageError.exit_code)


app = typer.Typer(
    cls=_Commands,
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
app.command()(frontier)
app.command()(plan)
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
