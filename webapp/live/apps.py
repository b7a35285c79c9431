"""Django's handle on this app: Streams to browsers; no tables."""

from django.apps import AppConfig


class LiveConfig(AppConfig):
    name = "webapp.live"
