"""Functions that remember what they have returned (`functools.lru_cache`): what a trace leaves there nobody else may find."""

from __future__ import annotations

import functools
import gc
from typing import Any

from actsolve.capture.torch_internals import is_of_trace

_DEPTH = 4  # a result in its entry of the cache, in a tuple, in another


def forget_traced_results() -> None:
    """Let functions compute anew what they remember as tensors of a trace. By contract that is the same again.

    Looks at all that the garbage collector tracks, as `leaked_tensors` does: not at what `gc.freeze` has set aside.
    """
    for function in [f for f in gc.get_objects() if type(f) is functools._lru_cache_wrapper]:
        if function.cache_info().currsize and _holds_traced(function, _DEPTH):
            function.cache_clear()


def _holds_traced(holder: Any, depth: int) -> bool:
    wrapped = getattr(holder, "__wrapped__", None)
    for held in gc.get_referents(holder):
        if is_of_trace(held) or (depth and _is_entry(held) and held is not wrapped and _holds_traced(held, depth - 1)):
            return True
    return False


def _is_entry(value: Any) -> bool:
    return isinstance(value, (tuple, list, dict)) or type(value).__name__ == "_lru_list_elem"
