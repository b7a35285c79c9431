"""One of several reconcilers acts, and the next takes over when it dies: with real processes, on both databases."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.prepared import create_migrated_database, give_tables
from tests.worker.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
LOST_JOB = """
import sys, django
django.setup()
from django.utils import timezone
from tests.webapp.conftest import make_bench, make_text, make_tiny_model
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import create_job
from webapp.attempts.claiming import claim_job
from webapp.jobs.models import Job
is_new = not Machine.objects.exists()
machine = make_bench() if is_new else Machine.objects.get()
model = make_tiny_model() if is_new else Model.objects.get()
dataset = make_text() if is_new else Dataset.objects.get()
job = create_job(owner=None, spec={"name": "a", "workload": {"num_steps": 10}}, model=model, dataset=dataset, plan=None,
                 prediction=None, machine=None, actor="user:test")
assert claim_job(worker="w:1", machine=machine, job_id=job.pk, lease_s=-1)
print(job.pk)
"""
STATE = """
import sys, django
django.setup()
from webapp.jobs.models import Job
print(Job.objects.get(pk=sys.argv[1]).state)
"""


class Service:
    """A database and the reconcilers at it."""

    def __init__(self, home: Path, url: str) -> None:
        self.url = url
        self._home = home
        self._environment = {
            **os.environ,
            "HEADROOM_HOME": str(home),
            "REDIS_URL": f"unix://{home}/none.sock",
            "DJANGO_SETTINGS_MODULE": "webapp.settings",
            "DATABASE_URL": url,
            "HEADROOM_LEASE_S": "1",
            "HEADROOM_RECONCILE_S": "0.2",
        }
        self._started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str) -> str:
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, cwd=ROOT, env=self._environment, check=True, stdout=subprocess.PIPE, text=True)
        return ended.stdout.strip()

    def start_reconciler(self) -> subprocess.Popen[str]:
        log = self.log_of(len(self._started)).open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.reconciler"],
            cwd=ROOT,
            env=self._environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        self._started.append(process)
        return process

    def log_of(self, number: int) -> Path:
        return self._home / f"reconciler-{number}.log"

    def wait_for_log(self, number: int, text: str, *, count: int = 1) -> None:
        wait_for(
            lambda: self.log_of(number).read_text().count(text) >= count,
            what=f"{text!r} in the log of reconciler {number}",
            timeout_s=60,
        )

    def lose_a_job(self) -> str:
        """A job whose worker is gone, and whose lease has run out."""
        return self.run("-c", LOST_JOB)

    def wait_until_requeued(self, job_id: str) -> None:
        wait_for(lambda: self.run("-c", STATE, job_id) == "queued", what="the job to go back to the queue", timeout_s=60)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def on_postgresql(postgresql_url: str, tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path, create_migrated_database(postgresql_url))
    yield service
    service.end()


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Service]:
    give_tables(tmp_path)
    service = Service(tmp_path, f"sqlite:///{tmp_path}/headroom.sqlite3")
    yield service
    service.end()


@pytest.fixture(params=["on_sqlite", pytest.param("on_postgresql", marks=pytest.mark.postgres)])
def service(request: pytest.FixtureRequest) -> Service:
    return request.getfixturevalue(request.param)


@pytest.mark.breadth
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_second_leads_only_once_the_first_is_lost(service: Service, how: signal.Signals) -> None:
    first = service.start_reconciler()
    service.wait_for_log(0, "leads from now on")
    service.start_reconciler()
    service.wait_until_requeued(service.lose_a_job())
    assert "leads from now on" not in service.log_of(1).read_text()
    first.send_signal(how)
    service.wait_for_log(1, "leads from now on")
    service.wait_until_requeued(service.lose_a_job())


def test_the_first_to_go_on_after_a_stop_notices_that_another_leads(on_sqlite: Service) -> None:
    first = on_sqlite.start_reconciler()
    on_sqlite.wait_for_log(0, "leads from now on")
    on_sqlite.start_reconciler()
    first.send_signal(signal.SIGSTOP)
    on_sqlite.wait_for_log(1, "leads from now on")
    first.send_signal(signal.SIGCONT)
    on_sqlite.wait_for_log(0, "no longer leads")


@pytest.mark.postgres
def test_a_lock_time_out_does_not_make_the_leader_deaf(on_postgresql: Service) -> None:
    on_postgresql.start_reconciler()
    on_postgresql.wait_until_requeued(on_postgresql.lose_a_job())
    with psycopg.connect(on_postgresql.url.replace("postgres://", "postgresql://")) as connection:
        connection.execute("LOCK TABLE jobs_job IN ACCESS EXCLUSIVE MODE")
        on_postgresql.wait_for_log(0, "lock timeout", count=3)  # the program's own lock_timeout, 3 s; each pass of a while
    on_postgresql.wait_until_requeued(on_postgresql.lose_a_job())


@pytest.mark.postgres
def test_ended_connections_do_not_make_the_leader_deaf(on_postgresql: Service) -> None:
    on_postgresql.start_reconciler()
    on_postgresql.wait_until_requeued(on_postgresql.lose_a_job())
    with psycopg.connect(on_postgresql.url.replace("postgres://", "postgresql://"), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
    on_postgresql.wait_until_requeued(on_postgresql.lose_a_job())
