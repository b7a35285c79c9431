"""The only way to read this app's rows: for who administers their project."""

from typing import Any

from django.db.models import QuerySet

from webapp.accounts.access import visible_rows
from webapp.webhooks.models import Delivery, Webhook


def webhooks_visible_to(user: Any) -> QuerySet[Webhook]:
    """The permission table has seen to the role."""
    return Webhook.objects.filter(visible_rows(user)).select_related("project")


def deliveries_visible_to(user: Any) -> QuerySet[Delivery]:
    return Delivery.objects.filter(webhook__in=webhooks_visible_to(user).values("pk"))
