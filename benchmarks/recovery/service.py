"""Measures how soon the service notices workers and leading reconcilers that it has lost.

- workers: processes that hold jobs and renew their leases are killed, at any age of a lease; until each job is back in the queue.
- leaders: the reconciler that leads is killed, again and again; until the other leads.

Settings are the service's own defaults, the claims, renewals and reconcilers its own code, and two reconcilers run. Jobs compute
nothing, since what they compute makes no difference to a lease.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.record import GoalEntry, Row, at_most
from optimizer.base.errors import HeadroomError
from tests.postgresql import running_postgresql

ROOT = Path(__file__).resolve().parents[2]
REQUEUED_GOAL_S = 45.0
LED_GOAL_S = 15.0
JOBS_EACH = 20
LONGEST_S = 180.0
"""A loss that nobody noticed for so long ends the benchmark."""


def lose_parts(*, database: str, is_quick: bool, seed: int) -> Iterator[Row]:
    """A row for workers, and one for leaders."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory()))
        url = stack.enter_context(running_postgresql()) if database == "postgresql" else f"sqlite:///{home}/db.sqlite3"
        service = _Service(home, url)
        stack.callback(service.end)
        yield from _lose_workers(service, num_workers=2 if is_quick else 15, seed=seed)
        yield from _lose_leaders(service, num_times=3 if is_quick else 20, seed=seed)


class _Service:
    """A database with two reconcilers at it."""

    def __init__(self, home: Path, url: str) -> None:
        os.environ.update(
            HEADROOM_HOME=str(home),
            DATABASE_URL=url,
            REDIS_URL=f"unix://{home}/none.sock",
            DJANGO_SETTINGS_MODULE="webapp.settings",
        )
        for name in ("HEADROOM_LEASE_S", "HEADROOM_RECONCILE_S"):
            os.environ.pop(name, None)
        self._home = home
        self._started: list[subprocess.Popen[str]] = []
        subprocess.run([sys.executable, "manage.py", "migrate", "--verbosity", "0"], cwd=ROOT, check=True)
        import django

        django.setup()
        from tests.webapp.conftest import make_bench, make_tiny_model

        make_bench()
        make_tiny_model()
        self.reconcilers = {name: self._start_reconciler(name) for name in ("first", "second")}
        wait_for(self.leader, what="a reconciler to lead")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A Python process of this program."""
        with (self._home / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._started.append(process)
        return process

    def leader(self) -> str:
        """Name of the reconciler whose term has not run out; empty while none leads."""
        from django.db.models.functions import Now

        from webapp.jobs.models import Lead

        holder = Lead.objects.filter(held_until__gt=Now()).values_list("holder", flat=True).first() or ""
        return holder.partition(":")[0]

    def replace(self, name: str) -> None:
        """Start a killed reconciler again."""
        self.reconcilers[name] = self._start_reconciler(name)

    def _start_reconciler(self, name: str) -> subprocess.Popen[str]:
        return self.start("-m", "worker.reconciler", HEADROOM_WORKER_NAME=name)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def _lose_workers(service: _Service, *, num_workers: int, seed: int) -> Iterator[Row]:
    from webapp.jobs.models import Event

    times = random.Random(seed)
    holders = [
        service.start("-m", "benchmarks.recovery.holder", str(JOBS_EACH), str(seed + number)) for number in range(num_workers)
    ]
    jobs: list[list[str]] = [json.loads(holder.stdout.readline()) for holder in holders if holder.stdout is not None]
    killed_at: dict[str, float] = {}
    for holder, ids in zip(holders, jobs, strict=True):
        time.sleep(times.uniform(0.5, 4))
        holder.kill()
        killed_at |= dict.fromkeys(ids, time.time())
    requeued = Event.objects.filter(kind="requeued", job__in=killed_at)
    wait_for(lambda: requeued.values("job").distinct().count() == len(killed_at), what="all jobs to be back in the queue")
    taken = sorted(at.timestamp() - killed_at[pk] for pk, at in requeued.values_list("job", "at"))
    if len(taken) != len(killed_at) or taken[0] < 0:
        raise HeadroomError(f"{len(killed_at)} jobs went back {len(taken)} times, the first after {taken[0]:.1f} s")
    yield {
        "what": "workers",
        "num_workers": num_workers,
        "num_jobs": len(taken),
        "median_s": round(_quantile(taken, 0.5), 2),
        "p99_s": round(_quantile(taken, 0.99), 2),
        "worst_s": round(taken[-1], 2),
    }


def _lose_leaders(service: _Service, *, num_times: int, seed: int) -> Iterator[Row]:
    times, taken = random.Random(seed), []
    for _ in range(num_times):
        time.sleep(times.uniform(2, 7))  # until the other has begun and asked, and at any age of the term
        first = wait_for(service.leader, what="a reconciler to lead")
        service.reconcilers[first].kill()
        killed_s = time.monotonic()
        wait_for(lambda first=first: service.leader() not in ("", first), what="another to lead")  # type: ignore[misc]
        taken.append(time.monotonic() - killed_s)
        service.replace(first)
    taken.sort()
    yield {
        "what": "leaders",
        "num_times": num_times,
        "median_s": round(_quantile(taken, 0.5), 2),
        "worst_s": round(taken[-1], 2),
    }


def wait_for(condition: Callable[[], str | bool], *, what: str) -> str:
    """The condition's first true answer, asked for twenty times a second. Raises HeadroomError."""
    until_s = time.monotonic() + LONGEST_S
    while time.monotonic() < until_s:
        if found := condition():
            return str(found)
        time.sleep(0.05)
    raise HeadroomError(f"waited {LONGEST_S:.0f} s for {what}")


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """The goals, of the rows that there are."""
    found = {row["what"]: row for row in rows}
    workers, leaders = found.get("workers", {}), found.get("leaders", {})
    return {
        "worker lost to job requeued, p99 (s)": at_most(workers.get("p99_s"), REQUEUED_GOAL_S),
        "leading reconciler lost to led again, worst (s)": at_most(leaders.get("worst_s"), LED_GOAL_S),
    }

