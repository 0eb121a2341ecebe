"""How fast copies to and from the host are, from what the user says and what is known: without torch, and without measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actsolve.cost.hardware import profile
from actsolve.links import Links


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


@dataclass(frozen=True)
class Known:
    """What is known of a link without the user's word: bytes per second, None where nothing is."""

    d2h: float | None = None
    h2d: float | None = None
    d2h_both: float | None = None
    h2d_both: float | None = None
    source: str = ""
    missing: str = ""


def known_of_profile(name: str) -> Known:
    """Return what the hardware profile of that name says of its link."""
    found = profile(name)
    speeds = (found.d2h_bytes_per_s, found.h2d_bytes_per_s, found.d2h_both_bytes_per_s, found.h2d_both_bytes_per_s)
    missing = f"Nothing is offloaded: no link speed is known of {found.name}; --h2d and --d2h give it."
    return Known(*speeds, source=f"profile {found.name}", missing=missing)


def chosen_links(
    known: Callable[[], Known],
    *,
    h2d: float | None = None,
    d2h: float | None = None,
    host_budget_bytes: int | None = None,
    note: str = "",
    tells: bool = True,
) -> LinkSpeed:
    """Return the speeds of the link to plan for.

    What the user gives counts. Where one direction is given, the other is that of the hardware if it is known, and else the same;
    how the two slow each other is then not known, and they share one link (`Links`).

    Args:
        known: What is known of the hardware; asked for only where the user leaves something open.
        h2d: Bytes per second from host to device, if given.
        d2h: Bytes per second from device to host, if given.
        host_budget_bytes: Host memory for what is offloaded, if given. There is no link for 0 bytes of it.
        note: What a report has to say of a link that was given.
        tells: Whether to say why there is no link.
    """
    if host_budget_bytes == 0:
        return LinkSpeed(None, note="Nothing is offloaded: the host budget is 0.")
    if h2d is not None and d2h is not None:
        return LinkSpeed(Links(float(d2h), float(h2d)), "given", note)
    found = known()
    if d2h is not None or h2d is not None:
        other = found.d2h if d2h is None else found.h2d
        of_other = f"the other {found.source}" if other is not None else "the other taken to be equal"
        given = d2h if d2h is not None else h2d
        out, back = (speed or other or given for speed in (d2h, h2d))
        assert out is not None and back is not None
        return LinkSpeed(Links(float(out), float(back)), f"{'h2d' if d2h is None else 'd2h'} given, {of_other}", note)
    if found.d2h is not None and found.h2d is not None:
        return LinkSpeed(Links(found.d2h, found.h2d, found.d2h_both, found.h2d_both), found.source)
    return LinkSpeed(None, note=found.missing if tells else "")
