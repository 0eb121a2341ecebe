"""The link of a CUDA device, measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actsolve.cost.measure_links import measure_links
from actsolve.cost.measured_cache import MeasuredCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_cuda_link_is_measured(tmp_path: Path) -> None:
    found = measure_links(torch.device("cuda"), cache=MeasuredCache("test", tmp_path))
    pinned = found.pinned
    print(found)
    assert pinned.d2h > 1e9 and pinned.h2d > 1e9
    assert pinned.d2h > 0.8 * found.pageable.d2h and pinned.h2d > 0.8 * found.pageable.h2d
    assert pinned.d2h_both is not None and 0.1 * pinned.d2h < pinned.d2h_both <= pinned.d2h
