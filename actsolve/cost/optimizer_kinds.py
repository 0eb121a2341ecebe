"""What the optimizers known by name keep and allocate, from the sizes of the parameters alone.

Per element of a parameter, in the parameter's dtype, as torch.optim keeps it; and per parameter one float32 step counter where
there is one. Temporaries are those of the default implementation: on a CPU a loop over the parameters in their order, whose
variables still hold a temporary of the parameter before; on CUDA the foreach one, which works on all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from actsolve.errors import UsageError
from actsolve.static_memory import OptimizerMemory


@dataclass(frozen=True)
class OptimizerKind:
    """Copies of a parameter that an optimizer takes.

    Attributes:
        state: Those that stay.
        loop: Those alive at once in the step, of the parameter at hand.
        carried: And of the parameter before it.
        foreach: Those alive at once of all parameters, where the step works on all at once.
        counts_steps: Whether there is a step counter.
    """

    state: int = 0
    loop: int = 0
    carried: int = 0
    foreach: int = 0
    counts_steps: bool = False


KINDS = {
    "none": OptimizerKind(),
    "sgd": OptimizerKind(),
    "sgd-momentum": OptimizerKind(1),
    "adam": OptimizerKind(2, 2, 1, 1, True),
    "adamw": OptimizerKind(2, 2, 1, 1, True),
    "adagrad": OptimizerKind(1, 1, 1, 1, True),
    "rmsprop": OptimizerKind(1, 1, 1, 1, True),
}
_STEP_BYTES = 4
_SCALAR_BYTES = 12  # Python numbers that kernels wrap in tensors beside the other temporaries


def optimizer_memory_of(name: str, sizes: Sequence[int], *, loops: bool) -> OptimizerMemory:
    """Return what the optimizer called ``name`` keeps and what its step allocates.

    Args:
        name: A name in `KINDS`, in any case.
        sizes: The bytes of each parameter that is trained.
        loops: Whether it works on one parameter after another, as on a CPU.

    Raises:
        UsageError: an unknown name.
    """
    kind = KINDS.get(name.lower())
    if kind is None:
        raise UsageError(f"no optimizer is called {name!r}", try_="one of " + ", ".join(KINDS) + ", or --static-bytes")
    if loops:
        temporary = max((kind.loop * size + kind.carried * before for before, size in pairwise([0, *sizes])), default=0)
    else:
        temporary = kind.foreach * sum(sizes)
    temporary += _SCALAR_BYTES if kind.state and sizes else 0
    state = kind.state * sum(sizes) + (_STEP_BYTES * len(sizes) if kind.counts_steps else 0)
    return OptimizerMemory(state, temporary, name.lower())
