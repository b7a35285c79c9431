"""All faults that a campaign draws from."""

from tests.chaos.faults import database, files, people, processes, redis
from tests.chaos.faults.fault import Fault, Missed, collect

ALL: tuple[Fault, ...] = collect(processes, redis, database, files, people)

__all__ = ["ALL", "Fault", "Missed"]
