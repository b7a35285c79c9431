"""``/projects/{id}/webhooks`` and ``/webhooks/{id}``: for administrators of the project."""

from datetime import datetime
from typing import Any, Literal

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Router, Schema, Status
from pydantic import Field

from webapp.accounts.access import reachable_projects
from webapp.accounts.audit import note_target
from webapp.http.auth import owner_of
from webapp.http.idempotency import idempotent, remember
from webapp.http.paging import page_of
from webapp.webhooks import actions
from webapp.webhooks.models import Delivery, Webhook
from webapp.webhooks.queries import deliveries_visible_to, webhooks_visible_to

router = Router()


class WebhookAnswer(Schema):
    """A webhook without its secret."""

    id: str
    project: str
    kind: Literal["webhook", "slack", "email"]
    url: str = Field(description="of a channel only its ends, since who knows it may write there")
    events: list[str] = Field(description="empty for all")
    is_active: bool
    created_at: datetime


class NewWebhookAnswer(WebhookAnswer):
    """With the secret, this once; empty for what is not signed."""

    secret: str


class WebhooksAnswer(Schema):
    """All of a project."""

    results: list[WebhookAnswer]


class WebhookBody(Schema, extra="forbid"):
    """The address and the events of a webhook."""

    url: str = Field(max_length=500, description="to post to, or a mail address")
    kind: Literal["webhook", "slack", "email"] | None = Field(default=None, description="seen by the address if not given")
    events: list[str] = Field(
        default_factory=list, max_length=20, description="empty for all; for slack and email the endings of jobs"
    )


class WebhookChange(Schema, extra="forbid"):
    """Hold it back, or let it hear again."""

    is_active: bool


class DeliveryAnswer(Schema):
    """One message and how it went."""

    id: str
    event: str
    state: Literal["pending", "delivered", "failed"]
    num_tries: int
    next_try_at: datetime | None
    status_code: int | None
    trouble: str
    duration_ms: int | None
    replay_of: str
    created_at: datetime
    tried_at: datetime | None
    body: str


class DeliveriesAnswer(Schema):
    """A cursor page, newest first."""

    results: list[DeliveryAnswer]
    next: str | None
    previous: str | None


@router.get("/projects/{project_id}/webhooks", response=WebhooksAnswer, tags=["webhooks"])
def list_webhooks(request: HttpRequest, project_id: str) -> dict[str, Any]:
    """Addresses that hear of the project's jobs."""
    return {"results": [_webhook(row) for row in webhooks_visible_to(request.user).filter(project=project_id)]}


@router.post("/projects/{project_id}/webhooks", response={201: NewWebhookAnswer}, tags=["webhooks"])
def make_webhook(
    request: HttpRequest, project_id: str, body: WebhookBody, response: HttpResponse
) -> Status[dict[str, Any]]:
    """A new address, and the secret that signs what is sent there, shown this once."""
    project = reachable_projects(request.user).filter(pk=project_id).first()
    if project is None:
        raise Http404
    row, secret = actions.create_webhook(owner_of(request), project, url=body.url, events=body.events, kind=body.kind or "")
    note_target(request, row.pk, detail=row.shown_url)
    response["Location"] = f"/api/v1/webhooks/{row.pk}"
    return Status(201, {**_webhook(row), "secret": secret})


@router.get("/webhooks/{webhook_id}", response=WebhookAnswer, tags=["webhooks"])
def get_webhook(request: HttpRequest, webhook_id: str) -> dict[str, Any]:
    return _webhook(_find(request, webhook_id))


@router.patch("/webhooks/{webhook_id}", response=WebhookAnswer, tags=["webhooks"])
def change_webhook(request: HttpRequest, webhook_id: str, body: WebhookChange) -> dict[str, Any]:
    row = _find(request, webhook_id)
    actions.set_active(row, is_active=body.is_active)
    return _webhook(row)


@router.delete("/webhooks/{webhook_id}", response={204: None}, tags=["webhooks"])
def delete_webhook(request: HttpRequest, webhook_id: str) -> Status[None]:
    """With its log."""
    actions.delete_webhook(_find(request, webhook_id))
    return Status(204, None)


@router.post("/webhooks/{webhook_id}/secret", response=NewWebhookAnswer, tags=["webhooks"])
def renew_secret(request: HttpRequest, webhook_id: str) -> dict[str, Any]:
    """Another secret, shown this once; the one before signs nothing from now on."""
    row = _find(request, webhook_id)
    secret = actions.renew_secret(row)
    return {**_webhook(row), "secret": secret}


@router.post("/webhooks/{webhook_id}/test", response={202: DeliveryAnswer}, tags=["webhooks"])
@idempotent
def send_test(request: HttpRequest, webhook_id: str) -> HttpResponse:
    """Send a ``webhook.test``; how it went is in the log within seconds."""
    with transaction.atomic():
        return _accepted(request, actions.send_test(_find(request, webhook_id)))


@router.get("/webhooks/{webhook_id}/deliveries", response=DeliveriesAnswer, tags=["webhooks"])
def list_deliveries(request: HttpRequest, webhook_id: str, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """List the deliveries with their outcomes, newest first, for 30 days."""
    rows = deliveries_visible_to(request.user).filter(webhook=_find(request, webhook_id))
    return page_of(request, rows, lambda found: [_delivery(row) for row in found])


@router.post("/deliveries/{delivery_id}/replay", response={202: DeliveryAnswer}, tags=["webhooks"])
@idempotent
def replay(request: HttpRequest, delivery_id: str) -> HttpResponse:
    """The same body once more, as a message of its own."""
    row = deliveries_visible_to(request.user).filter(pk=delivery_id).first()
    if row is None:
        raise Http404
    with transaction.atomic():
        return _accepted(request, actions.replay(row))


def _find(request: HttpRequest, webhook_id: str) -> Webhook:
    row = webhooks_visible_to(request.user).filter(pk=webhook_id).first()
    if row is None:
        raise Http404
    return row


def _accepted(request: HttpRequest, row: Delivery) -> HttpResponse:
    return remember(request, status=202, body=DeliveryAnswer(**_delivery(row)).model_dump(mode="json"))


def _webhook(row: Webhook) -> dict[str, Any]:
    return {
        "id": row.pk,
        "project": row.project_id,
        "kind": row.kind,
        "url": row.shown_url,
        "events": row.events,
        "is_active": row.is_active,
        "created_at": row.created_at,
    }


def _delivery(row: Delivery) -> dict[str, Any]:
    row.refresh_from_db()  # its times are the database's
    return {name: getattr(row, name) for name in DeliveryAnswer.model_fields if name != "id"} | {"id": row.pk}
