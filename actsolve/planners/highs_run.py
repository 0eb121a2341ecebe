"""HiGHS in a thread: Ctrl-C reaches us, it prints nothing, and where it no longer looks at its clock it is left behind.

Strengthening one row in the presolve of a sub-MIP has taken HiGHS 1.16 more than a quarter of an hour, without a look at the time
limit or at a request to stop. Nothing ends such a thread from outside; the best solution and bound that it has told are taken,
and it goes on, and holds its solver, until the process ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from actsolve.planners.options import Progress

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class SilentHighs(highspy.Highs):
    """HiGHS that does not print its banner on stdout when it is created."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


@dataclass
class HighsRun:
    """How a run went.

    Attributes:
        interrupted: Whether the user stopped it (Ctrl-C).
        left_behind: Whether it was given up, and its object must not be touched again.
        x: The last solution that it told; only looked at where it can be given up.
        objective: Of that solution.
        bound: The last dual bound that it told.
    """

    interrupted: bool = False
    left_behind: bool = False
    x: npt.NDArray[np.float64] | None = None
    objective: float | None = None
    bound: float | None = None


def run_highs(
    highs: Any,
    progress: Progress | None = None,
    ends: Callable[[float | None, float | None], bool] | None = None,
    give_up_s: float = math.inf,
) -> HighsRun:
    """Run the solver until it ends.

    Args:
        highs: A `SilentHighs` with a model and options.
        progress: Called with (elapsed_s, incumbent, bound), in units of the objective.
        ends: Called now and then with the incumbent and the bound; whether to stop.
        give_up_s: After so many seconds it is asked to stop, and left behind if it has not half as long after.
    """
    run, latest = HighsRun(), list[tuple[float, float, float]]()
    highs.cbMipInterrupt += lambda event: latest.append(
        (event.data_out.running_time, event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)
    )

    def keep(event: Any) -> None:
        run.x = np.array(event.data_out.mip_solution, dtype=np.float64)
        run.objective = event.data_out.objective_function_value

    if give_up_s < math.inf:
        highs.cbMipImprovingSolution += keep
    highs.HandleUserInterrupt = True
    begin = time.perf_counter()
    highs.startSolve()
    while True:
        try:
            done, _ = highs.wait(_POLL_S)
            if latest:
                elapsed, incumbent, bound = latest[-1]
                latest.clear()
                run.bound = finite(bound)
                if progress is not None:
                    progress(elapsed, finite(incumbent), run.bound)
                if ends is not None and ends(finite(incumbent), run.bound):
                    highs.cancelSolve()
            if done:
                return run
            spent_s = time.perf_counter() - begin
            if spent_s > give_up_s:
                highs.cancelSolve()
            if spent_s > 1.5 * give_up_s:
                logger.warning("HiGHS did not stop when it was asked to, and is left behind")
                run.left_behind = True
                return run
        except KeyboardInterrupt:
            run.interrupted = True
            highs.cancelSolve()


def finite(bound: float) -> float | None:
    """Return ``bound``, or None for an infinite one."""
    return None if math.isinf(bound) else bound
