"""Addresses that hear of a project's jobs, and each message to them. Rows change only through ``actions.py``."""

from django.conf import settings
from django.db import models

from webapp.accounts.models import Project
from webapp.ids import new_delivery_id, new_webhook_id

TEST_EVENT = "webhook.test"
EVENTS = (
    "job.created",
    "job.started",
    "job.requeued",
    "job.paused",
    "job.resumed",
    "job.succeeded",
    "job.failed",
    "job.cancelled",
)
"""Events that can be subscribed to; the second word is the kind of the job's event."""


class Kind(models.TextChoices):
    WEBHOOK = "webhook", "Webhook"
    """The whole event, signed, for programs."""
    SLACK = "slack", "Slack"
    """A sentence to a channel, by an incoming webhook of Slack or of what understands the same."""
    EMAIL = "email", "E-mail"
    """A sentence by mail."""


class Webhook(models.Model):
    """One address. Its secret is not stored: it follows from the service's key, this id and ``secret_number``."""

    id = models.CharField(primary_key=True, max_length=48, default=new_webhook_id)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="webhooks")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL)
    kind = models.CharField(max_length=10, choices=Kind.choices, default=Kind.WEBHOOK)
    url = models.CharField(max_length=500)
    """For a mail, the address alone."""
    events = models.JSONField()
    """Names out of EVENTS; empty for all."""
    secret_number = models.IntegerField(default=1)
    """Raised to make another secret."""
    is_active = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["project", "id"]

    def __str__(self) -> str:
        return self.shown_url

    @property
    def shown_url(self) -> str:
        """A channel's address lets everybody write who knows it, so only its ends are shown."""
        if self.kind != Kind.SLACK:
            return self.url
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/…{self.url[-4:]}"


class State(models.TextChoices):
    PENDING = "pending"
    """To be sent, for the first time or again."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up."""


class Delivery(models.Model):
    """One message to one address, kept with how it went. Made in the transaction of what it reports."""

    id = models.CharField(primary_key=True, max_length=48, default=new_delivery_id)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
    event = models.CharField(max_length=40)
    body = models.TextField()
    """The JSON that is sent, to the byte."""
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    num_tries = models.IntegerField(default=0)
    next_try_at = models.DateTimeField(null=True)
    """While it is pending; pushed ahead by whoever is sending it, so that no other does."""
    status_code = models.IntegerField(null=True)
    """Status of the last answer; None where there was none."""
    trouble = models.CharField(max_length=300, blank=True)
    """Why the last try failed, or how the answer began."""
    duration_ms = models.IntegerField(null=True)
    """Moment of the last try."""
    replay_of = models.CharField(max_length=48, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    tried_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["state", "next_try_at"]),  # those that are due
            models.Index(fields=["webhook", "-id"]),  # an address's log
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.webhook_id}"
