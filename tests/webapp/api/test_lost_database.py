"""Requests while PostgreSQL ends connections, or takes no new ones: with a real server."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.prepared import create_migrated_database

ROOT = Path(__file__).resolve().parents[3]
ASK = """
import sys, django
django.setup()
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from webapp.accounts.models import Scope
from webapp.accounts.tokens import create_token
_, token = create_token(user=User.objects.create_user("ada"), name="t", scope=Scope.READ)
client = Client(raise_request_exception=False, headers={"Host": "localhost", "Authorization": f"Bearer {token}"})
for address in sys.stdin:
    client.cookies[settings.SESSION_COOKIE_NAME] = "a" * 32  # a session that must be looked up; the answer takes it away
    answer = client.get(address.strip())
    connections.close_all()  # as the end of a request does where a server runs
    print(answer.status_code, answer.headers.get("Retry-After", "-"), "database" in answer.content.decode(), flush=True)
"""


class Web:
    def __init__(self, home: Path, url: str) -> None:
        environment = {
            **os.environ,
            "HEADROOM_HOME": str(home),
            "REDIS_URL": f"unix://{home}/none.sock",
            "DJANGO_SETTINGS_MODULE": "webapp.settings",
            "DATABASE_URL": url,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def get(self, address: str) -> str:
        self.process.stdin.write(f"{address}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def end_all(database: psycopg.Connection, name: str) -> None:
    """End the connections to this database; the pool may have made new ones meanwhile."""
    there = database.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", [name]).fetchall()
    for row in there:
        database.execute("SELECT pg_terminate_backend(%s, 10000)", row)  # and wait until it has ended


@pytest.mark.postgres
def test_a_lost_database_is_a_503_for_as_long_as_it_is_lost_and_an_ended_connection_nothing(
    postgresql_url: str, tmp_path: Path
) -> None:
    own_url = create_migrated_database(postgresql_url)
    name = own_url.rpartition("/")[2]
    with psycopg.connect(postgresql_url, autocommit=True) as database:
        web = Web(tmp_path, own_url)
        try:
            assert web.get("/api/v1/jobs") == "200 - False"
            for _ in range(3):
                end_all(database, name)
                assert web.get("/api/v1/jobs") == "200 - False"
            database.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            end_all(database, name)
            for address in ("/api/v1/jobs", "/v1/files", "/"):
                assert web.get(address) == "503 5 True"
            database.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            # the pool asks again after pauses that grow; who comes back after Retry-After is answered
            until_s = time.monotonic() + 60
            while (answer := web.get("/api/v1/jobs")) != "200 - False":
                assert answer == "503 5 True"
                assert time.monotonic() < until_s
        finally:
            web.end()
