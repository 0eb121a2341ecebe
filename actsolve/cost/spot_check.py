"""Whether what was measured before still holds.

Figures from a machine that was busy all the while do not scatter, so that nothing else tells them from good ones: a step's came
to 4 times what it takes on the same machine left alone. So a few of those that count most are measured again, but those of the
last hour: a second run is to find what the first has measured, and the plan that was made with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from heapq import nlargest

from actsolve.cost.measured_cache import Measured

logger = logging.getLogger(__name__)

_SAMPLES = 3
_AT_LEAST_S, _AT_MOST_S = 1e-4, 0.2  # of a sample: what is shorter is noise, what is longer would keep the user waiting
_TOO_LONG = 2.0  # times as long as now, each of the samples


def still_true(
    known: Mapping[str, Measured], n_runs: Mapping[str, int], time_of: Callable[[str], float | None]
) -> dict[str, Measured]:
    """Return what is known, without the figures of this step if they were measured on a machine much slower than it is now.

    Args:
        known: By signature.
        n_runs: How often each of the step's signatures runs in it.
        time_of: What a signature's op takes now, in seconds, if it can be told.
    """
    old = [s for s in n_runs if s in known and not known[s].is_recent]
    fit = [s for s in old if _AT_LEAST_S <= known[s].seconds <= _AT_MOST_S]
    samples = nlargest(_SAMPLES, fit, key=lambda s: n_runs[s] * known[s].seconds)
    times = {s: seconds for s in samples if (seconds := time_of(s))}
    slower = min((known[s].seconds / seconds for s, seconds in times.items()), default=1.0)
    if slower <= _TOO_LONG:
        return dict(known)
    logger.info("ops take %.1f times less than when they were measured, and are measured again", slower)
    return {s: figures for s, figures in known.items() if s not in n_runs}
