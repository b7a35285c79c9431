"""Refuses a database that a newer program has changed, in words, before anything is read from it or written to it."""

from importlib.metadata import version

from django.apps import apps
from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader

from optimizer.base.errors import HeadroomError


class NewerDatabase(HeadroomError):
    """The tables were changed by a program that came after this one."""

    code = "newer_database"


def refuse_newer_database() -> None:
    """Raises NewerDatabase for a migration that this program does not know, of an app that it knows or of one that it does not.

    Django's own apps may be ahead: their releases are installed by themselves. A database that does not answer is left to whoever
    asks it next.
    """
    try:
        loader = MigrationLoader(connection)
    except DatabaseError:
        return
    # an app that this program gives up must stay known here, or databases that once had it would be taken for newer ones
    foreign = {config.label for config in apps.get_app_configs() if not config.name.startswith("webapp.")}
    applied = (key for key in loader.applied_migrations if key not in loader.disk_migrations)
    unknown = sorted(".".join(key) for key in applied if key[0] not in foreign)
    if unknown:
        raise NewerDatabase(
            f"the database was last used by a newer Headroom: it has {', '.join(unknown[:5])}, "
            f"which this program, {version('headroom')}, does not know; nothing was changed",
            hint="Start the newer program again, or restore a backup that was made before the update (headroom restore).",
        )


def end_on_newer_database() -> None:
    """Ends a process of the service as it starts; what is printed says why and what to do."""
    try:
        refuse_newer_database()
    except NewerDatabase as error:
        raise SystemExit(f"headroom: {error.message}\n  {error.hint}") from None
