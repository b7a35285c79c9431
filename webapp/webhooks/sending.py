"""Sends what is due. Rows decide, not messages: what a killed process was sending is sent again, so a receiver may hear of a
thing twice and recognizes it by ``webhook-id``.

No receiver holds up another's messages. Each call is a thread of its own, begun only when its message is taken; what comes due
meanwhile goes on beside it; and projects take turns, as do the webhooks of one, with at most a few calls of each at once.
"""

import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from django.db.models import F, Min, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from webapp.clock import from_now
from webapp.webhooks import posting
from webapp.webhooks.models import Delivery, Kind, State, Webhook
from webapp.webhooks.posting import Outcome

logger = logging.getLogger(__name__)

WAITS_S = (5, 30, 5 * 60, 30 * 60, 2 * 3600, 6 * 3600, 12 * 3600)
"""After the first try, the second, …; after the last of them it is given up, some 21 hours later."""
HELD_S = 60
"""While a message is being sent no other process takes it; longer than any call is waited for."""
MAIL_TIMEOUT_S = 30.0
"""The service's own mail server gets longer: it may look up the receiver's while it is spoken to."""
KEPT = timedelta(days=30)
_AT_ONCE = 32
_AT_ONCE_PER_PROJECT = 4
_AT_ONCE_PER_WEBHOOK = 2
_ROUND_S = 60.0
"""Then a round begins nothing more, so that its caller can see to other things."""
_LOOK_S = 0.5
"""Between two looks for what has come due while calls are waited for."""
_SPARE_S = 1.0
"""A call ends itself at its deadline; only one that waits for a name server is given up, this much later."""
_GONE = 410
"""The receiver wants no more (Standard Webhooks)."""


class _Due(NamedTuple):
    webhook_id: str
    project_id: str


@dataclass(kw_only=True, eq=False)
class _Call:
    """A call that was begun; its thread may outlive its outcome."""

    delivery: Delivery
    thread: threading.Thread | None = None
    begun_s: float = field(default_factory=time.monotonic)
    outcome: Outcome | None = None
    is_settled: bool = False

    @property
    def limit_s(self) -> float:
        return MAIL_TIMEOUT_S if self.delivery.webhook.kind == Kind.EMAIL else posting.TIMEOUT_S


class Sender:
    """Takes and settles messages in its caller's thread, which alone touches the database."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        """Those whose thread has not ended, and those whose outcome is not written yet."""
        self._ended: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._turns: dict[str, int] = {}
        """By project and by webhook, the number of the call that it was last given."""
        self._num_calls = 0

    def send_due(self) -> list[str]:
        """Try each message that is due, until none is and none is waited for; the ids of those that were delivered."""
        delivered: list[str] = []
        begin_until_s = time.monotonic() + _ROUND_S
        while True:
            if time.monotonic() < begin_until_s:
                self._begin_due()
            if all(call.is_settled for call in self._calls):
                return delivered
            delivered += self._settle_some()

    def _begin_due(self) -> None:
        self._calls = [call for call in self._calls if not call.is_settled or (call.thread and call.thread.is_alive())]
        if len(self._calls) >= _AT_ONCE:
            return
        waiting = _waiting()
        while len(self._calls) < _AT_ONCE and (due := self._next(waiting)) is not None:
            delivery = take(due.webhook_id)
            if delivery is None:
                waiting.remove(due)
            else:
                self._begin(delivery, due)

    def _next(self, waiting: list[_Due]) -> _Due | None:
        """The webhook whose project, and which itself, has waited longest for a turn and has no more calls than it may have."""
        by_project = Counter(call.delivery.webhook.project_id for call in self._calls)
        by_webhook = Counter(call.delivery.webhook_id for call in self._calls)
        allowed = [
            due
            for due in waiting
            if by_project[due.project_id] < _AT_ONCE_PER_PROJECT and by_webhook[due.webhook_id] < _AT_ONCE_PER_WEBHOOK
        ]
        turns = self._turns
        return min(allowed, key=lambda due: (turns.get(due.project_id, 0), turns.get(due.webhook_id, 0)), default=None)

    def _begin(self, delivery: Delivery, due: _Due) -> None:
        self._num_calls += 1
        self._turns |= {due.project_id: self._num_calls, due.webhook_id: self._num_calls}
        call = _Call(delivery=delivery)
        call.thread = threading.Thread(target=self._carry_out, args=(call,), name=f"webhook {delivery.pk}", daemon=True)
        self._calls.append(call)
        call.thread.start()

    def _carry_out(self, call: _Call) -> None:
        try:
            call.outcome = posting.call(call.delivery)
        except Exception:
            logger.exception("%s is not sent; a fault of the program", call.delivery.pk)
            call.outcome = posting.outcome(None, "a fault of the service", started_s=call.begun_s)
        self._ended.put(call)

    def _settle_some(self) -> list[str]:
        """Wait a moment for calls to end, and give up those that are past their limit; the ids of those that were delivered."""
        ended: list[_Call] = []
        try:
            ended.append(self._ended.get(timeout=_LOOK_S))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        now_s = time.monotonic()
        late = [call for call in self._calls if call.outcome is None and now_s - call.begun_s > call.limit_s + _SPARE_S]
        for call in late:
            call.outcome = posting.outcome(None, posting.no_answer(call.limit_s), started_s=call.begun_s)
        delivered = []
        for call in [*ended, *late]:
            if not call.is_settled and call.outcome is not None:
                call.is_settled = True
                delivered += [call.delivery.pk] if _settle(call.delivery, call.outcome) else []
        return delivered


def forget_old() -> int:
    """Delete the log of a month ago."""
    deleted, _ = Delivery.objects.exclude(state=State.PENDING).filter(created_at__lt=timezone.now() - KEPT).delete()
    return deleted


def take(webhook_id: str) -> Delivery | None:
    """The webhook's message that has been due longest, held for this process by a guarded update."""
    due = _due().filter(webhook_id=webhook_id)
    for key in due.order_by("next_try_at", "pk").values_list("pk", flat=True)[:_AT_ONCE]:
        # the guard reads this row alone: PostgreSQL would not ask a join again after it has waited for another process's update
        guarded = Delivery.objects.filter(pk=key, state=State.PENDING, next_try_at__lte=Now())
        if guarded.update(next_try_at=from_now(HELD_S), tried_at=Now(), num_tries=F("num_tries") + 1):
            return Delivery.objects.select_related("webhook").get(pk=key)
    return None


def _due() -> QuerySet[Delivery]:
    return Delivery.objects.filter(state=State.PENDING, next_try_at__lte=Now(), webhook__is_active=True)


def _waiting() -> list[_Due]:
    """Webhooks for which something is due, the longest due first."""
    rows = _due().values_list("webhook_id", "webhook__project_id").annotate(since=Min("next_try_at")).order_by("since")
    return [_Due(webhook_id, project_id) for webhook_id, project_id, _ in rows]


def _settle(delivery: Delivery, outcome: Outcome) -> bool:
    """Delivered, to be tried again, or given up. A try that another process has begun meanwhile is left to that one."""
    tries = delivery.num_tries
    is_over = outcome.is_delivered or tries > len(WAITS_S) or outcome.status_code == _GONE
    state = State.DELIVERED if outcome.is_delivered else State.FAILED if is_over else State.PENDING
    Delivery.objects.filter(pk=delivery.pk, state=State.PENDING, num_tries=tries).update(
        state=state,
        next_try_at=None if is_over else from_now(WAITS_S[tries - 1]),
        status_code=outcome.status_code,
        trouble=outcome.trouble,
        duration_ms=outcome.duration_ms,
    )
    if outcome.status_code == _GONE:
        logger.info("%s wants no more: %s", delivery.webhook_id, delivery.webhook.shown_url)
        Webhook.objects.filter(pk=delivery.webhook_id).update(is_active=False)
    return outcome.is_delivered
