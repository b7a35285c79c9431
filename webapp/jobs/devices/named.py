"""Keeps the needs of a job's ranks where its plan names their devices: each one's device, the bytes on it, and its machine.

On a machine with devices of several kinds the job's ``need_device_kind`` is ``NAMED``, over several machines ``JOINED``, so that
claims of machines with devices of one kind pass it over without reading more.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from optimizer.base.units import format_bytes

NAMED: Final = "named"
JOINED: Final = "joined"
AT: Final = "@"
"""Between the kind of a device and its machine, in plans over several machines. Processors have it in their names, so the last
one counts."""


class RankNeed(NamedTuple):
    """A rank's device."""

    device: str
    num_bytes: int
    machine: str = ""
    """Name of the machine that has it; empty where one machine has all."""


class Holding(Protocol):
    """A device that may be taken."""

    @property
    def place(self) -> int: ...
    @property
    def name(self) -> str: ...


def write_needs(needs: Sequence[RankNeed]) -> str:
    """One text for equal needs, by which claims find the jobs that have them."""
    return json.dumps([need if need.machine else need[:2] for need in needs]) if needs else ""


def read_needs(text: str) -> list[RankNeed]:
    return [RankNeed(*need) for need in json.loads(text)] if text else []


def assign(
    needs: Sequence[RankNeed], devices: Sequence[Holding], free_bytes: Mapping[int, int]
) -> tuple[int, ...] | None:
    """A place for each rank, in their order; None where one has none. devices: those taken first stand first.

    The largest need chooses first: whatever holds it holds the smaller ones of its kind as well, so no choice is in vain.
    """
    places: dict[int, int] = {}
    for rank in sorted(range(len(needs)), key=lambda rank: -needs[rank].num_bytes):
        name, num_bytes, _ = needs[rank]
        fitting = (each.place for each in devices if each.name == name and free_bytes[each.place] >= num_bytes)
        place = next((place for place in fitting if place not in places.values()), None)
        if place is None:
            return None
        places[rank] = place
    return tuple(places[rank] for rank in range(len(needs)))


def describe_needs(needs: Sequence[RankNeed]) -> str:
    """``2x RTX 3060 with 5.0 GiB and RTX 4090 of office with 9.0 GiB``."""
    most: dict[str, int] = {}
    for need in needs:
        most[_name(need)] = max(most.get(_name(need), 0), need.num_bytes)
    counts = Counter(map(_name, needs))
    parts = [
        f"{f'{count}x ' if count > 1 else ''}{name} with {format_bytes(most[name])}" for name, count in counts.items()
    ]
    return " and ".join(parts)


def _name(need: RankNeed) -> str:
    return f"{need.device} of {need.machine}" if need.machine else need.device
