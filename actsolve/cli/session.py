"""What every command has in common: results on stdout, all else on stderr, and errors as one message with an exit code."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.status import Status

from actsolve.errors import ActsolveError, InfeasibleBudget, UsageError
from actsolve.units import format_seconds

_INTERRUPTED = 130  # as shells have it for a process that Ctrl-C ended
_EVERY_S = 2.0  # between lines on a solve where stderr is no terminal


class Session:
    """One command: tells its progress on stderr and keeps its result for the end.

    Args:
        as_json: Whether the result is printed as one JSON object.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._status: Status | None = None
        self._stage = ""
        self._last_line_s = 0.0
        self._text: list[str] = []
        self._content: dict[str, Any] | None = None

    # -- progress -----------------------------------------------------------------------------------------------------

    def stage(self, stage: str) -> None:
        """Say what is being done from now on."""
        self._stage = stage
        self._last_line_s = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(f"actsolve: {stage}")
        elif self._status is None:
            self._status = self.console.status(stage)
            self._status.start()
        else:
            self._status.update(stage)

    def measuring(self, done: int, total: int) -> None:
        """Say how many op signatures have been measured."""
        self._detail(f"measured {done} of {total} ops")

    def solving(
        self,
        elapsed_s: float,
        incumbent_s: float | None,
        bound_s: float | None,
        as_text: Callable[[float], str] = format_seconds,
    ) -> None:
        """Say how a solve goes: the best plan so far, what is proven, and the gap between them."""
        if incumbent_s is None:
            found = "no plan yet"
        elif bound_s is None:
            found = f"{as_text(incumbent_s)} extra"
        else:
            gap = (incumbent_s - bound_s) / incumbent_s if incumbent_s > 0 else 0.0
            found = f"{as_text(incumbent_s)} extra, bound {as_text(max(0.0, bound_s))}, gap {max(0.0, gap):.1%}"
        self._detail(f"{elapsed_s:.1f} s, {found} (Ctrl-C takes the best so far)")

    def _detail(self, detail: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._stage}: {detail}")
        elif time.monotonic() - self._last_line_s >= _EVERY_S:
            self._last_line_s = time.monotonic()
            self.console.print(f"actsolve: {self._stage}: {detail}")

    def quiet(self) -> None:
        """Take the progress line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    # -- the result ---------------------------------------------------------------------------------------------------

    def result(self, content: dict[str, Any], text: str) -> None:
        """Keep what is to be printed: ``content`` with ``--json``, else ``text``."""
        self._content = content
        self._text.append(text)

    def print_result(self) -> None:
        """Print what was kept.

        Raises:
            OSError: stdout is full or closed.
        """
        if getattr(sys, "stdout", None) is None:  # so it is where the shell closed it
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.as_json and self._content is not None:
            print(json.dumps(self._content, allow_nan=False))
        elif not self.as_json:
            print("".join(self._text), end="")
        sys.stdout.flush()

    def fail(self, error: ActsolveError) -> None:
        """Say what went wrong on stderr; with ``--json`` on stdout too, beside what is known of the step."""
        self.console.print(str(error))
        known: dict[str, Any] = {}
        if isinstance(error, InfeasibleBudget):
            known = error.attempt.as_json() if error.attempt is not None else {}
        self.stop(error.what, type(error).__name__, where=error.where, why=error.why, try_=error.try_)
        self._content = {**known, **(self._content or {})}

    def stop(
        self, what: str, kind: str = "", *, where: str | None = None, why: str | None = None, try_: str | None = None
    ) -> None:
        """Let the result be what went wrong."""
        self._text, self._content = [], {"error": {"type": kind, "what": what, "where": where, "why": why, "try": try_}}


@contextlib.contextmanager
def session(as_json: bool) -> Iterator[Session]:
    """Run a command: whatever it prints goes to stderr, its result to stdout at the end, its errors become exit codes."""
    current = Session(as_json)
    code = 1
    with _diverted_stdout(), _logging_to(current):
        try:
            yield current
            code = 0
        except typer.Exit as exit_:
            code = exit_.exit_code
        except ActsolveError as error:
            current.quiet()
            current.fail(error)
            code = error.exit_code
        except KeyboardInterrupt:
            current.quiet()
            current.console.print("actsolve: interrupted")
            current.stop("interrupted")
            code = _INTERRUPTED
        except Exception as error:
            current.quiet()
            current.stop(f"internal error: {type(error).__name__}: {error}")
            current.console.print(traceback.format_exc().rstrip())
            current.console.print("actsolve: this is an error of actsolve itself; please report it with the lines above")
        finally:
            current.quiet()
    try:
        current.print_result()
    except BrokenPipeError:
        raise  # whoever reads has enough; Typer ends it quietly
    except OSError as error:
        _drop_stdout()
        reason = (error.strerror or str(error)).lower()
        current.console.print(str(UsageError("cannot write the result", where="stdout", why=reason)))
        code = UsageError.exit_code
    if code:
        _leave(code)


def _leave(code: int) -> NoReturn:
    raise typer.Exit(code)


def _drop_stdout() -> None:
    """Let what is still to be written to stdout go nowhere: Python would fail on it again when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _diverted_stdout() -> Iterator[None]:
    """Let everything that is printed meanwhile go to stderr, also from C: the user's code may print what it likes."""
    original = sys.stdout
    saved = _redirected_descriptor(original)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # what C still holds belongs to stderr too
            os.dup2(saved, 1)
            os.close(saved)


def _redirected_descriptor(stream: TextIO) -> int | None:
    """Point descriptor 1 to where 2 points; return a copy of what it was, or None where stdout is no such stream."""
    try:
        if stream.fileno() != 1:
            return None
        stream.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        return None
    return saved


@contextlib.contextmanager
def _logging_to(current: Session) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            current.console.print(f"{record.levelname.lower()}: {record.getMessage()}")

    logger, handler = logging.getLogger("actsolve"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
