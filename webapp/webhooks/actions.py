"""The only writer of webhooks and deliveries. Sending is ``sending.py``, called by the reconciler every few seconds."""

import json
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import InvalidInput
from webapp.accounts.models import Project
from webapp.webhooks.models import EVENTS, TEST_EVENT, Delivery, Webhook
from webapp.webhooks.signing import secret_of
from webapp.webhooks.targets import check_url

MAX_WEBHOOKS_PER_PROJECT = 20


def create_webhook(user: User, project: Project, *, url: str, events: list[str]) -> tuple[Webhook, str]:
    """The row and its secret. events: empty for all. Raises InvalidInput."""
    url = url.strip()
    check_url(url)
    unknown = [event for event in events if event not in EVENTS]
    if unknown:
        raise InvalidInput(
            f"events names {unknown[0][:40]!r}; allowed: {', '.join(EVENTS)}",
            field="events",
            value=unknown[0][:40],
            allowed=list(EVENTS),
        )
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=project.pk)
        if project.webhooks.count() >= MAX_WEBHOOKS_PER_PROJECT:
            raise InvalidInput(
                f"project {project.name} has {MAX_WEBHOOKS_PER_PROJECT} webhooks; allowed: at most that",
                field="url",
                hint="Delete one that is no longer used.",
            )
        row = Webhook.objects.create(project=project, created_by=user, url=url, events=sorted(set(events), key=EVENTS.index))
    return row, secret_of(row)


def renew_secret(webhook: Webhook) -> str:
    """Replace the secret: earlier signatures no longer verify, and waiting messages are signed with the new one."""
    Webhook.objects.filter(pk=webhook.pk).update(secret_number=F("secret_number") + 1)
    webhook.refresh_from_db()
    return secret_of(webhook)


def set_active(webhook: Webhook, *, is_active: bool) -> None:
    """An inactive one hears of nothing new; what waits for it is not sent until it is active again."""
    webhook.is_active = is_active
    webhook.save(update_fields=["is_active"])


def delete_webhook(webhook: Webhook) -> None:
    """With its log."""
    webhook.delete()


def queue_job_event(*, project_id: str | None, event: str, data: dict[str, Any]) -> None:
    """A message to each address of the project that hears of it. Called in the transaction of the event itself, so that
    neither is there without the other."""
    if project_id is None or event not in EVENTS:
        return
    for webhook in Webhook.objects.filter(project_id=project_id, is_active=True):
        if not webhook.events or event in webhook.events:
            _queue(webhook, event=event, data=data)


def send_test(webhook: Webhook) -> Delivery:
    """A message that says nothing, sent within seconds like any other."""
    return _queue(webhook, event=TEST_EVENT, data={"webhook": webhook.pk, "text": "A test of this webhook."})


def replay(delivery: Delivery) -> Delivery:
    """The same body once more, as a message of its own."""
    return Delivery.objects.create(
        webhook_id=delivery.webhook_id, event=delivery.event, body=delivery.body, next_try_at=Now(), replay_of=delivery.pk
    )


def _queue(webhook: Webhook, *, event: str, data: dict[str, Any]) -> Delivery:
    document = {"type": event, "timestamp": timezone.now().isoformat(), "project": webhook.project_id, "data": data}
    body = json.dumps(document, separators=(",", ":"))
    return Delivery.objects.create(webhook=webhook, event=event, body=body, next_try_at=Now())
