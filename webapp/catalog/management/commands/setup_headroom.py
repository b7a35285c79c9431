"""``manage.py setup_headroom``: tables, what ships with the program, and once the administrator, whose secrets it prints once."""

import json
import secrets
from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from webapp.accounts.models import Scope
from webapp.accounts.tokens import create_token
from webapp.catalog.bundled import ensure_bundled
from webapp.schema import NewerDatabase, refuse_newer_database

ADMIN_NAME = "admin"


class Command(BaseCommand):
    help = "Create or update the tables and what ships with the program; on the first run also the administrator."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON, empty object when nothing was made")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            refuse_newer_database()
        except NewerDatabase as error:
            raise CommandError(f"{error.message}. {error.hint}") from None
        call_command("migrate", interactive=False, verbosity=0)
        ensure_bundled()
        made = _make_admin_once()
        if options["json"] or not self.stdout.isatty():
            self.stdout.write(json.dumps(made))
        elif made:
            self.stdout.write(f"user {made['user']}\npassword {made['password']}\nAPI token {made['token']}\n(shown this once)")


def _make_admin_once() -> dict[str, str]:
    """Empty when there is an administrator already."""
    with transaction.atomic():
        if User.objects.filter(is_superuser=True).exists():
            return {}
        password = secrets.token_urlsafe(15)
        admin = User.objects.create_superuser(ADMIN_NAME, password=password)
        _, token = create_token(user=admin, name="made at set-up", days=365, scope=Scope.ADMIN)
    return {"user": ADMIN_NAME, "password": password, "token": token}
