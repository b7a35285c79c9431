"""The only writer of webhooks and deliveries. Sending is ``sending.py``, called by the reconciler every few seconds."""

import json
from collections.abc import Sequence
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import InvalidInput
from webapp.accounts.models import Project
from webapp.prepared import Prepared, text_mark
from webapp.webhooks.mail import check_address
from webapp.webhooks.models import EVENTS, TEST_EVENT, Delivery, Kind, Webhook
from webapp.webhooks.notices import ENDINGS, escape_for_channel, write_notice
from webapp.webhooks.signing import secret_of
from webapp.webhooks.targets import check_url

MAX_WEBHOOKS_PER_PROJECT = 20


def create_webhook(
    user: User, project: Project, *, url: str, events: list[str], kind: str = ""
) -> tuple[Webhook, str]:
    """The row, and the secret of one that is signed.

    url: an address to post to, or to mail to. events: empty for all, or for the endings where people are to read it.
    kind: seen by the address where it is not given. Raises InvalidInput.
    """
    url = url.strip()
    kind = kind or guess_kind(url)
    check_address(url) if kind == Kind.EMAIL else check_url(url)
    events = events or ([] if kind == Kind.WEBHOOK else list(ENDINGS))
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
        chosen = sorted(set(events), key=EVENTS.index)
        row = Webhook.objects.create(project=project, created_by=user, kind=kind, url=url, events=chosen)
    return row, secret_of(row) if kind == Kind.WEBHOOK else ""


def guess_kind(url: str) -> Kind:
    if "@" in url and "://" not in url:
        return Kind.EMAIL
    return Kind.SLACK if url.startswith("https://hooks.slack.com/") else Kind.WEBHOOK


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


def queue_job_events(*, project_id: str | None, event: str, data: Sequence[dict[str, Any]]) -> None:
    """A message about each job to each address of the project that hears of it. Called in the transaction of the event itself, so
    that neither is there without the other."""
    if project_id is None or event not in EVENTS:
        return
    for webhook in _HEARING.rows(project_id=project_id):
        if not webhook.events or event in webhook.events:
            for each in data:
                _queue(webhook, event=event, data=each)


_HEARING: "Prepared[Webhook]" = Prepared(
    lambda: Webhook.objects.filter(project_id=text_mark("project_id"), is_active=True).order_by("id"), "project_id"
)


def send_test(webhook: Webhook) -> Delivery:
    """A message that says nothing, sent within seconds like any other."""
    return _queue(webhook, event=TEST_EVENT, data={"webhook": webhook.pk, "text": "A test of this webhook."})


def replay(delivery: Delivery) -> Delivery:
    """The same body once more, as a message of its own."""
    return Delivery.objects.create(
        webhook_id=delivery.webhook_id, event=delivery.event, body=delivery.body, next_try_at=Now(), replay_of=delivery.pk
    )


def _queue(webhook: Webhook, *, event: str, data: dict[str, Any]) -> Delivery:
    document: dict[str, Any]
    if webhook.kind == Kind.WEBHOOK:
        document = {"type": event, "timestamp": timezone.now().isoformat(), "project": webhook.project_id, "data": data}
    else:
        subject, text = write_notice(event, data)
        document = {"subject": subject, "text": text} if webhook.kind == Kind.EMAIL else {"text": escape_for_channel(text)}
    body = json.dumps(document, separators=(",", ":"))
    return Delivery.objects.create(webhook=webhook, event=event, body=body, next_try_at=Now())
