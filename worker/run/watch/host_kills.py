"""Finds out whether the host's out-of-memory killer ended a process, from outside it: a killed one says nothing.

The kernel counts its kills: of a control group in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1), of the
whole machine in ``/proc/vmstat`` (Linux 4.13 and later). A count that grew while a process ran that then ended by SIGKILL, which
nobody here had sent, is the evidence. The machine's count is the weakest: the killed process may have been another's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_COUNT = "oom_kill"


@dataclass(frozen=True, kw_only=True)
class KillCount:
    """A file with a line ``oom_kill NUMBER``."""

    file: Path
    of: str
    """The group that it counts for, in words."""

    def read(self) -> int | None:
        """None where the file or the line is not there."""
        try:
            lines = self.file.read_text().splitlines()
        except OSError:
            return None
        found = [line.split() for line in lines]
        return next((int(words[1]) for words in found if len(words) == 2 and words[0] == _COUNT), None)


def known_counts() -> tuple[KillCount, ...]:
    """This process's control group, which its children share, and the machine; the nearest first."""
    counts = [KillCount(file=file, of="the worker's control group") for file in _group_files()]
    return (*counts, KillCount(file=Path("/proc/vmstat"), of="the machine"))


class HostKills:
    """The counts as they were when an attempt began."""

    def __init__(self, counts: Iterable[KillCount] | None = None) -> None:
        self._before = [(count, count.read()) for count in (known_counts() if counts is None else counts)]

    def find(self) -> str:
        """The group in which the kernel has counted a kill since; empty where it has not."""
        for count, before in self._before:
            now = count.read()
            if now is not None and before is not None and now > before:
                return count.of
        return ""


def killed_by_host(killed_in: str, *, last_step: Mapping[str, Any]) -> dict[str, Any]:
    """The result of an attempt that the killer ended. last_step: record of the last step that was counted, with whose sizes: the
    killed process left no others.
    """
    step = int(last_step.get("step", 0))
    message = f"The host ran out of memory and ended the job's process after step {step}; the kernel counted it in {killed_in}"
    fields = {
        "tier": "host",
        "cause": "host_killed",
        "stage": "steady_step" if step else "",
        "bytes_by_category": last_step.get("device_bytes", {}),
        "host_bytes": last_step.get("host_bytes"),
        "moment": f"after step {step}",
    }
    hint = "Close other programs on the machine, or lower the budgets of device and host together."
    error = {"code": "out_of_host_memory", "message": message, "hint": hint, "fields": fields}
    return {"outcome": "failed", "reason": "out_of_host_memory", "message": message, "error": error, "step": step}


def _group_files() -> list[Path]:
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.removeprefix("/")
        if not controllers:
            files += [mount / below / "memory.events" for mount in (_MOUNT, _MOUNT / "unified")]
        elif "memory" in controllers.split(","):
            files.append(_MOUNT / "memory" / below / "memory.oom_control")
    return files
