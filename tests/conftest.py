"""That this file is here puts tests/ on the path of the tests in folders below it, which share its helpers."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_looked_at_again() -> None:
    """Measuring memory collects garbage first: half a second each where all that torch and other tests left is searched."""
    gc.collect()
    gc.freeze()
