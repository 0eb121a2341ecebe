"""That this file is here puts tests/ on the path of the tests in folders below it, which share its helpers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _every_plan_is_searched_for() -> Iterator[None]:
    """What a test plans neither comes from the user's cache nor goes there: it may be a made-up planner's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTSOLVE_PLAN_CACHE", "off")
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_looked_at_again() -> None:
    """Measuring memory collects garbage first: half a second each where all that torch and other tests left is searched."""
    gc.collect()
    gc.freeze()
