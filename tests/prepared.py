"""A HEADROOM_HOME's database and collected files, made once for a run's tests and copied: to make them takes nine seconds of a
processor each time, and every copy is the same until a line of the web or its files changes.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.postgresql import create_database

ROOT = Path(__file__).resolve().parents[1]
FOLDER_VARIABLE = "HEADROOM_TESTS_PREPARED"
"""Names the folder that all processes of a run share, and later runs too (``tests/conftest.py``)."""


def give_tables(home: Path) -> None:
    """Put a migrated SQLite database into a HEADROOM_HOME that has none."""
    shutil.copyfile(_made_home() / "headroom.sqlite3", home / "headroom.sqlite3")


def give_files(home: Path) -> None:
    """Put the pages' files, as ``collectstatic`` leaves them, into a HEADROOM_HOME that has none."""
    shutil.copytree(_made_home() / "static", home / "static")


def create_migrated_database(url: str) -> str:
    """The address of a new database with all tables on the PostgreSQL server that has this address."""
    return create_database(url, template=_migrated_template(url))


@functools.cache
def _migrated_template(url: str) -> str:
    """The name of a database that has been migrated, to which nobody is connected."""
    template = create_database(url)
    with tempfile.TemporaryDirectory() as home:
        _manage(Path(home), "migrate", DATABASE_URL=template)
    return template.rpartition("/")[2]


@functools.cache
def _made_home() -> Path:
    root = Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir(), f"headroom-prepared-{os.getuid()}"))
    root.mkdir(exist_ok=True)
    folder, half_made = root / f"home-{_what_it_rests_on()}", root / "half-made"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in (*root.glob("home-*"), half_made):
                shutil.rmtree(old, ignore_errors=True)
            half_made.mkdir()
            _manage(half_made, "migrate")
            _manage(half_made, "collectstatic", "--noinput")
            half_made.rename(folder)
    return folder


def _manage(home: Path, *words: str, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    own = {"HEADROOM_HOME": str(home), "DJANGO_SETTINGS_MODULE": "webapp.settings", **environment}
    # the checks would load every page
    command = [sys.executable, "manage.py", *words, "--verbosity", "0", "--skip-checks"]
    subprocess.run(command, cwd=ROOT, env={**kept, **own}, check=True)


def _what_it_rests_on() -> str:
    packages = ("django", "django-ninja", "servestatic", "plotly")
    digest = hashlib.sha256("".join(f"{name} {version(name)} " for name in packages).encode())
    files = (*ROOT.joinpath("webapp").rglob("*.py"), *ROOT.joinpath("static").rglob("*"))
    for file in sorted(file for file in files if file.is_file()):
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
