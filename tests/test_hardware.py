"""The profile table: names, derived figures, and what is asked for rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actsolve.cost.hardware import HardwareProfile, achieved_fraction, link_bytes_per_s, profile, profiles
from actsolve.errors import FileFormatError, UsageError


def test_every_row_has_a_source_and_a_memory_rate() -> None:
    assert len(profiles()) == 12
    for name, device in profiles().items():
        assert device.name == name
        assert device.source
        assert device.memory_rate().per_s <= device.memory_gbps * 1e9


@pytest.mark.parametrize(
    ("alias", "name"),
    [("a100", "a100-sxm-80gb"), ("H100", "h100-sxm"), ("4090", "rtx-4090"), ("rtx_4090", "rtx-4090"), ("v100", "v100-sxm")],
)
def test_aliases(alias: str, name: str) -> None:
    assert profile(alias).name == name


def test_no_alias_names_two_devices() -> None:
    names = [n for device in profiles().values() for n in (device.name, *device.aliases)]
    assert len(set(names)) == len(names)


def test_unknown_name_lists_the_nearest_and_all() -> None:
    with pytest.raises(UsageError) as caught:
        profile("rtx-409")
    assert str(caught.value) == (
        "UsageError: no hardware profile is called 'rtx-409'\n"
        "  why    known: a100-sxm-80gb, a100-pcie-80gb, h100-sxm, h200, gh200-96gb, gb200, rtx-4090, rtx-3090, rtx-5090, "
        "l4, t4, v100-sxm\n"
        "  try    rtx-4090 or rtx-5090 or rtx-3090; auto to measure here; or the path of a .json profile"
    )


def test_measured_rate_is_taken_as_it_is() -> None:
    rate = profile("a100").flop_rate("bfloat16")
    assert (rate.per_s, rate.source) == (271e12, "bf16 271 TFLOP/s measured")


def test_rate_derived_from_the_peak_says_so() -> None:
    rate = profile("l4").flop_rate("bf16")
    assert rate.per_s == pytest.approx(121e12 * achieved_fraction().matmul)
    assert rate.source == "bf16 121 TFLOP/s peak x 0.8 assumed achieved"


def test_fp16_runs_at_the_rate_of_bf16_and_says_so() -> None:
    rate = profile("a100").flop_rate("float16")
    assert (rate.per_s, rate.source) == (271e12, "bf16 271 TFLOP/s measured, taken for fp16 too")
    assert profile("t4").flop_rate("float16").per_s == pytest.approx(65e12 * 0.8)


@pytest.mark.parametrize(("name", "dtype"), [("t4", "bfloat16"), ("rtx-5090", "float32"), ("a100", "float64")])
def test_missing_rate_is_asked_for(name: str, dtype: str) -> None:
    with pytest.raises(UsageError, match="has no rate for"):
        profile(name).flop_rate(dtype)


def test_missing_link_is_none() -> None:
    assert profile("h200").h2d_bytes_per_s is None
    a100 = profile("a100")
    assert (a100.h2d_bytes_per_s, a100.d2h_bytes_per_s) == (24.8e9, 25e9)
    assert (a100.h2d_both_bytes_per_s, a100.d2h_both_bytes_per_s) == (11e9, 24e9)
    assert link_bytes_per_s()["pcie4-x16"] == 25e9


def test_memory_bytes() -> None:
    assert profile("h200").memory_bytes == 141 * 10**9


def test_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    row = profile("rtx-5090").model_dump() | {"name": "mine", "fp32_tflops": 104.8, "source": "my own runs"}
    path.write_text(json.dumps(row))
    mine = profile(str(path))
    assert mine.flop_rate("float32").per_s == pytest.approx(104.8e12 * 0.8)
    assert HardwareProfile.model_validate_json(mine.model_dump_json()) == mine


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": "x", "memory_gb": NaN, "memory_gbps": 1, "source": ""}',
        '{"name": "x", "memory_gb": -1, "memory_gbps": 1, "source": ""}',
        '{"name": "x", "memory_gb": 1, "memory_gbps": 1e300, "source": ""}',
        '{"name": "x", "memory_gb": 1, "memory_gbps": 1, "source": "", "typo": 1}',
    ],
)
def test_hostile_profile_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FileFormatError):
        profile(str(path))


def test_missing_profile_file() -> None:
    with pytest.raises(FileFormatError, match="cannot read hardware profile"):
        profile("/nowhere/at/all.json")
