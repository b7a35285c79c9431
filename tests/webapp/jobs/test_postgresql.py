"""The same tests on a real PostgreSQL: what holds on SQLite must hold there, with row locks and skipped rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import llama

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = [f"tests/webapp/{name}" for name in ("accounts", "catalog", "jobs", "api", "live", "webhooks", "monitoring")]


@pytest.mark.postgres
def test_everything_that_touches_the_database_passes_on_postgresql(
    postgresql_url: str, short_folder: Path, llama_folder: Path
) -> None:
    home = short_folder / "headroom-tests-postgresql"
    home.mkdir()
    environment = os.environ | {
        "DATABASE_URL": postgresql_url,
        "HEADROOM_HOME": str(home),
        llama.FOLDER_VARIABLE: str(llama_folder),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not postgres and not browser and not slow",
        "-p",
        "no:cacheprovider",
        *FOLDERS,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]


def test_the_database_under_test_is_the_one_that_was_asked_for(is_postgresql: bool) -> None:
    assert is_postgresql is os.environ.get("DATABASE_URL", "").startswith("postgres")
