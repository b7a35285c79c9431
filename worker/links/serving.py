"""Measures this machine's links: listens where a probe is due, connects where another machine's worker listens for it.

In a thread of its own, which no job waits for: a probe takes some seconds and at most 20, and is begun only while no job is on
either machine. What was measured beside a job that began meanwhile is thrown away. Nothing listens between probes.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections

from optimizer.base.errors import InvalidInput
from optimizer.runtime.ranks.interface import INTERFACE_VARIABLE, LOOPBACK, address_of, find_interface, read_boot_id
from webapp.catalog.models import Link, Machine
from webapp.jobs.links.probing import (
    OFFER_S,
    Offer,
    ask_for_links,
    close_offer,
    find_due,
    find_offer,
    is_idle,
    open_offer,
    record_failure,
    record_measured,
)
from worker.config import WorkerConfig
from worker.links.exchange import LinkBroke, LinkFailed, answer, measure, open_listener

logger = logging.getLogger(__name__)

_NOT_TAKEN_S: Final = 30.0
"""Pause after an offer that nobody took: the other worker may be busy with another link, or of an older version."""
_LONGEST_REST_S: Final = 600.0
"""Between two probes of a link that fails again and again, unless somebody asks."""


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """A pause in which this machine does not listen for a link, since it last did."""

    since_s: float
    pause_s: float


class Links:
    """This machine's links."""

    def __init__(self, config: WorkerConfig, *, draining: threading.Event) -> None:
        self._config = config
        self._draining = draining
        self._asked_for = ""
        self._rests: dict[int, _Rest] = {}

    def serve(self, machine: Callable[[], Machine | None]) -> None:
        """Until the worker drains. machine: this one, while it is registered."""
        try:
            while not self._draining.wait(self._config.poll_s):
                close_old_connections()
                row = machine()
                try:
                    if row is not None:
                        self.turn(row)
                except (DatabaseError, OSError) as error:
                    logger.warning("links to other machines are not measured now, will try again: %s", error)
                    connections.close_all()
                except Exception:
                    logger.exception("a link was not measured; a fault of the program")
        finally:
            connections.close_all()

    def turn(self, machine: Machine) -> None:
        """Once connect and once listen, where there is something to do."""
        if self._asked_for != machine.pk:
            ask_for_links(machine)
            self._asked_for = machine.pk
        if (offered := find_offer(machine)) is not None:
            self._connect(offered)
        if (link := next((link for link in find_due(machine) if not self._is_resting(link)), None)) is not None:
            was_taken = self._listen(link)
            if link.failure or not was_taken:
                self._rest(link)

    def _is_resting(self, link: Link) -> bool:
        rest = self._rests.get(link.pk)
        if rest is None:
            return False
        pause_s = rest.pause_s if link.asked_at is None else _NOT_TAKEN_S
        return time.monotonic() < rest.since_s + pause_s

    def _rest(self, link: Link) -> None:
        """Twice as long each time where it had failed before."""
        before = self._rests.get(link.pk)
        fails_again = bool(link.failure) and link.asked_at is None
        pause_s = min(_LONGEST_REST_S, 2 * before.pause_s) if fails_again and before is not None else _NOT_TAKEN_S
        self._rests[link.pk] = _Rest(since_s=time.monotonic(), pause_s=pause_s)

    def _listen(self, link: Link) -> bool:
        """False where nothing was asked of this machine."""
        try:
            interface = find_interface()
            listener = open_listener(address_of(interface))
        except InvalidInput as error:
            record_failure(link, f"{self._config.host} cannot be reached: {error.message}; correct {INTERFACE_VARIABLE}")
            return False
        with closing(listener):
            address, port = listener.getsockname()[:2]
            offer = open_offer(link, address=address, port=port, interface=interface, computer=read_boot_id())
            if offer is None:
                return True  # somebody else listens
            was_taken = answer(listener, offer["token"], limit_s=OFFER_S, should_stop=self._draining.is_set)
        if not was_taken:
            close_offer(link)
        return was_taken

    def _connect(self, link: Link) -> None:
        offer: Offer | None = link.offer
        if offer is None:
            return
        try:
            interface = find_interface()
            _check_reach(link, offer, interface=interface)
            found = measure(offer["address"], offer["port"], offer["token"], source=address_of(interface))
        except InvalidInput as error:
            record_failure(link, f"{link.connector.name} cannot reach {link.listener.name}: {error.message}")
        except LinkBroke:
            close_offer(link)
        except LinkFailed as error:
            record_failure(link, _unreached(link, offer, interface=interface, reason=str(error)))
        else:
            if is_idle(link.listener, link.connector):
                record_measured(
                    link, round_trip_s=found.round_trip_s, bytes_per_s_by_size=found.bytes_per_s_by_size
                )
            else:
                close_offer(link)


def _check_reach(link: Link, offer: Offer, *, interface: str) -> None:
    """Raise InvalidInput where one of two computers has only its loopback for the others."""
    if offer["computer"] == read_boot_id():
        return
    for machine, name in ((link.listener, offer["interface"]), (link.connector, interface)):
        if name == LOOPBACK:
            raise InvalidInput(
                f"{machine.name} would use {LOOPBACK}, which leads to no other computer; set {INTERFACE_VARIABLE} for its "
                "worker, such as to eth0, and start it again",
                field=INTERFACE_VARIABLE,
                value=name,
                allowed="the interface by which it reaches the others",
            )


def _unreached(link: Link, offer: Offer, *, interface: str, reason: str) -> str:
    here, there = link.connector.name, link.listener.name
    return (
        f"{here} cannot reach {there} at {offer['address']}, port {offer['port']}: {reason}; let the two connect to each other "
        f"on any TCP port (firewall), and check {INTERFACE_VARIABLE}: {offer['interface']} on {there}, {interface} on {here}"
    )
