"""Plans run with one thing broken: what makes offloading slow in practice, one cause at a time.

Every switch computes bit for bit the same. `Switch.timeline` says what it should cost, and a run what it does cost; together
they are ground truth for a diagnosis of slow offloading. A switch may take memory at other times than the plan, so that the
peak may be over the budget.

Source:
    Causes as users report them: copies that the computation waits for, copies out that start late, copies back on demand,
    host memory that is not pinned, and a link that is slower than it should be (PCIe lanes or a shared switch).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType

import torch

from actsolve.experiments import blocking, late_out, on_demand, synchronous
from actsolve.graph import Graph
from actsolve.links import Links
from actsolve.planned import Planned
from actsolve.runtime.copy_engine import CopyOptions
from actsolve.schedule import Schedule
from actsolve.simulate import Timeline, simulate

_STAGED_BYTES = 16 << 20


@dataclass(frozen=True)
class Switch:
    """One way to break how a plan runs.

    Attributes:
        about: What is broken, for people.
        steps: The steps to run in place of the plan's.
        options: How copies run.
        staged: Whether each copy passes through one more buffer of the host.
    """

    about: str
    steps: Callable[[Graph, Schedule], Schedule] = lambda _, schedule: schedule
    options: CopyOptions = field(default_factory=CopyOptions)
    staged: bool = False

    def schedule(self, planned: Planned) -> Schedule:
        """Return the steps that are run."""
        return planned.schedule if self.staged else self.steps(planned.graph, planned.schedule)  # what is staged waits by itself

    def timeline(self, planned: Planned, staging_bytes_per_s: float | None = None) -> Timeline:
        """Return what the plan should do with this broken.

        Args:
            planned: The plan.
            staging_bytes_per_s: How fast the host copies into that buffer; measured here if left out.
        """
        links = planned.problem.links
        if links is not None:
            links = links.scaled(self.options.speed)
            if self.staged:
                links = _behind(links, staging_bytes_per_s or host_copy_bytes_per_s())
        return simulate(replace(planned.problem, links=links), self.steps(planned.graph, planned.schedule))


SWITCHES: Mapping[str, Switch] = MappingProxyType(
    {
        "synchronous": Switch("each copy is waited for as soon as it is queued", synchronous),
        "late_out": Switch("copies out begin at the end of the forward", late_out),
        "on_demand": Switch("copies back begin where the value is read", on_demand),
        "pageable": Switch("host memory is not pinned", blocking, CopyOptions(pageable=True), staged=True),
        "half_speed": Switch("the link has half of its speed", options=CopyOptions(speed=0.5)),
    }
)


def host_copy_bytes_per_s() -> float:
    """Return how fast one thread copies host memory here."""
    source, target = torch.ones(_STAGED_BYTES, dtype=torch.uint8), torch.ones(_STAGED_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return _STAGED_BYTES / median(seconds)


def _behind(links: Links, bytes_per_s: float) -> Links:
    """Return the speeds of copies that cross the link and then are copied once more, one after the other."""
    out, back = (1 / (1 / speed + 1 / bytes_per_s) for speed in (links.d2h, links.h2d))
    return Links(out, back, out, back)
