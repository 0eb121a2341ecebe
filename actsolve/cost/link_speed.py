"""How fast copies to and from the host are: as the user says, as a profile says, or as measured here."""

from __future__ import annotations

from functools import partial

import torch

from actsolve.cost.known_links import Known, LinkSpeed, chosen_links, known_of_profile
from actsolve.cost.measure_links import measure_links
from actsolve.runtime.host_memory import available_host_bytes

_HOST_SHARE = 0.8  # of what is available: the rest of the program, and other processes, take more as they run

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

    What the user gives counts (`chosen_links`).

    Args:
        hardware: ``auto``, or a profile's name.
        device: What ``auto`` stands for: a CUDA device is measured; a CPU has no link but the one that is given.
        h2d: Bytes per second from host to device, if given.
        d2h: Bytes per second from device to host, if given.
        host_budget_bytes: Host memory for what is offloaded, if given. There is no link for 0 bytes of it; who gives some is told
            why there is no link, on a CPU too.
    """
    note = EMULATED if hardware == "auto" and device.type != "cuda" else ""
    tells = host_budget_bytes is not None or hardware != "auto"
    known = partial(_known, hardware, device)
    return chosen_links(known, h2d=h2d, d2h=d2h, host_budget_bytes=host_budget_bytes, note=note, tells=tells)


def host_budget_of(hardware: str, given_bytes: int | None) -> int | None:
    """Return the cap on host memory for what is offloaded, or None for no cap.

    Args:
        hardware: ``auto`` where the plan is to run here; then 80% of the host memory that is available now is the cap.
        given_bytes: What the user says, which counts.
    """
    if given_bytes is not None or hardware != "auto":
        return given_bytes
    return int(_HOST_SHARE * available_host_bytes())


def _known(hardware: str, device: torch.device) -> Known:
    if hardware != "auto":
        return known_of_profile(hardware)
    if device.type != "cuda":
        return Known(missing="Nothing is offloaded: a CPU has no link to a device; --h2d and --d2h emulate one.")
    measured = measure_links(device)
    links = measured.pinned
    return Known(links.d2h, links.h2d, links.d2h_both, links.h2d_both, source=measured.source)
