"""Sends what is due. Rows decide, not messages: what a killed process was sending is sent again, so a receiver may hear of a
thing twice and recognizes it by ``webhook-id``.

Of an answer nothing is believed: at most 64 KiB of it are read, redirects are not followed, 5 s are all it gets.
"""

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import httpx
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import InvalidInput
from webapp.clock import from_now
from webapp.webhooks.mail import send_mail
from webapp.webhooks.models import Delivery, Kind, State, Webhook
from webapp.webhooks.signing import signed_headers
from webapp.webhooks.targets import find_target

logger = logging.getLogger(__name__)

WAITS_S = (5, 30, 5 * 60, 30 * 60, 2 * 3600, 6 * 3600, 12 * 3600)
"""After the first try, the second, …; after the last of them it is given up, some 21 hours later."""
TIMEOUT_S = 5.0
HELD_S = 60
"""While a message is being sent no other process takes it; longer than a call can last."""
KEPT = timedelta(days=30)
_AT_ONCE = 8
_PER_ROUND = 64
_READ_BYTES = 64 * 1024
_GONE = 410
"""The receiver wants no more (Standard Webhooks)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one try."""

    status_code: int | None
    trouble: str
    duration_ms: int

    @property
    def is_delivered(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


def send_due() -> list[str]:
    """One try for each message that is due; the ids of those that were delivered."""
    taken = take_due()
    if not taken:
        return []
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:  # only the calls: rows are written here
        outcomes = list(threads.map(call, taken))
    return [delivery.pk for delivery, outcome in zip(taken, outcomes, strict=True) if _settle(delivery, outcome)]


def forget_old() -> int:
    """Delete the log of a month ago."""
    deleted, _ = Delivery.objects.exclude(state=State.PENDING).filter(created_at__lt=timezone.now() - KEPT).delete()
    return deleted


def call(delivery: Delivery) -> Outcome:
    """One POST to the delivery's address. Touches no database."""
    started_s = time.monotonic()
    if delivery.webhook.kind == Kind.EMAIL:
        mail = json.loads(delivery.body)
        status_code, trouble = send_mail(delivery.webhook.url, **mail, message_id=delivery.pk)
        return _outcome(status_code, trouble, started_s)
    body = delivery.body.encode()
    try:
        target = find_target(delivery.webhook.url)
        headers = _headers(delivery, body)
        status_code, trouble = _post(target.connect_url, body, {**headers, "host": target.host_header}, sni=target.host)
    except InvalidInput as error:
        status_code, trouble = None, error.message
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        status_code, trouble = None, f"{type(error).__name__}: {error}".rstrip(": ")
    return _outcome(status_code, trouble, started_s)


def _outcome(status_code: int | None, trouble: str, started_s: float) -> Outcome:
    took_ms = round((time.monotonic() - started_s) * 1000)
    return Outcome(status_code=status_code, trouble=trouble[:300], duration_ms=took_ms)


def _headers(delivery: Delivery, body: bytes) -> dict[str, str]:
    """A channel knows no signature."""
    if delivery.webhook.kind == Kind.SLACK:
        return {"content-type": "application/json"}
    return signed_headers(delivery.webhook, delivery_id=delivery.pk, timestamp_s=int(time.time()), body=body)


def _post(url: str, body: bytes, headers: dict[str, str], *, sni: str) -> tuple[int, str]:
    """The status, and of an answer that is no success how it begins."""
    deadline_s = time.monotonic() + TIMEOUT_S
    begun = b""
    with (
        # trust_env: a proxy of the environment would resolve the name itself, after the check
        httpx.Client(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=headers, extensions={"sni_hostname": sni}) as answer,
    ):
        for chunk in answer.iter_raw():
            begun += chunk
            if len(begun) >= _READ_BYTES or time.monotonic() > deadline_s:
                break
    text = begun[:200].decode(errors="replace")
    return answer.status_code, "" if answer.is_success else "".join(c if c.isprintable() else " " for c in text)


def take_due() -> list[Delivery]:
    """Held for this process by a guarded update each."""
    due = Delivery.objects.filter(state=State.PENDING, next_try_at__lte=Now(), webhook__is_active=True)
    keys = list(due.order_by("next_try_at").values_list("pk", flat=True)[:_PER_ROUND])
    held = [key for key in keys if due.filter(pk=key).update(next_try_at=from_now(HELD_S), tried_at=Now())]
    return list(Delivery.objects.filter(pk__in=held).select_related("webhook"))


def _settle(delivery: Delivery, outcome: Outcome) -> bool:
    """Delivered, to be tried again, or given up."""
    tries = delivery.num_tries + 1
    is_over = outcome.is_delivered or tries > len(WAITS_S) or outcome.status_code == _GONE
    state = State.DELIVERED if outcome.is_delivered else State.FAILED if is_over else State.PENDING
    Delivery.objects.filter(pk=delivery.pk, state=State.PENDING).update(
        state=state,
        num_tries=tries,
        next_try_at=None if is_over else from_now(WAITS_S[tries - 1]),
        status_code=outcome.status_code,
        trouble=outcome.trouble,
        duration_ms=outcome.duration_ms,
    )
    if outcome.status_code == _GONE:
        logger.info("%s wants no more: %s", delivery.webhook_id, delivery.webhook.shown_url)
        Webhook.objects.filter(pk=delivery.webhook_id).update(is_active=False)
    return outcome.is_delivered
