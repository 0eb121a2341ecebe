"""Reading JSON that somebody else wrote, and writing JSON that never exists half-done.

A file is hostile until it is read: `read_json` gives the text only once it is known to be UTF-8 JSON of a sane size with no
duplicate key, NaN or Infinity, and `validated` turns it into a pydantic model or a `FileFormatError`. A file is written to a
temporary name in the same directory, flushed to the disk, and renamed, so that a reader sees the old or the new content.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from actsolve.errors import FileFormatError, UsageError

MAX_FILE_BYTES: Final = 512 * 2**20
MAX_NUMBER: Final = 2**62
_MAX_TEXT = 2**20
_MAX_ERROR_TEXT = 200

# Control characters and those that turn the direction of text could forge what a terminal or a report shows.
Text = Annotated[str, StringConstraints(max_length=_MAX_TEXT, pattern=r"^[^\p{Cc}\u{2028}-\u{202e}\u{2066}-\u{2069}]*$")]
Name = Annotated[Text, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, Field(ge=0, le=MAX_NUMBER)]

# For pydantic's own words.
_PLAIN: Final = {"extra_forbidden": "there is no such field", "missing": "the field is missing", "too_short": "it is too short"}
_TYPES: Final = ("constrained-int", "constrained-float", "int", "float")  # where there may be one or the other

Model = TypeVar("Model", bound=BaseModel)


class FileModel(BaseModel):
    """What all models of file contents share: nothing is converted, nothing unknown is let in, nothing is infinite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, from_attributes=True)


def shown(text: object) -> str:
    """Return ``text`` as it may be shown in a message: escaped where it is not printable, and not too long."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)[: _MAX_ERROR_TEXT + 1])
    return plain if len(plain) <= _MAX_ERROR_TEXT else plain[: _MAX_ERROR_TEXT - 3] + "..."


def read_text(path: str | os.PathLike[str], *, what: str) -> str:
    """Return the text of a file that somebody else wrote.

    Args:
        path: The file.
        what: What it should be, for messages: "plan file".

    Raises:
        FileFormatError: it cannot be read, is no regular file, is larger than 512 MiB, or is not UTF-8.
    """

    def fail(why: str, try_: str) -> NoReturn:
        raise FileFormatError(f"cannot read the {what}", where=shown(path), why=why, try_=try_)

    try:
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device may never end
                fail("it is no regular file", f"the path of a {what}")
            size = status.st_size
            raw = b"" if size > MAX_FILE_BYTES else file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        fail("it is a directory", f"the path of a {what}")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else None
        fail((reason or shown(error)).lower(), f"the path of a {what} that you may read")
    if max(size, len(raw)) > MAX_FILE_BYTES:
        fail(f"it is larger than {MAX_FILE_BYTES // 2**20} MiB", f"the path of a {what}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"it is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}", f"the path of a {what}")


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for whoever may write to a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(path: str | os.PathLike[str], *, what: str) -> tuple[Any, str]:
    """Return the value that the JSON file holds, and its text.

    Args:
        path: The file.
        what: What it should be, for messages: "plan file".

    Raises:
        FileFormatError: as `read_text`; or it is not JSON, has a key twice, or has a NaN or an infinity.
    """

    def fail(why: str) -> NoReturn:
        raise FileFormatError(f"cannot read the {what}", where=shown(path), why=why, try_=f"write the {what} again")

    text = read_text(path, what=what)
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant), text
    except json.JSONDecodeError as error:
        reason = error.msg.lower().removesuffix(" at")
        fail(f"it is not JSON, or cut short: {reason} at line {error.lineno}, column {error.colno}")
    except RecursionError:
        fail("it is nested too deeply")
    except ValueError as error:  # from the hooks below, or an integer of thousands of digits
        fail("a number has thousands of digits" if "int_max_str_digits" in str(error) else shown(error))


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON allows")


def read_model(path: str | os.PathLike[str], model: type[Model], *, what: str, format_name: str) -> Model:
    """Return the content of a file whose ``format`` field is ``format_name``.

    Raises:
        FileFormatError: as `read_json`; or it is of another format or version; or a field is missing,
            unknown, of the wrong type or out of range.
    """
    return read_one_of(path, {format_name: model}, what=what)


def read_one_of(path: str | os.PathLike[str], models: Mapping[str, type[Model]], *, what: str) -> Model:
    """Return the content of a file whose ``format`` field is one of ``models``, as that model.

    Raises:
        FileFormatError: as `read_model`.
    """
    data, text = read_json(path, what=what)
    found = data.get("format") if isinstance(data, dict) else None
    del data  # the text is parsed once more, into the model: a large file need not be there three times
    if not isinstance(found, str) or found not in models:
        known = " or ".join(map(repr, models))
        why = f"its format is {shown(repr(found))}, not {known}" if found is not None else "it has no field 'format'"
        try_ = f"a file of format {' or '.join(models)}, or a newer actsolve"
        raise FileFormatError(f"cannot read the {what}", where=shown(path), why=why, try_=try_)
    try:
        return models[found].model_validate_json(text)
    except ValidationError as error:
        raise FileFormatError(
            f"cannot read the {what}", where=shown(path), why=first_problem(error), try_=f"write the {what} again"
        ) from None


def first_problem(error: ValidationError) -> str:
    """Return the first thing that is wrong, and where in the file."""
    found: dict[str, str] = {}  # of what may be of several types the last one counts
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    for one in [e for e in errors if e["type"] != "too_short"] or errors:  # a list is cut short at the first wrong element
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"] if part not in _TYPES)
        message = _PLAIN.get(one["type"], one["msg"])
        found["".join(parts).lstrip(".")] = message[:1].lower() + message[1:]
    place, message = next(iter(found.items()))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{shown(place)}: {shown(message)}{more}"


def write_json(path: str | os.PathLike[str], content: dict[str, Any], *, what: str) -> None:
    """Write ``content`` to ``path``: one line per field, and one per element of a field that is a list or an object.

    Raises:
        UsageError: as `write_bytes`.
    """
    write_bytes(path, _json_lines(content).encode(), what=what)


def write_bytes(path: str | os.PathLike[str], data: bytes, *, what: str) -> None:
    """Write ``data`` to ``path``. The file is replaced at once: whoever reads it meanwhile sees the old content.

    Raises:
        UsageError: the path cannot be written, or is no regular file.
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise UsageError(f"cannot write the {what}", where=shown(path), why="it is no regular file", try_="another path")
        _replace(target, data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(
            f"cannot write the {what}", where=shown(path), why=(reason or shown(error)).lower(), try_="a path that you may write"
        ) from error


def _json_lines(content: dict[str, Any]) -> str:
    encode = json.JSONEncoder(allow_nan=False, ensure_ascii=True).encode
    fields = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            inner = ",\n  ".join(f"{encode(k)}: {encode(v)}" for k, v in value.items())
            fields.append(f"{encode(key)}: {{\n  {inner}\n}}")
        elif isinstance(value, list | tuple) and value:
            inner = ",\n  ".join(map(encode, value))
            fields.append(f"{encode(key)}: [\n  {inner}\n]")
        else:
            fields.append(f"{encode(key)}: {encode(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _replace(target: Path, data: bytes) -> None:
    temporary = target.parent / f".actsolve-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot flush a directory
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
