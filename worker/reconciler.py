"""Its own process, ``python -m worker.reconciler``: every few seconds finds what was lost and puts it right.

Leases that ran out, hints that never arrived, jobs past their limits, files that belong to nobody. Any number may run; one at a
time leads, by a term in the database (``webapp.attempts.leading``). Each step is a guarded move, so a second leader for a moment
would do no harm, and a step that fails keeps none of the others from being done.
"""

import contextlib
import logging
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from worker import django_setup  # noqa: F401

# isort: split
from django.db import Error as DatabaseError
from django.db import connection

from optimizer.runtime.job.export.place import ARTIFACTS_FOLDER, fence_of_artifacts
from webapp.attempts.leading import is_unbroken_for, record_pass, release_lead, take_lead
from webapp.attempts.reconciling import (
    enforce_deadlines,
    expire_leases,
    expire_members,
    forget_old_offers,
    resend_hints,
)
from webapp.batches.actions import advance_batches
from webapp.catalog.hub.download import advance_downloads
from webapp.catalog.removal import purge_deleted
from webapp.catalog.uploads import drop_abandoned
from webapp.jobs.about import purge_deleted_jobs
from webapp.jobs.checkpoints import BRANCH_FOLDER, SOURCE_FOLDER
from webapp.jobs.models import LIVE_STATES, Artifact, Job
from webapp.planning.moving_on import MovingOn
from webapp.planning.waiting import plan_waiting_jobs
from webapp.schema import end_on_newer_database
from webapp.webhooks.sending import Sender, forget_old
from worker.config import WorkerConfig

logger = logging.getLogger(__name__)

SPOOL_AGE_S = 24 * 3600
"""An upload that has not grown for a day is given up."""
FORGET_EVERY_S = 3600
"""Between two looks for old messages to webhooks."""
TRY_EVERY_S = 1.0
"""Between two tries to take the lead from another. A term is two passes, so by default nobody leads for 11 s at most."""
_MIN_TERM_S = 2.0
_MIN_GAP_S = 10.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE = 500
"""Folders whose rows one query asks for."""
_STAGED = re.compile(r"\.tmp-step-\d+-f(?P<fence>\d+)")


class Leadership:
    """This process's part in the question which one acts."""

    def __init__(self, config: WorkerConfig) -> None:
        # a process that is started again may get the same number; it is another one nevertheless
        self._holder = f"{config.name}:{secrets.token_hex(4)}"
        self._term_s = max(_MIN_TERM_S, 2 * config.reconcile_s)
        self._gap_s = max(_MIN_GAP_S, config.lease_s / 2)
        self._until_s = float("-inf")
        self._is_led = False

    @property
    def is_held(self) -> bool:
        """True, as far as is known without asking, while the term has not run out."""
        return time.monotonic() < self._until_s

    def ask(self) -> bool:
        """Take the lead or renew it; ask before each pass."""
        asked_s = time.monotonic()
        is_led = take_lead(self._holder, term_s=self._term_s, gap_s=self._gap_s)
        self._until_s = asked_s + self._term_s if is_led else float("-inf")
        if is_led != self._is_led:
            logger.info("leads from now on" if is_led else "no longer leads; another reconciler does")
        self._is_led = is_led
        return is_led

    def record_pass(self) -> None:
        record_pass(self._holder)

    def release(self) -> None:
        with contextlib.suppress(DatabaseError):
            release_lead(self._holder)


class Reconciler:
    """One pass at a time."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._leadership = Leadership(config)
        self._failed_at_s = float("-inf")
        self._has_ended = threading.Event()

    def run(self, *, pause: Callable[[float], bool]) -> None:
        """Pass after pass until ``pause`` answers that it is time to end."""
        beside = {
            "batches": self._keep_batches,
            "webhooks": self._keep_webhooks,
            "downloads": self._keep_downloads,
            "waiting jobs": self._keep_waiting_jobs,
            "cleaning": self._keep_clean,
        }
        for name, keep in beside.items():
            threading.Thread(target=keep, name=name, daemon=True).start()
        try:
            while True:
                leads = self.reconcile_once()
                if pause(self._config.reconcile_s if leads else min(TRY_EVERY_S, self._config.reconcile_s)):
                    return
        finally:
            self._has_ended.set()
            self._leadership.release()

    def _keep_batches(self) -> None:
        """A thread of its own: pricing a batch takes seconds, counting a large file's tokens minutes; leases must not wait."""
        self._keep(advance_batches, what="batches", logged_as="moved on")

    def _keep_webhooks(self) -> None:
        """A thread of its own: an address that does not answer takes seconds."""
        sender, forgotten_at_s = Sender(), float("-inf")

        def pass_once() -> list[str]:
            nonlocal forgotten_at_s
            if time.monotonic() - forgotten_at_s > FORGET_EVERY_S:
                forget_old()
                forgotten_at_s = time.monotonic()
            return sender.send_due()

        self._keep(pass_once, what="webhooks", logged_as="delivered")

    def _keep_waiting_jobs(self) -> None:
        """A thread of its own: a search takes seconds."""
        moving_on = MovingOn()

        def pass_once() -> list[str]:
            return [*plan_waiting_jobs(), *moving_on.pass_once()]

        self._keep(pass_once, what="jobs that await a plan", logged_as="planned, or ended for want of a plan")

    def _keep_downloads(self) -> None:
        """A thread of its own: a model takes hours. It stops between two pieces when this process no longer leads."""
        self._keep(lambda: advance_downloads(self._should_rest), what="downloads", logged_as="downloaded")

    def _keep_clean(self) -> None:
        """A thread of its own: the folder of a large model takes minutes to remove."""
        settled: set[Path] = set()

        def pass_once() -> list[str]:
            forget_old_offers()
            removed = [*purge_deleted(), *purge_deleted_jobs(), *drop_abandoned()]
            remove_dead_staging(self._config.home)
            remove_dead_artifacts(self._config.home, settled=settled)
            remove_old_spool(self._config.home)
            remove_unused_checkpoints(self._config.home)
            return removed

        self._keep(pass_once, what="what is to be removed", logged_as="removed for good")

    def _should_rest(self) -> bool:
        return self._has_ended.is_set() or not self._leadership.is_held

    def _keep(self, pass_once: Callable[[], list[str]], *, what: str, logged_as: str) -> None:
        """Pass after pass while this process leads."""
        while not self._has_ended.wait(self._config.reconcile_s):
            if self._leadership.is_held:
                self._try(pass_once, what=what, logged_as=logged_as)
            connection.close()

    def reconcile_once(self) -> bool:
        """One pass, if this process leads; the answer is whether it does. What fails is logged, and done by the next pass."""
        try:
            leads = self._leadership.ask()
        except (DatabaseError, OSError) as error:
            logger.warning("the lead cannot be asked for, will try again: %s", error)
            connection.close()
            self._failed_at_s = time.monotonic()
            return False
        if leads:
            self._pass()
        return leads

    def _pass(self) -> None:
        steps: tuple[tuple[Callable[[], list[str]], str, str], ...] = (
            (self._expire_leases, "leases", "requeued or ended, its lease ran out"),
            (resend_hints, "hints", "hinted again"),
            (enforce_deadlines, "limits of jobs", "asked to stop at its limit"),
        )
        # a list: one step that fails keeps none of the others from its turn
        done = [self._try(step, what=what, logged_as=logged_as) for step, what, logged_as in steps]
        if all(done):
            self._try(self._record_pass, what="the record of this pass", logged_as="")
        else:
            self._failed_at_s = time.monotonic()

    def _record_pass(self) -> list[str]:
        self._leadership.record_pass()
        return []

    def _expire_leases(self) -> list[str]:
        """Not while live workers may have been kept from renewing theirs.

        The database was away, or nobody led and so nobody knows: one lease. It refused something just now: two heartbeats.
        """
        calm_s = time.monotonic() - self._failed_at_s
        if calm_s < 2 * self._config.heartbeat_s or not is_unbroken_for(self._config.lease_s):
            return []
        return [*expire_leases(), *expire_members()]

    def _try(self, step: Callable[[], list[str]], *, what: str, logged_as: str) -> bool:
        """False when it failed, which is logged."""
        try:
            for row_id in step():
                logger.info("%s: %s", row_id, logged_as)
        except (DatabaseError, OSError) as error:
            logger.warning("%s wait, the database or the disk cannot be used: %s", what, error)
        except Exception:
            logger.exception("%s wait; a fault of the program", what)
        else:
            return True
        connection.close()
        return False


def remove_dead_staging(home: Path) -> int:
    """Half-written checkpoints whose attempt no longer holds the job; the number of folders removed."""
    staged = list((home / "jobs").glob("*/checkpoints/.tmp-*"))
    if not staged:
        return 0
    job_ids = {path.parent.parent.name for path in staged}
    live = dict(Job.objects.filter(pk__in=job_ids, state__in=LIVE_STATES).values_list("pk", "fence"))
    dead = [path for path in staged if live.get(path.parent.parent.name) != _fence_of(path)]
    return _remove_all(dead)


def remove_dead_artifacts(home: Path, *, settled: set[Path]) -> int:
    """Artifacts that no row names, of attempts that no longer hold their job: exports that were cut short, came too late or were
    made anew. The number of folders removed.

    settled: folders of jobs that have ended or are not known, which need no second look; others are added.
    """
    found = [path for path in (home / "jobs").glob(f"*/{ARTIFACTS_FOLDER}/f*") if path not in settled]
    folders = [path for path in found if fence_of_artifacts(path) is not None]
    parts = [folders[start : start + _AT_ONCE] for start in range(0, len(folders), _AT_ONCE)]
    return _remove_all([path for part in parts for path in _dead_artifacts(part, home=home, settled=settled)])


def _dead_artifacts(folders: list[Path], *, home: Path, settled: set[Path]) -> Iterator[Path]:
    # the jobs first: one that ends meanwhile has its rows by then
    jobs = {job.pk: job for job in Job.objects.filter(pk__in={path.parts[-3] for path in folders}).only("state", "fence")}
    files = Artifact.objects.filter(job__in=jobs).values_list("file", flat=True)
    named = {home.joinpath(*Path(file).parts[:4]) for file in files}
    for path in folders:
        job = jobs.get(path.parts[-3])
        if job is None or (path in named and job.is_terminal):
            settled.add(path)
        elif path not in named and not (job.state in LIVE_STATES and job.fence == fence_of_artifacts(path)):
            yield path


def remove_old_spool(home: Path) -> int:
    """Uploads that broke off more than a day ago; the number of entries removed."""
    oldest_s = time.time() - SPOOL_AGE_S
    return _remove_all([path for path in (home / "spool").glob("*") if _modified_s(path) < oldest_s])


def remove_unused_checkpoints(home: Path) -> int:
    """Checkpoints put aside more than a day ago for jobs that were not made; the number of folders removed.

    Only folders that hold nothing else: those of jobs that a restored backup does not know stay.
    """
    oldest_s = time.time() - SPOOL_AGE_S
    aside = [path.parent for name in (SOURCE_FOLDER, BRANCH_FOLDER) for path in (home / "jobs").glob(f"*/{name}")]
    alone = [folder for folder in aside if _modified_s(folder) < oldest_s and len(list(folder.iterdir())) == 1]
    known = set(Job.objects.filter(pk__in=[folder.name for folder in alone]).values_list("pk", flat=True)) if alone else ()
    return _remove_all([folder for folder in alone if folder.name not in known])


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


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s reconciler %(levelname)s %(message)s")
    end_on_newer_database()
    # blocked in every thread but for the one that waits for them, so that none cuts through a transaction
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    is_asked_to_end = threading.Event()

    def wait_for_signal() -> None:
        # not sigtimedwait in the main thread: stopped and continued past its limit, it reports a signal that never came
        signal.sigwait(_ENDING_SIGNALS)
        is_asked_to_end.set()

    threading.Thread(target=wait_for_signal, name="signals", daemon=True).start()
    Reconciler(WorkerConfig.from_environment()).run(pause=is_asked_to_end.wait)


if __name__ == "__main__":
    main()
