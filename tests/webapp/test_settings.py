"""Settings that the environment changes, in a process of their own, since settings are read once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINT = """
import django
django.setup()
from django.db import connection
print(connection.cursor().execute('PRAGMA synchronous').fetchone())
"""


def read_synchronous(home: Path, value: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: text for name, text in os.environ.items() if name != "DATABASE_URL"}
    environment |= {"HEADROOM_HOME": str(home), "DJANGO_SETTINGS_MODULE": "webapp.settings", "HEADROOM_SQLITE_SYNCHRONOUS": value}
    command = [sys.executable, "-c", PRINT]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("value", "level"), [("NORMAL", "(1,)"), ("FULL", "(2,)")])
def test_sqlite_waits_for_the_disk_as_the_environment_says(tmp_path: Path, value: str, level: str) -> None:
    assert read_synchronous(tmp_path, value).stdout.strip() == level


def test_another_way_to_wait_is_refused_by_name(tmp_path: Path) -> None:
    said = read_synchronous(tmp_path, "OFF").stderr
    assert "HEADROOM_SQLITE_SYNCHRONOUS is 'OFF'; allowed: NORMAL, FULL" in said
