"""Django's handle on this app: OpenAI's Batch API over generate jobs."""

from django.apps import AppConfig


class BatchesConfig(AppConfig):
    name = "webapp.batches"
