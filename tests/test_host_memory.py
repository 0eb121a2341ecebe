"""What the host can still give: the machine, and control groups of both versions, from files made for this."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actsolve.errors import UsageError
from actsolve.runtime import host_memory
from actsolve.runtime.host_memory import available_host_bytes, new_host_memory

GB = 1 << 30


class Host:
    """A machine of 8 GiB available memory, and its files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: {16 * GB // 1024} kB\nMemAvailable: {8 * GB // 1024} kB\n", root)
        self.root = root

    def write(self, path: str, text: str, root: Path | None = None) -> None:
        file = (root or self.root) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, version: int, limit: str, used: int, cache: int = 0) -> None:
        limit_file, usage_file, name = host_memory._V2 if version == 2 else host_memory._V1
        self.write(f"cgroup/{path}/{limit_file}", f"{limit}\n")
        self.write(f"cgroup/{path}/{usage_file}", f"{used}\n")
        self.write(f"cgroup/{path}/memory.stat", f"anon 5\n{name} {cache}\n")

    @property
    def available(self) -> int:
        return available_host_bytes(self.proc, self.cgroups)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_without_groups_it_is_what_the_machine_has(host: Host) -> None:
    assert host.available == 8 * GB


@pytest.mark.parametrize(("version", "line", "root"), [(2, "0::/a/b", ""), (1, "9:cpu,memory:/a/b", "memory")])
def test_the_tightest_group_on_the_way_up_counts(host: Host, version: int, line: str, root: str) -> None:
    host.write("proc/self/cgroup", f"1:cpuset:/elsewhere\n{line}\n")
    host.group(f"{root}/a/b", version, str(6 * GB), GB, cache=GB // 2)
    assert host.available == 6 * GB - GB + GB // 2
    host.group(f"{root}/a", version, str(4 * GB), 2 * GB)
    assert host.available == 2 * GB
    host.group(f"{root}/a", version, str(GB), 2 * GB)
    assert host.available == 0, "never less"


def test_in_a_container_the_group_is_at_the_root_of_the_mount(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/docker/4f5e\n")
    host.group("", 2, str(3 * GB), GB)
    assert host.available == 2 * GB


def test_no_limit_is_none(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/a\n")
    host.group("a", 2, "max", GB)
    assert host.available == 8 * GB


def test_without_meminfo_it_is_all_memory(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path, tmp_path) > 1 << 20


def test_this_machine_has_some() -> None:
    assert 1 << 20 < available_host_bytes() < 1 << 50


def test_new_memory_begins_with_a_page_and_is_writable() -> None:
    memory = new_host_memory(5000)
    assert memory.nbytes == 5000 and memory.dtype == np.uint8 and memory.ctypes.data % 4096 == 0
    memory[:] = 7


def test_what_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2 * GB)
    with pytest.raises(UsageError) as error:
        new_host_memory(3 * GB)
    assert str(error.value) == (
        "UsageError: 3.00 GiB of host memory are needed for what is offloaded\n"
        "  why    2.00 GiB (2147483648 bytes) are available\n"
        "  try    a host budget of at most 2.00 GiB"
    )
