"""The brake on guessing passwords: tries are counted by name and address, by address, and by name, and cost growing waits.

Each try is counted before its password is looked at, so that a hundred at once are not a hundred free ones; a right password
takes its own back. A count leaks away with time. Nobody can lock another out: the name's own count, which stops guesses from
many addresses, takes a hundred tries that one address alone is not given, and does not hold where the name has logged in before.
The database holds the counts, so that all processes share them and a restart forgets none.
"""

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from webapp.accounts.models import LoginCount


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One of the counts and the waits that it leads to."""

    num_free: int
    """Tries before the first wait."""
    leak: timedelta
    """Time in which one try is forgotten."""


PAIR = Limit(num_free=5, leak=timedelta(minutes=15))
ADDRESS = Limit(num_free=30, leak=timedelta(minutes=1))
"""Higher, since a whole office may have one address."""
NAME = Limit(num_free=100, leak=timedelta(minutes=1))
FIRST_WAIT = timedelta(seconds=15)
LONGEST_WAIT = timedelta(minutes=15)
"""Waits double from the first to this one."""
_KNOWN_FOR = timedelta(days=90)
"""An address at which a name has logged in is remembered for so long."""
_FORGET_AFTER = timedelta(days=1)


def take_try(name: str, address: str) -> bool:
    """Count a try and return True, or False while it has to wait; nothing is counted then."""
    now = timezone.now()
    limits = {_key("pair", name, address): PAIR, _key("address", address): ADDRESS}
    if not LoginCount.objects.filter(pk=_key("known", name, address), forget_at__gt=now).exists():
        limits[_key("name", name)] = NAME
    if LoginCount.objects.filter(pk__in=limits, wait_until__gt=now).exists():
        return False  # without a write: a flood makes no rows
    with transaction.atomic():
        rows = _locked(list(limits), now)
        if any(row.wait_until > now for row in rows):
            return False
        for row in rows:
            _count(row, limits[row.pk], now)
            row.save()
    LoginCount.objects.filter(forget_at__lt=now).delete()
    return True


def note_success(name: str, address: str) -> None:
    """Take the try back that ``take_try`` counted, forget the failures before it, remember where it was."""
    now = timezone.now()
    with transaction.atomic():
        LoginCount.objects.filter(pk=_key("pair", name, address)).delete()
        for row in _locked([_key("address", address), _key("name", name)], now):
            row.level = max(0.0, row.level - 1)
            row.wait_until = now
            row.save()
        known = {"level": 0.0, "counted_at": now, "wait_until": now, "forget_at": now + _KNOWN_FOR}
        LoginCount.objects.update_or_create(pk=_key("known", name, address), defaults=known)


def _locked(keys: Sequence[str], now: datetime) -> list[LoginCount]:
    """The rows, made where there is none, in one order for all so that no two wait for each other."""
    fresh = {"level": 0.0, "counted_at": now, "wait_until": now, "forget_at": now + _FORGET_AFTER}
    LoginCount.objects.bulk_create([LoginCount(pk=key, **fresh) for key in sorted(keys)], ignore_conflicts=True)
    return list(LoginCount.objects.select_for_update().filter(pk__in=keys).order_by("pk"))


def _count(row: LoginCount, limit: Limit, now: datetime) -> None:
    row.level = max(0.0, row.level - (now - row.counted_at) / limit.leak) + 1
    row.counted_at, row.forget_at = now, now + _FORGET_AFTER
    num_over = round(row.level) - limit.num_free  # rounded: while the tries are made a little leaks already
    if num_over >= 0:
        row.wait_until = now + min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(num_over, 20))


def _key(kind: str, *parts: str) -> str:
    """A hash, since names that are tried may be of any length."""
    if kind != "name":
        parts = (*parts[:-1], _network(parts[-1]))
    return hashlib.sha256("\0".join((kind, *parts)).encode("utf-8", "surrogatepass")).hexdigest()


def _network(address: str) -> str:
    """An IPv6 address counts by its first 64 bits, since whoever has one address there has them all."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else str(parsed)
