"""The same tests on a real PostgreSQL: what holds on SQLite must hold there, with row locks and skipped rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import llama

ROOT = Path(__file__).resolve().parents[3]
HALVES = (("jobs", "live", "webhooks", "monitoring"), ("accounts", "catalog", "api"))
NOT_REPEATED = (
    "accounts/test_permissions.py",
    "api/routes/test_bad_estimates.py",
    "api/routes/test_generation_estimates.py",
    "api/routes/test_plan_questions.py",
    "catalog/files",
    "catalog/hub",
    "catalog/test_gguf_model.py",
    "catalog/test_linked.py",
)
"""Long, and about roles, prices and files: no database answers differently there."""


@pytest.mark.postgres
@pytest.mark.breadth
@pytest.mark.parametrize("folders", HALVES, ids=" ".join)
def test_everything_that_touches_the_database_passes_on_postgresql(
    postgresql_url: str, short_folder: Path, llama_folder: Path, folders: tuple[str, ...]
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
        *[f"--ignore=tests/webapp/{name}" for name in NOT_REPEATED],
        *[f"tests/webapp/{name}" for name in folders],
    ]
    for name in NOT_REPEATED:
        assert (ROOT / "tests" / "webapp" / name).exists()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]


def test_the_database_under_test_is_the_one_that_was_asked_for(is_postgresql: bool) -> None:
    assert is_postgresql is os.environ.get("DATABASE_URL", "").startswith("postgres")
