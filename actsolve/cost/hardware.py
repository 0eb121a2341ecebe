"""What is known of a device without having it: rates, sizes and link speeds, each with where it comes from.

The table is `hardware.json`. A figure for which no source was found is null there, and a caller who needs it is told so:
nothing is guessed silently. Two things are derived, and `Rate.source` says when: an achieved rate that nobody measured is
the vendor's peak times `achieved_fraction`, and fp16 runs at bf16's rate where only bf16 is listed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actsolve.errors import FileFormatError, UsageError
from actsolve.json_file import read_text, shown

Figure = Annotated[float, Field(gt=0, le=1e7)]

_SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Rate:
    """A speed, per second, and where the figure comes from."""

    per_s: float
    source: str


class AchievedFraction(BaseModel):
    """The share of the vendor's peak that well-written kernels reach."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    matmul: Annotated[float, Field(gt=0, le=1)]
    memory: Annotated[float, Field(gt=0, le=1)]
    source: str


class HardwareProfile(BaseModel):
    """One device as its row in the table says: GB, GB/s and TFLOP/s are decimal (1e9 and 1e12), dense.

    None = no source found. The properties and methods give plain bytes, bytes per second and FLOP per second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    aliases: tuple[str, ...] = ()
    memory_gb: Figure
    memory_gbps: Figure
    memory_achieved_gbps: Figure | None = None
    bf16_tflops: Figure | None = None
    bf16_achieved_tflops: Figure | None = None
    fp16_tflops: Figure | None = None
    fp16_achieved_tflops: Figure | None = None
    fp32_tflops: Figure | None = None
    fp32_achieved_tflops: Figure | None = None
    h2d_gbps: Figure | None = None
    d2h_gbps: Figure | None = None
    h2d_both_gbps: Figure | None = None
    d2h_both_gbps: Figure | None = None
    source: str

    @property
    def memory_bytes(self) -> int:
        """Device memory at 1e9 bytes a GB; most cards have a few per cent more."""
        return round(self.memory_gb * 1e9)

    @property
    def h2d_bytes_per_s(self) -> float | None:
        """Host to device, alone. None: unknown, ask for ``--h2d``."""
        return _bytes_per_s(self.h2d_gbps)

    @property
    def d2h_bytes_per_s(self) -> float | None:
        """Device to host, alone. None: unknown, ask for ``--d2h``."""
        return _bytes_per_s(self.d2h_gbps)

    @property
    def h2d_both_bytes_per_s(self) -> float | None:
        """Host to device while the other direction is busy. None: unknown, take the two as sharing one link."""
        return _bytes_per_s(self.h2d_both_gbps)

    @property
    def d2h_both_bytes_per_s(self) -> float | None:
        """Device to host while the other direction is busy. None: unknown, take the two as sharing one link."""
        return _bytes_per_s(self.d2h_both_gbps)

    def memory_rate(self) -> Rate:
        """Return the bytes per second that kernels achieve in device memory, reads and writes both counted."""
        if self.memory_achieved_gbps is not None:
            return Rate(self.memory_achieved_gbps * 1e9, f"memory {self.memory_achieved_gbps:g} GB/s measured")
        share = achieved_fraction().memory
        return Rate(self.memory_gbps * share * 1e9, f"memory {self.memory_gbps:g} GB/s peak x {share:g} assumed achieved")

    def flop_rate(self, dtype: str) -> Rate:
        """Return the FLOP per second that large matrix products achieve.

        Args:
            dtype: ``bf16``, ``fp16``, ``fp32``, or torch's name for it, such as ``bfloat16``. TF32 is not
                assumed for fp32: torch leaves it off for matrix products.

        Raises:
            UsageError: the profile has no figure for the dtype.
        """
        short = _SHORT_DTYPE.get(dtype, dtype)
        found = self._flop_rate(short)
        if found is None and short == "fp16" and (bf16 := self._flop_rate("bf16")) is not None:
            # The vendor sheets of all cards listed with bf16 give the same for fp16.
            return Rate(bf16.per_s, f"{bf16.source}, taken for fp16 too")
        if found is None:
            has = [d for d in _DTYPES if self._flop_rate(d) is not None]
            raise UsageError(
                f"hardware profile {self.name} has no rate for {dtype}",
                why=f"no source was found for it; it has {', '.join(has) or 'none'}",
                try_=f"another dtype, --hardware auto on the device, or a profile file with {short}_tflops",
            )
        return found

    def _flop_rate(self, short: str) -> Rate | None:
        if short not in _DTYPES:
            return None
        achieved: float | None = getattr(self, f"{short}_achieved_tflops")
        if achieved is not None:
            return Rate(achieved * 1e12, f"{short} {achieved:g} TFLOP/s measured")
        peak: float | None = getattr(self, f"{short}_tflops")
        if peak is None:
            return None
        share = achieved_fraction().matmul
        return Rate(peak * share * 1e12, f"{short} {peak:g} TFLOP/s peak x {share:g} assumed achieved")


class _Device(HardwareProfile):
    name: str = ""  # the key in the table


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    about: str
    achieved_fraction: AchievedFraction
    devices: dict[str, _Device]
    links: dict[str, Figure]
    links_source: str


@cache
def _table() -> _Table:
    return _Table.model_validate_json((resources.files("actsolve.cost") / "hardware.json").read_text(encoding="utf-8"))


def achieved_fraction() -> AchievedFraction:
    """Return the share of peak that is assumed where no achieved rate was measured."""
    return _table().achieved_fraction


def link_bytes_per_s() -> dict[str, float]:
    """Return one-way speeds of common host links, such as ``pcie4-x16``, and of an NVMe drive."""
    return {name: gbps * 1e9 for name, gbps in _table().links.items()}


@cache
def profiles() -> dict[str, HardwareProfile]:
    """Return every profile of the table by its name, in the table's order."""
    return {name: HardwareProfile(**{**row.model_dump(), "name": name}) for name, row in _table().devices.items()}


def profile(name: str) -> HardwareProfile:
    """Return the profile called ``name``, or read from the file of that name.

    Args:
        name: A name of the table, a short form such as ``a100`` or ``4090``, in any case, or the path of
            a ``.json`` file with the fields of `HardwareProfile`, for a device that is not listed or for
            a figure that the table lacks.

    Raises:
        UsageError: no such profile; the message lists those nearest and all.
        FileFormatError: the file cannot be read as a profile.
    """
    if name.endswith(".json"):
        return _read_profile(Path(name))
    by_name = profiles()
    known = {alias: p for p in by_name.values() for alias in (p.name, *p.aliases)}
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in known:
        return known[key]
    near = list(dict.fromkeys(known[k].name for k in difflib.get_close_matches(key, known, n=5, cutoff=0.5)))
    raise UsageError(
        f"no hardware profile is called {name!r}",
        why=f"known: {', '.join(by_name)}",
        try_=(f"{' or '.join(near)}; " if near else "") + "auto to measure here; or the path of a .json profile",
    )


def _read_profile(path: Path) -> HardwareProfile:
    try:
        return HardwareProfile.model_validate_json(read_text(path, what="hardware profile"))
    except FileFormatError as error:
        raise FileFormatError("cannot read hardware profile", where=error.where, why=error.why, try_=error.try_) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise FileFormatError(f"{shown(path)} is no hardware profile", where=shown(field), why=shown(first["msg"])) from error


def _bytes_per_s(gbps: float | None) -> float | None:
    return None if gbps is None else gbps * 1e9
