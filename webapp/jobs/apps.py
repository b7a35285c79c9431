"""Django's handle on this app: jobs, and the trigger that keeps an ended job ended."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class JobsConfig(AppConfig):
    name = "webapp.jobs"

    def ready(self) -> None:
        post_migrate.connect(_install_triggers, sender=self)


def _install_triggers(*, using: str, **_: Any) -> None:
    from webapp.jobs.triggers import install_triggers

    install_triggers(using)
