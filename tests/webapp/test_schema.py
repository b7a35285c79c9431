"""A database that a newer program has changed is refused before anything of it is used."""

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from webapp.schema import NewerDatabase, end_on_newer_database, refuse_newer_database

pytestmark = pytest.mark.django_db


def test_a_database_of_this_program_is_taken() -> None:
    refuse_newer_database()


def test_one_that_a_newer_program_changed_is_refused_in_words() -> None:
    MigrationRecorder(connection).record_applied("jobs", "9999_from_the_future")
    with pytest.raises(NewerDatabase, match=r"it has jobs\.9999_from_the_future, which this program") as raised:
        refuse_newer_database()
    assert "headroom restore" in raised.value.hint
    with pytest.raises(CommandError, match=r"9999_from_the_future.*nothing was changed"):
        call_command("setup_headroom")
    with pytest.raises(SystemExit, match="headroom: the database was last used by a newer Headroom"):
        end_on_newer_database()


def test_a_newer_program_s_new_app_is_refused_too() -> None:
    MigrationRecorder(connection).record_applied("teams", "0001_initial")
    with pytest.raises(NewerDatabase, match=r"it has teams\.0001_initial, which this program"):
        refuse_newer_database()


def test_a_newer_django_makes_no_newer_database() -> None:
    MigrationRecorder(connection).record_applied("auth", "9999_from_the_future")
    refuse_newer_database()
