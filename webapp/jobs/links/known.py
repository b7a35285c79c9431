"""Says what is known of the network between machines: as measured, as stated, and whether the two agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Any, Final

from django.db.models import Q

from optimizer.base.units import format_duration
from optimizer.hardware.peers import read_network, write_network
from webapp.catalog.models import Link, Machine
from webapp.clock import iso

MUCH: Final = 2.0
"""Factor from which a stated link differs much from the measured one."""
_SMALL_DELAY_S: Final = 0.5e-3
"""Delays below this count as alike: beside what an exchange takes on its own they are nothing."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between each two of several machines."""

    unreached: tuple[str, ...]
    """Why the last probes did not reach, in sentences; no job can run over them."""
    unknown: tuple[str, ...]
    """Pairs in words that were never measured: ``home and office``."""
    link: str
    """The lowest rate and the longest delay, as people write it; empty unless every pair was measured."""
    measured_at: datetime | None
    """When the oldest of these measurements was made; None unless every pair was measured."""


def network_between(rows: Sequence[Machine]) -> Network:
    """All that is known of the links between these machines."""
    ids = [row.pk for row in rows]
    found = {
        frozenset((link.listener_id, link.connector_id)): link
        for link in Link.objects.filter(listener__in=ids, connector__in=ids)
    }
    pairs = [(first, second, found.get(frozenset((first.pk, second.pk)))) for first, second in combinations(rows, 2)]
    unknown = tuple(f"{first.name} and {second.name}" for first, second, link in pairs if link is None or not is_known(link))
    links = [link for _, _, link in pairs if link is not None and is_known(link)]
    return Network(
        unreached=tuple(link.failure for _, _, link in pairs if link is not None and link.failure),
        unknown=unknown,
        link="" if unknown else slowest(links),
        measured_at=None if unknown else min(link.measured_at for link in links if link.measured_at),
    )


def slowest(links: Sequence[Link]) -> str:
    """The lowest rate of large pieces and the longest delay of them."""
    return write_network(
        bytes_per_s=min(rate_of(link) for link in links), delay_s=max((link.round_trip_s or 0.0) / 2 for link in links)
    )


def rate_of(link: Link) -> float:
    """Bytes per second of the largest pieces that were measured."""
    return float(link.bytes_per_s_by_size[-1][1])


def compare_links(stated: str, measured: str) -> str:
    """By how much a stated link differs from the measured one, in words; empty where that is not much."""
    one, other = read_network(stated), read_network(measured)
    found = []
    faster = one.bytes_per_s / other.bytes_per_s
    if max(faster, 1 / faster) > MUCH:
        found.append(f"its rate is {max(faster, 1 / faster):.3g} times {'higher' if faster > 1 else 'lower'}")
    delays = max(one.latency_s, _SMALL_DELAY_S), max(other.latency_s, _SMALL_DELAY_S)
    longer = delays[0] / delays[1]
    if max(longer, 1 / longer) > MUCH:
        found.append(f"its delay is {max(longer, 1 / longer):.3g} times {'longer' if longer > 1 else 'shorter'}")
    return " and ".join(found)


def age_of(moment: datetime, *, now: datetime) -> str:
    """``3 min ago``."""
    return f"{format_duration(max(0.0, (now - moment).total_seconds()))} ago"


def link_documents(machine: Machine, links: Sequence[Link]) -> list[dict[str, Any]]:
    """The machine's links for the API and its page, by the other machine's name. links: with both machines at hand."""
    found = []
    for link in links:
        other = other_side(link, machine)
        found.append(
            {
                "machine": other.name,
                "link": slowest([link]) if is_known(link) else "",
                "round_trip_s": link.round_trip_s,
                "bytes_per_s_by_size": link.bytes_per_s_by_size,
                "measured_at": iso(link.measured_at),
                "checked_at": iso(link.checked_at),
                "is_due": link.asked_at is not None or link.checked_at is None,
                "failure": link.failure,
            }
        )
    return sorted(found, key=lambda document: str(document["machine"]))


def links_between(machines: Sequence[Machine]) -> dict[str, list[Link]]:
    """The links of each of these machines, by its id, in one query; each link with both machines at hand."""
    ids = [machine.pk for machine in machines]
    found: dict[str, list[Link]] = {pk: [] for pk in ids}
    rows = Link.objects.select_related("listener", "connector")
    for link in rows.filter(Q(listener__in=ids) | Q(connector__in=ids)):
        for side in (link.listener_id, link.connector_id):
            if side in found:
                found[side].append(link)
    return found


def other_side(link: Link, machine: Machine) -> Machine:
    return link.connector if link.listener_id == machine.pk else link.listener


def is_known(link: Link) -> bool:
    """Report whether it was ever measured."""
    return link.measured_at is not None and bool(link.bytes_per_s_by_size)
