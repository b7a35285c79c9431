"""Probes of links as rows: one side offers to listen, the other takes the offer, and what came of it is recorded.

Of two machines the one with the smaller id listens. A probe is due when one of their workers has started, when a person asks, and
a day after the last one, or half a minute after one that failed; it is offered only while no job is on either machine, since each
would disturb the other. The token is the row's own and goes with it.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final, TypedDict

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from webapp.catalog.models import Link, Machine
from webapp.clock import from_now
from webapp.jobs.devices.joined import THERE_WITHIN_S
from webapp.jobs.devices.room import live_holds

AGAIN_AFTER_S: Final = 24 * 3600.0
AGAIN_AFTER_FAILURE_S: Final = 30.0
"""No job can run over a link that failed, and the cause may be over soon. Who listens tries ever more seldom."""
OFFER_S: Final = 20.0
"""An offer nobody takes for so long is over."""
_LEAST_LEFT_S: Final = 5.0
"""An offer that ends sooner is not taken any more."""
_ALL_DEVICES: Final = 1_000_000
_MOST_CHARACTERS: Final = 1000


class Offer(TypedDict):
    """The place at which a side listens, and what the other must know."""

    address: str
    port: int
    interface: str
    computer: str
    """The listening computer's boot id: the loopback leads to no other."""
    token: str


def ask_for_links(machine: Machine) -> int:
    """Have every link of the machine measured as soon as both sides are idle; the number of links."""
    for other in Machine.objects.exclude(pk=machine.pk):
        first, second = sorted((machine, other), key=lambda row: row.pk)
        Link.objects.get_or_create(listener=first, connector=second)
    return links_of(machine).update(asked_at=Now())


def links_of(machine: Machine) -> QuerySet[Link]:
    """The rows of the machine's links, in either part."""
    return Link.objects.filter(Q(listener=machine) | Q(connector=machine))


def find_due(machine: Machine) -> list[Link]:
    """Links for which this machine should listen now, the longest unchecked first; none while a job is on it."""
    is_asked = Q(asked_at__isnull=False) | Q(checked_at__isnull=True) | Q(checked_at__lt=from_now(-AGAIN_AFTER_S))
    has_failed = ~Q(failure="") & Q(checked_at__lt=from_now(-AGAIN_AFTER_FAILURE_S))
    rows = Link.objects.select_related("connector").filter(
        is_asked | has_failed,
        listener=machine,
        connector__last_seen_at__gt=from_now(-THERE_WITHIN_S),
        connector__draining=False,
    )
    found = list(rows.order_by("checked_at", "pk"))
    return [link for link in found if is_idle(link.connector)] if found and is_idle(machine) else []


def open_offer(link: Link, *, address: str, port: int, interface: str, computer: str) -> Offer | None:
    """Say in the row where this machine listens, with a new token; None where somebody else does already."""
    offer = Offer(address=address, port=port, interface=interface, computer=computer, token=secrets.token_hex(32))
    free = Link.objects.filter(Q(offer_ends_at__isnull=True) | Q(offer_ends_at__lt=Now()), pk=link.pk)
    return offer if free.update(offer=offer, offer_ends_at=from_now(OFFER_S)) else None


def close_offer(link: Link) -> None:
    Link.objects.filter(pk=link.pk).update(offer=None, offer_ends_at=None)


def find_offer(machine: Machine) -> Link | None:
    """A link whose other side listens for this machine; none while a job is on it."""
    rows = Link.objects.select_related("listener", "connector")
    link = rows.filter(connector=machine, offer_ends_at__gt=from_now(_LEAST_LEFT_S)).first()
    return link if link is not None and is_idle(machine) else None


def is_idle(*machines: Machine) -> bool:
    """Report whether no job is on any of them."""
    return not any(live_holds(machine, num_devices=_ALL_DEVICES) for machine in machines)


def record_measured(link: Link, *, round_trip_s: float, bytes_per_s_by_size: Sequence[tuple[int, float]]) -> None:
    Link.objects.filter(pk=link.pk).update(
        measured_at=Now(),
        round_trip_s=round_trip_s,
        bytes_per_s_by_size=[list(pair) for pair in bytes_per_s_by_size],
        failure="",
        **_ended(),
    )


def record_failure(link: Link, words: str) -> None:
    """Keeps what was measured before; it is not used while the other side cannot be reached."""
    Link.objects.filter(pk=link.pk).update(failure=words[:_MOST_CHARACTERS], **_ended())


def _ended() -> dict[str, Any]:
    return {"checked_at": Now(), "asked_at": None, "offer": None, "offer_ends_at": None}
