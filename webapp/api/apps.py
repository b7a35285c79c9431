"""Django's handle on this app: The REST API; no tables of its own."""

from django.apps import AppConfig


class ApiConfig(AppConfig):
    name = "webapp.api"
