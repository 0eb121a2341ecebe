"""How fast copies to and from the host are: as the user says, as a profile says, or as measured here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actsolve.cost.hardware import profile
from actsolve.cost.measure_links import measure_links
from actsolve.links import Links
from actsolve.runtime.host_memory import available_host_bytes

_HOST_SHARE = 0.8  # of what is available: the rest of the program, and other processes, take more as they run


@dataclass(frozen=True)
class LinkSpeed:
    """What is known of the link between device and host.

    Attributes:
        links: Its speeds; None: nothing is offloaded.
        source: Where they come from, for reports.
        note: What a report has to say besides, such as why nothing is offloaded.
    """

    links: Links | None
    source: str = ""
    note: str = ""


EMULATED = "This machine has no link to a device: copies are emulated at the planned speed, by threads that run beside the step."


def links_of(
    hardware: str,
    device: torch.device,
    *,
    h2d: float | None = None,
    d2h: float | None = None,
    host_budget_bytes: int | None = None,
) -> LinkSpeed:
    """Return the speeds of the link to plan for.

    What the user gives counts. Where one direction is given, the other is that of the hardware if it is known, and else the same;
    how the two slow each other is then not known, and they share one link (`Links`).

    Args:
        hardware: ``auto``, or a profile's name.
        device: What ``auto`` stands for: a CUDA device is measured; a CPU has no link but the one that is given.
        h2d: Bytes per second from host to device, if given.
        d2h: Bytes per second from device to host, if given.
        host_budget_bytes: Host memory for what is offloaded, if given. There is no link for 0 bytes of it; who gives some is told
            why there is no link, on a CPU too.
    """
    if host_budget_bytes == 0:
        return LinkSpeed(None, note="Nothing is offloaded: the host budget is 0.")
    note = EMULATED if hardware == "auto" and device.type != "cuda" else ""
    if h2d is not None and d2h is not None:
        return LinkSpeed(Links(float(d2h), float(h2d)), "given", note)
    known = _known(hardware, device)
    if d2h is not None or h2d is not None:
        other = known.d2h if d2h is None else known.h2d
        of_other = f"the other {known.source}" if other is not None else "the other taken to be equal"
        given = d2h if d2h is not None else h2d
        out, back = (speed or other or given for speed in (d2h, h2d))
        assert out is not None and back is not None
        return LinkSpeed(Links(float(out), float(back)), f"{'h2d' if d2h is None else 'd2h'} given, {of_other}", note)
    if known.d2h is not None and known.h2d is not None:
        return LinkSpeed(Links(known.d2h, known.h2d, known.d2h_both, known.h2d_both), known.source)
    return LinkSpeed(None, note=known.missing if host_budget_bytes is not None or hardware != "auto" else "")


def host_budget_of(hardware: str, given_bytes: int | None) -> int | None:
    """Return the cap on host memory for what is offloaded, or None for no cap.

    Args:
        hardware: ``auto`` where the plan is to run here; then 80% of the host memory that is available now is the cap.
        given_bytes: What the user says, which counts.
    """
    if given_bytes is not None or hardware != "auto":
        return given_bytes
    return int(_HOST_SHARE * available_host_bytes())


@dataclass(frozen=True)
class _Known:
    """What is known of a link without the user's word: bytes per second, None where nothing is."""

    d2h: float | None = None
    h2d: float | None = None
    d2h_both: float | None = None
    h2d_both: float | None = None
    source: str = ""
    missing: str = ""


def _known(hardware: str, device: torch.device) -> _Known:
    if hardware != "auto":
        found = profile(hardware)
        speeds = (found.d2h_bytes_per_s, found.h2d_bytes_per_s, found.d2h_both_bytes_per_s, found.h2d_both_bytes_per_s)
        missing = f"Nothing is offloaded: no link speed is known of {found.name}; --h2d and --d2h give it."
        return _Known(*speeds, source=f"profile {found.name}", missing=missing)
    if device.type != "cuda":
        return _Known(missing="Nothing is offloaded: a CPU has no link to a device; --h2d and --d2h emulate one.")
    measured = measure_links(device)
    links = measured.pinned
    return _Known(links.d2h, links.h2d, links.d2h_both, links.h2d_both, source=measured.source)
