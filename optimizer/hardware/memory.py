"""Memory that this process may still take: the machine's, or its control group's where that is less.

Linux only; elsewhere the answer is what the operating system calls physical memory. Reads /proc and /sys, no
subprocess.
"""

import os
from pathlib import Path

_UNLIMITED_BYTES = 2**60
"""Control groups of version 1 write 'no limit' as a number near 2**63."""


def available_memory_bytes(*, root: Path = Path("/")) -> int:
    """Bytes that can be allocated before the kernel swaps or kills: the least of MemAvailable and each control group's rest."""
    limits = [_available_in_meminfo(root / "proc/meminfo"), *_left_in_control_groups(root)]
    return max(0, min(limits))


def _available_in_meminfo(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_control_groups(root: Path) -> list[int]:
    """The rest of every group that holds this process, from its own up to the top; both versions' layouts."""
    rests = []
    for folder in _control_group_folders(root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and limit < _UNLIMITED_BYTES:
                rests.append(limit - (usage or 0) + _reclaimable_bytes(folder))
    return rests


def _control_group_folders(root: Path) -> list[Path]:
    mounts = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory")
    folders = list(mounts)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        own = line.split(":", 2)[-1].strip("/")
        while own:
            folders.extend(mount / own for mount in mounts)
            own = own.rpartition("/")[0]
    return list(dict.fromkeys(folders))


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that the kernel gives back before it kills; counted as usage, so it is added to the rest."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(stats.get("inactive_file", stats.get("total_inactive_file", 0)))


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
