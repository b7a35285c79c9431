"""The memory that may be allocated is the least of the machine's and the control group's."""

from pathlib import Path
from typing import Any

import pytest

from optimizer.hardware.memory import available_memory_bytes

GIB = 1024**3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n")
    return tmp_path


def write_group(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_limit_it_is_what_the_kernel_calls_available(root: Path) -> None:
    write_group(root / "sys/fs/cgroup", memory__max="max", memory__current=GIB)
    assert available_memory_bytes(root=root) == 16 * GIB


def test_a_containers_limit_counts_less_what_it_uses(root: Path) -> None:
    write_group(root / "sys/fs/cgroup", memory__max=4 * GIB, memory__current=GIB)
    assert available_memory_bytes(root=root) == 3 * GIB


def test_page_cache_that_can_be_dropped_is_not_in_use(root: Path) -> None:
    group = root / "sys/fs/cgroup"
    write_group(group, memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"anon 5\ninactive_file {2 * GIB}")
    assert available_memory_bytes(root=root) == 3 * GIB


def test_the_tightest_group_above_the_process_counts(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/jobs/job-1\n")
    write_group(root / "sys/fs/cgroup/jobs", memory__max=2 * GIB, memory__current=0)
    write_group(root / "sys/fs/cgroup/jobs/job-1", memory__max=8 * GIB, memory__current=0)
    assert available_memory_bytes(root=root) == 2 * GIB


def test_version_one_groups_are_read_too(root: Path) -> None:
    folder = root / "sys/fs/cgroup/memory"
    write_group(folder, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert available_memory_bytes(root=root) == GIB


def test_version_one_writes_no_limit_as_a_huge_number(root: Path) -> None:
    folder = root / "sys/fs/cgroup/memory"
    write_group(folder, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert available_memory_bytes(root=root) == 16 * GIB


def test_it_is_never_negative(root: Path) -> None:
    write_group(root / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert available_memory_bytes(root=root) == 0


def test_this_machine_has_some() -> None:
    assert available_memory_bytes() > 64 * 1024**2
