"""Django's handle on this app: events of jobs sent to addresses that a project names."""

from django.apps import AppConfig


class WebhooksConfig(AppConfig):
    name = "webapp.webhooks"
