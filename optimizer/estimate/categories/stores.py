"""Time that bytes take to and from the stores beyond the host: the disk's scratch file and the remote store. Torch-free."""

from collections.abc import Mapping
from typing import Final, Literal

from optimizer.base.categories import Link
from optimizer.formats.transfer_sizes import SLAB_BYTES
from optimizer.hardware.rates import Rates
from optimizer.profile.time_kinds import TimeKind

StorePlace = Literal["disk", "remote"]
ASSUMED_BYTES_PER_S: Final[Mapping[str, float]] = {"disk": 5e8, "remote": 1e8}
"""Rates assumed where they were not measured: a slow SSD, a link of one gigabit."""
STORE_LANES: Final[Mapping[str, Literal["disk", "network"]]] = {"disk": "disk", "remote": "network"}
STORE_LINKS: Final[Mapping[str, tuple[Link, Link]]] = {
    "disk": ("host_to_disk", "disk_to_host"),
    "remote": ("host_to_remote", "remote_to_host"),
}
"""Links by place, on the way out from the host and on the way back there."""


PLACE_WORDS: Final[Mapping[str, str]] = {"host": "on the host", "disk": "on the disk", "remote": "in the remote store"}


def read_ms(num_bytes: float, rates: Rates, *, place: str) -> float:
    """Time to read from a place; 0 where it is no store."""
    return num_bytes / _rate(rates, place, "read") * 1000 if place in STORE_LANES else 0.0


def write_ms(num_bytes: float, rates: Rates, *, place: str) -> float:
    """Time to write to a place; 0 where it is no store."""
    return num_bytes / _rate(rates, place, "write") * 1000 if place in STORE_LANES else 0.0


def reach_ms(num_bytes: float, rates: Rates, *, place: str) -> float:
    """Time that moving few bytes takes beyond their rate: a round trip, less the share of one that a rate measured of
    staging buffers holds already. *Not modelled*: for the disk.
    """
    if place != "remote" or not num_bytes:
        return 0.0
    return (rates.remote_round_trip_s or 0.0) * 1000 * max(0.0, 1 - num_bytes / SLAB_BYTES)


def assumed_rate(rate: float, rates: Rates, *, kind: TimeKind) -> float:
    """One that was not measured, corrected as finished runs correct its kind (measured ones were before they came here)."""
    return rate / rates.time_factor(kind)


def _rate(rates: Rates, place: str, way: Literal["read", "write"]) -> float:
    measured = {
        ("disk", "read"): rates.disk_read_bytes_per_s,
        ("disk", "write"): rates.disk_write_bytes_per_s,
        ("remote", "read"): rates.remote_read_bytes_per_s,
        ("remote", "write"): rates.remote_write_bytes_per_s,
    }
    return measured[place, way] or assumed_rate(ASSUMED_BYTES_PER_S[place], rates, kind=STORE_LANES[place])
