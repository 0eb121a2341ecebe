"""How fast copies between device and host are, alone and both at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Speeds of pinned copies between device and host, in bytes per second.

    On many cards the two directions slow each other (an A100's PCIe: 24 and 25 GB/s alone, 11 in beside 24 out). Where nothing
    is known of that, they share one link: while both run, each has half of its speed.

    Attributes:
        d2h: Device to host, while nothing comes in.
        h2d: Host to device, while nothing goes out.
        d2h_both: Device to host, beside a copy in. None: half of `d2h`.
        h2d_both: Host to device, beside a copy out. None: half of `h2d`.
    """

    d2h: float
    h2d: float
    d2h_both: float | None = None
    h2d_both: float | None = None

    def __post_init__(self) -> None:
        for name in ("d2h", "h2d", "d2h_both", "h2d_both"):
            speed = getattr(self, name)
            if speed is not None and not 0 < speed < float("inf"):
                raise ValueError(f"{name} is {speed} bytes per second")

    def out(self, *, beside: bool) -> float:
        """Bytes per second from device to host; ``beside`` a copy in or not."""
        return self.d2h if not beside else self.d2h / 2 if self.d2h_both is None else self.d2h_both

    def back(self, *, beside: bool) -> float:
        """Bytes per second from host to device; ``beside`` a copy out or not."""
        return self.h2d if not beside else self.h2d / 2 if self.h2d_both is None else self.h2d_both

    def scaled(self, share: float) -> Links:
        """Return the same link at ``share`` of its speed."""
        both = (None if speed is None else speed * share for speed in (self.d2h_both, self.h2d_both))
        return Links(self.d2h * share, self.h2d * share, *both)

    def least_s(self, out_bytes: float, back_bytes: float) -> float:
        """Return the least seconds in which so many bytes go out and come back.

        One direction ends first; until then both run beside each other, and then the other one alone.

        Source:
            DESIGN section 4, Links: the two rows of a slot, of which the later one counts.
        """
        out, back = self.out(beside=False), self.back(beside=False)
        out_both, back_both = self.out(beside=True), self.back(beside=True)
        return max(
            out_bytes / out + back_bytes * (1 - out_both / out) / back_both,
            back_bytes / back + out_bytes * (1 - back_both / back) / out_both,
        )
