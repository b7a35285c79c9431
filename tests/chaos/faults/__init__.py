"""All faults that a campaign draws from."""

from collections.abc import Sequence

from tests.chaos.faults import database, files, people, processes, redis
from tests.chaos.faults.fault import Fault, Missed, collect

ALL: tuple[Fault, ...] = collect(processes, redis, database, files, people)

__all__ = ["ALL", "Fault", "Missed", "find"]


def find(only: Sequence[str]) -> tuple[Fault, ...]:
    """The faults whose names have one of these parts; all without any. Raises ValueError for a part that no name has."""
    for part in only:
        if not any(part in fault.name for fault in ALL):
            raise ValueError(f"no fault is named {part!r}; there are: {', '.join(fault.name for fault in ALL)}")
    return tuple(fault for fault in ALL if not only or any(part in fault.name for part in only))
