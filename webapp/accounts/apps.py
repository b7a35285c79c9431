"""Django's handle on this app: accounts, projects, tokens, and the audit trail of log-ins."""

from typing import Any

from django.apps import AppConfig
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.db.models.signals import post_migrate, post_save


class AccountsConfig(AppConfig):
    name = "webapp.accounts"

    def ready(self) -> None:
        from webapp.accounts import audit

        post_migrate.connect(_install_triggers, sender=self)
        post_save.connect(_give_home, sender="auth.User")
        user_logged_in.connect(audit.record_login)
        user_login_failed.connect(audit.record_failed_login)
        user_logged_out.connect(audit.record_logout)


def _install_triggers(*, using: str, **_: Any) -> None:
    from webapp.accounts.triggers import install_triggers

    install_triggers(using)


def _give_home(*, instance: Any, created: bool, raw: bool, **_: Any) -> None:
    """Whoever makes an account, by a page, a command or the shell: it can be used at once."""
    from webapp.accounts.projects import give_home

    if created and not raw:
        give_home(instance)
