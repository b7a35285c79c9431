"""Its own process, ``python -m worker.reconciler``: every few seconds finds what was lost and puts it right.

Leases that ran out, hints that never arrived, jobs past their limits, files that belong to nobody. Any number may run; one at a
time leads, by an advisory lock on PostgreSQL, by a ``flock`` on SQLite, whose database is on this machine by nature. Each step
is a guarded move, so a second leader for a moment would do no harm.
"""

import fcntl
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from worker import django_setup  # noqa: F401

# isort: split
from django.db import Error as DatabaseError
from django.db import connection

from webapp.attempts.reconciling import enforce_deadlines, expire_leases, forget_old_offers, resend_hints
from webapp.batches.actions import advance_batches
from webapp.catalog.hub.download import advance_downloads
from webapp.catalog.removal import purge_deleted
from webapp.catalog.uploads import drop_abandoned
from webapp.jobs.models import LIVE_STATES, Job
from webapp.webhooks.sending import forget_old, send_due
from worker.config import WorkerConfig

logger = logging.getLogger(__name__)

ADVISORY_LOCK_KEY = 0x4845_4144
"""``HEAD``; one number per program that shares the database."""
SPOOL_AGE_S = 24 * 3600
"""An upload that has not grown for a day is given up."""
FORGET_EVERY_S = 3600
"""Between two looks for old messages to webhooks."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STAGED = re.compile(r"\.tmp-step-\d+-f(?P<fence>\d+)")


class Leadership:
    """Decides whether this process is the one that acts."""

    def __init__(self, home: Path) -> None:
        self._path = home / "run" / "reconciler.lock"
        self._fd: int | None = None

    def is_held(self) -> bool:
        """Ask again before each pass: a database that restarted has forgotten the lock."""
        return self._ask_postgresql() if connection.vendor == "postgresql" else self._ask_flock()

    def _ask_postgresql(self) -> bool:
        with connection.cursor() as cursor:
            # held by the session; the same session may take it again, so asking twice is safe
            cursor.execute("SELECT pg_try_advisory_lock(%s)", [ADVISORY_LOCK_KEY])
            row = cursor.fetchone()
        return bool(row and row[0])

    def _ask_flock(self) -> bool:
        if self._fd is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Reconciler:
    """One pass at a time."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._leadership = Leadership(config.home)
        self._leading_since: float | None = None
        self._has_ended = threading.Event()

    def run(self, *, pause: Callable[[float], bool]) -> None:
        """Pass after pass until ``pause`` answers that it is time to end."""
        threading.Thread(target=self._keep_batches, name="batches", daemon=True).start()
        threading.Thread(target=self._keep_webhooks, name="webhooks", daemon=True).start()
        threading.Thread(target=self._keep_downloads, name="downloads", daemon=True).start()
        try:
            self._run(pause)
        finally:
            self._has_ended.set()

    def _keep_batches(self) -> None:
        """A thread of its own: pricing a batch takes seconds, counting a large file's tokens minutes; leases must not wait."""
        self._keep(advance_batches, what="batches", logged_as="moved on")

    def _keep_webhooks(self) -> None:
        """A thread of its own: an address that does not answer takes seconds."""
        forgotten_at_s = float("-inf")

        def pass_once() -> list[str]:
            nonlocal forgotten_at_s
            if time.monotonic() - forgotten_at_s > FORGET_EVERY_S:
                forget_old()
                forgotten_at_s = time.monotonic()
            return send_due()

        self._keep(pass_once, what="webhooks", logged_as="delivered")

    def _keep_downloads(self) -> None:
        """A thread of its own: a model takes hours. It stops between two pieces when this process no longer leads."""
        self._keep(lambda: advance_downloads(self._should_rest), what="downloads", logged_as="downloaded")

    def _should_rest(self) -> bool:
        return self._has_ended.is_set() or self._leading_since is None

    def _keep(self, pass_once: Callable[[], list[str]], *, what: str, logged_as: str) -> None:
        """Pass after pass while this process leads."""
        while not self._has_ended.wait(self._config.reconcile_s):
            if self._leading_since is None:
                continue
            try:
                _log_each(logged_as, pass_once())
            except DatabaseError as error:
                logger.warning("%s wait, the database cannot be used: %s", what, error)
            except Exception:
                logger.exception("%s wait; a fault of the program", what)
            finally:
                connection.close()

    def _run(self, pause: Callable[[float], bool]) -> None:
        while True:
            try:
                self.reconcile_once()
            except DatabaseError as error:
                logger.warning("the database cannot be used, will try again: %s", error)
                connection.close()
                self._leading_since = None
            if pause(self._config.reconcile_s):
                return

    def reconcile_once(self) -> None:
        """Raises the database's error; what is left undone is done by the next pass."""
        if not self._leadership.is_held():
            self._leading_since = None
            return
        if self._leading_since is None:
            self._leading_since = time.monotonic()
        if self._knows_leases:
            _log_each("requeued or ended, its lease ran out", expire_leases())
        _log_each("hinted again", resend_hints())
        _log_each("asked to stop at its limit", enforce_deadlines())
        forget_old_offers()
        _log_each("deleted for good", purge_deleted())
        _log_each("abandoned upload removed", drop_abandoned())
        remove_dead_staging(self._config.home)
        remove_old_spool(self._config.home)

    @property
    def _knows_leases(self) -> bool:
        """Not before one lease has passed with the database up: the outage kept live workers from renewing theirs."""
        return self._leading_since is not None and time.monotonic() - self._leading_since >= self._config.lease_s


def remove_dead_staging(home: Path) -> int:
    """Half-written checkpoints whose attempt no longer holds the job; the number of folders removed."""
    staged = list((home / "jobs").glob("*/checkpoints/.tmp-*"))
    if not staged:
        return 0
    job_ids = {path.parent.parent.name for path in staged}
    live = dict(Job.objects.filter(pk__in=job_ids, state__in=LIVE_STATES).values_list("pk", "fence"))
    dead = [path for path in staged if live.get(path.parent.parent.name) != _fence_of(path)]
    return _remove_all(dead)


def remove_old_spool(home: Path) -> int:
    """Uploads that broke off more than a day ago; the number of entries removed."""
    oldest_s = time.time() - SPOOL_AGE_S
    return _remove_all([path for path in (home / "spool").glob("*") if _modified_s(path) < oldest_s])


def _fence_of(path: Path) -> int | None:
    match = _STAGED.match(path.name)
    return int(match["fence"]) if match else None


def _modified_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _remove_all(paths: list[Path]) -> int:
    for path in paths:
        logger.info("removed %s, which belongs to nobody", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return len(paths)


def _log_each(what: str, job_ids: list[str]) -> None:
    for job_id in job_ids:
        logger.info("%s: %s", job_id, what)


def _wait_for_signal(seconds: float) -> bool:
    """True when TERM or INT came. They are blocked elsewhere, so that none cuts through a transaction."""
    return signal.sigtimedwait(_ENDING_SIGNALS, seconds) is not None


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s reconciler %(levelname)s %(message)s")
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    Reconciler(WorkerConfig.from_environment()).run(pause=_wait_for_signal)


if __name__ == "__main__":
    main()
