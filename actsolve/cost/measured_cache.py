"""What was measured here before, on disk: one versioned JSON file for each device, torch version and setting.

A file is read without a lock, for it only ever appears whole: it is written aside and renamed, under a lock, with what other
processes have added meanwhile. One that cannot be read is rebuilt, and said so. A cache that cannot be written is
done without.

What was measured on a busy machine is rough, and serves for an hour: a second run finds the plan again that was made with it, and
no figure stays that a quiet machine would not confirm.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actsolve.cache_dir import cache_dir
from actsolve.errors import UsageError
from actsolve.json_file import write_bytes

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 20.0
_SERVES_S = 3600.0


class Measured(BaseModel):
    """One signature's figures.

    Attributes:
        seconds: Median of one run.
        workspace_bytes: The most that it allocated at once beyond its outputs.
        rough_at: Unix time of when it was measured, if its runs lay too far apart for the figure to be kept for good.
        at: Unix time of when it was measured, if that was noted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seconds: Annotated[float, Field(ge=0, le=1e6)]
    workspace_bytes: Annotated[int, Field(ge=0, le=2**62)] = 0
    rough_at: Annotated[float, Field(ge=0, le=1e12)] | None = None
    at: Annotated[float, Field(ge=0, le=1e12)] | None = None

    @property
    def serves(self) -> bool:
        """Whether it need not be measured again."""
        return self.rough_at is None or _is_recent(self.rough_at)

    @property
    def is_recent(self) -> bool:
        """Whether it is so new that a second run is to find it as it is, and with it the plan that was made with it."""
        return self.at is not None and _is_recent(self.at)


def _is_recent(then: float) -> bool:
    return 0 <= time.time() - then < _SERVES_S


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    format: Literal["actsolve-costs-1"] = "actsolve-costs-1"
    environment: str
    measured: dict[str, Measured]


class MeasuredCache:
    """Figures by signature, for one environment.

    Args:
        environment: All that the figures depend on besides the signature: device, torch version,
            threads, settings.
        directory: Where the file lives; `cache_dir` if left out.
    """

    def __init__(self, environment: str, directory: Path | None = None) -> None:
        self.environment = environment
        digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
        self.path = (directory or cache_dir()) / f"costs-{digest}.json"

    def read(self) -> dict[str, Measured]:
        """Return all that is known, but rough figures of long ago; nothing if there is no file, or none that can be read."""
        try:
            file = _File.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            logger.warning("%s cannot be read (%s) and will be rebuilt", self.path, str(error).splitlines()[0])
            return {}
        if file.environment != self.environment:
            logger.warning("%s is of another environment and will be rebuilt", self.path)
            return {}
        return {signature: figures for signature, figures in file.measured.items() if figures.serves}

    def add(self, measured: Mapping[str, Measured]) -> None:
        """Add ``measured`` to the file, beside what other processes have added since it was read."""
        if not measured:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_TIMEOUT_S):
                file = _File(environment=self.environment, measured={**self.read(), **measured})
                write_bytes(self.path, file.model_dump_json(indent=1).encode(), what="cache of measured costs")
        except (OSError, Timeout, UsageError) as error:
            logger.warning("measured costs are not kept: %s", error)
