"""Keeps the needs of a job's ranks where a machine has devices of several kinds: the name of each one's device, and bytes on it.

Such a job's ``need_device_kind`` is ``NAMED``, so claims of machines with devices of one kind pass it over without reading more.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from optimizer.base.units import format_bytes

NAMED: Final = "named"


class RankNeed(NamedTuple):
    """A rank's device."""

    device: str
    num_bytes: int


class Holding(Protocol):
    """A device that may be taken."""

    @property
    def place(self) -> int: ...
    @property
    def name(self) -> str: ...


def write_needs(needs: Sequence[RankNeed]) -> str:
    """One text for equal needs, by which claims find the jobs that have them."""
    return json.dumps(needs) if needs else ""


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
        name, num_bytes = needs[rank]
        fitting = (each.place for each in devices if each.name == name and free_bytes[each.place] >= num_bytes)
        place = next((place for place in fitting if place not in places.values()), None)
        if place is None:
            return None
        places[rank] = place
    return tuple(places[rank] for rank in range(len(needs)))


def describe_needs(needs: Sequence[RankNeed]) -> str:
    """``2x RTX 3060 with 5.0 GiB and RTX 4090 with 9.0 GiB``."""
    most = {name: max(need.num_bytes for need in needs if need.device == name) for name, _ in needs}
    counts = Counter(name for name, _ in needs)
    parts = [
        f"{f'{count}x ' if count > 1 else ''}{name} with {format_bytes(most[name])}" for name, count in counts.items()
    ]
    return " and ".join(parts)
