"""One of several reconcilers acts, and the next takes over when it dies: with real processes, on both databases."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
CANDIDATE = """
import sys, django
django.setup()
from django.conf import settings
from worker.reconciler import Leadership
leadership = Leadership(settings.HEADROOM_HOME)
for _ in sys.stdin:
    print(leadership.is_held(), flush=True)
"""


class Candidate:
    def __init__(self, home: Path, database_url: str) -> None:
        variables = {
            "HEADROOM_HOME": str(home),
            "DJANGO_SETTINGS_MODULE": "webapp.settings",
            "DATABASE_URL": database_url,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CANDIDATE],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def leads(self) -> bool:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def candidates(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Candidate]]:
    url = f"sqlite:///{tmp_path}/db" if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    both = [Candidate(tmp_path, url), Candidate(tmp_path, url)]
    yield both
    for candidate in both:
        candidate.end()


def test_the_second_leads_only_once_the_first_is_gone(candidates: list[Candidate]) -> None:
    first, second = candidates
    assert first.leads()
    assert not second.leads()
    assert first.leads()
    first.process.kill()
    first.process.wait()
    # the server notices the broken session a moment after the process is gone
    wait_for(second.leads, what="the second to lead")
