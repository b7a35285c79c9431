"""A machine's links as rows of its page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from optimizer.base.units import format_bytes
from webapp.catalog.models import Link, Machine
from webapp.jobs.links.known import is_known, other_side, slowest


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """The network to one other machine."""

    machine: str
    """The other one's name."""
    link: str
    """Rate and delay as a job's spec has them; empty where they were not measured."""
    round_trip_ms: float | None
    sizes: tuple[int, ...]
    """Sizes of the pieces that were sent, in bytes; the next field has their rates."""
    rates: tuple[tuple[str, str], ...]
    measured_at: datetime | None
    checked_at: datetime | None
    failure: str
    is_due: bool


def link_rows(machine: Machine, links: Sequence[Link]) -> list[LinkRow]:
    """By the other machine's name."""
    rows = [
        LinkRow(
            machine=other_side(link, machine).name,
            link=slowest([link]) if is_known(link) else "",
            round_trip_ms=None if link.round_trip_s is None else link.round_trip_s * 1000,
            sizes=tuple(size for size, _ in link.bytes_per_s_by_size),
            rates=tuple((format_bytes(size), f"{rate / 1e6:,.3g} MB/s") for size, rate in link.bytes_per_s_by_size),
            measured_at=link.measured_at,
            checked_at=link.checked_at,
            failure=link.failure,
            is_due=link.asked_at is not None or link.checked_at is None,
        )
        for link in links
    ]
    most = sizes_of(rows)
    return sorted((_filled(row, most) for row in rows), key=lambda row: row.machine)


def sizes_of(rows: Sequence[LinkRow]) -> tuple[int, ...]:
    """All sizes that any of them was measured with."""
    return max((row.sizes for row in rows), key=len, default=())


def _filled(row: LinkRow, sizes: tuple[int, ...]) -> LinkRow:
    """With a cell for each size, also for those that would have taken too long."""
    missing = tuple((format_bytes(size), "–") for size in sizes[len(row.sizes) :])
    return replace(row, rates=(*row.rates, *missing))
