"""The optimal persistent plan of a chain of unequal stages, by dynamic programming over its stretches and the memory left.

Source:
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Optimal checkpointing for heterogeneous chains: how to train deep neural
    networks with limited memory, arXiv 1911.13214, 2019 (rotor). Its stages are modules in a Sequential, ours stretches of
    the graph (`chain`); values that skip stages are kept throughout, where it cannot have any. Its memory is rounded up to
    slots, and it holds what the exact schedule may free, so the exact simulator looks for the most memory that may be told
    to the program.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from actsolve.plan import Plan, Status
from actsolve.planners.best import Rank, rank
from actsolve.planners.chain import Chain, Event, chain_of
from actsolve.planners.chain_memory import ChainMemory, chain_memory
from actsolve.planners.keep_all import pins_note
from actsolve.planners.options import PlannerOptions
from actsolve.problem import Problem
from actsolve.replays import saved_by
from actsolve.simulate import timeline_of

_SLOTS = 800
_BEYOND = 1.5  # times the budget: what the program may be told at most
_TRIED = 8  # numbers of slots, where none is known to fit, and beyond the most that do
_ONLY_ONE = 0  # a choice: keep all that the first stage saves; else the stage before which to keep no more than its input


def rotor(problem: Problem, options: PlannerOptions | None = None) -> Plan:
    """Return the plan of the most memory, told to the dynamic program, that fits in truth; else the one of lowest peak."""
    chain = chain_of(problem)
    if chain.n_stages < 2:
        return Plan("rotor", status=Status.UNKNOWN, note="the forward is no chain")
    memory = chain_memory(problem, chain)
    room = max(_BEYOND * (problem.dynamic_budget_bytes - memory.kept_bytes), memory.least_bytes)
    table = _Table(memory, min(room, memory.most_bytes))
    if table.least_slots() is None:  # far from what fits: the plan of lowest peak
        table = _Table(memory, memory.most_bytes)
    least = table.least_slots()
    if least is None:
        return Plan("rotor", status=Status.UNKNOWN, note="its dynamic program finds no plan")
    found: dict[int, tuple[Rank, Plan]] = {}

    def fits(slots: int) -> bool:
        plan = _plan(problem, chain, table, slots)
        found[slots] = rank(timeline_of(problem, plan)), plan
        return not found[slots][0][0]

    _search(fits, least)
    return min(found.values(), key=lambda pair: pair[0])[1]


def _search(fits: Callable[[int], bool], low: int) -> None:
    """Ask whether the plan of so many slots fits, up to about the most that do. What fits need not be monotone."""
    high = _SLOTS
    if fits(high):
        return
    if not fits(low):
        step = max(1, (high - low) // _TRIED)
        low = next((slots for slots in range(low + step, high, step) if fits(slots)), high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    for slots in range(high + 1, min(_SLOTS, high + _TRIED)):
        fits(slots)


def _plan(problem: Problem, chain: Chain, table: _Table, slots: int) -> Plan:
    replays = chain.replays(table.events(slots))
    skipping = sum(bool(chain.graph.forward_readers[v]) and v not in chain.graph.held for v in chain.kept)
    notes = [f"stages: {chain.n_stages}", f"values that skip stages, kept: {skipping}" if skipping else "", pins_note(problem)]
    return Plan("rotor", saved_by(problem.graph, replays), replays=replays, note="; ".join(n for n in notes if n))


class _Table:
    """The least seconds of forward runs of every stretch of stages in every number of slots of memory, and how.

    The input of a stretch, and the gradient of its output, are there and do not count.
    """

    def __init__(self, memory: ChainMemory, room_bytes: float) -> None:
        self.n = memory.n_stages
        self.slot_bytes = max(1.0, room_bytes / _SLOTS)
        n, shape = self.n, (self.n, self.n, _SLOTS + 1)
        self.least: npt.NDArray[np.float32] = np.full(shape, np.inf, dtype=np.float32)  # [first, last, slots]
        self.behind: npt.NDArray[np.float32] = np.full(shape, np.inf, dtype=np.float32)  # [last, first, slots + its input]
        self.choice: npt.NDArray[np.int16] = np.full(shape, _ONLY_ONE, dtype=np.int16)
        self.saved = self._slots(memory.saved_bytes)
        self.border = self._slots(memory.border_bytes)
        self.seconds = np.concatenate([[0.0], np.cumsum(memory.seconds)])
        for length in range(n):
            for first in range(n - length):
                self._fill(memory, first, first + length)

    def _slots(self, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        rounded: npt.NDArray[np.int64] = np.minimum(np.ceil(sizes / self.slot_bytes), _SLOTS + 1).astype(np.int64)
        return rounded

    def _fill(self, memory: ChainMemory, first: int, last: int) -> None:
        """Keep all of the first stage, and go on; or keep only the input of a later stage, and return to the stages before."""
        least = self.least[first, last]
        once = self.seconds[first + 1] - self.seconds[first]
        need = memory.saving_bytes(first, last)
        start = int(self._slots(np.array([need]))[0])
        if first == last:
            least[start:] = memory.again_seconds[first]
        else:
            shift = int(self.saved[first])
            least[shift:] = self.least[first + 1, last, : _SLOTS + 1 - shift] + once
            least[:start] = np.inf
            splits = self.behind[last, first + 1 : last + 1] + self.least[first, first:last]
            splits += (self.seconds[first + 1 : last + 1] - self.seconds[first]).astype(np.float32)[:, None]
            needs = self._slots(memory.passing_bytes[first, first:last] + memory.gradient_bytes[last])
            splits[np.arange(_SLOTS + 1)[None, :] < needs[:, None]] = np.inf
            best = np.argmin(splits, axis=0)
            split = splits[best, np.arange(_SLOTS + 1)]
            better = split < least
            least[better] = split[better]
            self.choice[first, last, better] = best[better] + first + 1
        if first > 0:
            shift = int(self.border[first - 1])
            self.behind[last, first, shift:] = least[: _SLOTS + 1 - shift]

    def least_slots(self) -> int | None:
        """Return with how few slots there is a plan at all."""
        possible = np.isfinite(self.least[0, self.n - 1])
        return int(np.argmax(possible)) if possible.any() else None

    def events(self, slots: int) -> list[Event]:
        """Return forward runs and backwards of stages in order, within ``slots``."""
        events: list[Event] = []
        stack: list[tuple[int, int, int]] = [(0, self.n - 1, slots)]
        while stack:
            first, last, room = stack.pop()
            if last < first:
                events.append((False, first))
                continue
            later = int(self.choice[first, last, room])
            if later == _ONLY_ONE:
                events.append((True, first))
                stack.append((first, first - 1, 0))  # its backward
                if last > first:
                    stack.append((first + 1, last, room - int(self.saved[first])))
                continue
            events += [(True, stage) for stage in range(first, later)]
            stack += [(first, later - 1, room), (later, last, room - int(self.border[later - 1]))]
        return events
