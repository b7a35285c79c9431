"""One attempt, from the claim to its end: folder, process, lease, telemetry, verdict.

The supervisor's slot thread calls ``run_attempt``. It ends when the attempt's process group is gone and the verdict is in the
database, or when another claim holds the job; then it changes nothing more.
"""

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from django.db import Error as DatabaseError
from django.db import connections

from optimizer.base.errors import DiskFull, MachineFault
from webapp.attempts import records
from webapp.attempts.outcome import finish_attempt
from webapp.jobs.models import Attempt, Kind, Sample
from webapp.wire.publish import publish, publish_all, report_gap
from worker.config import WorkerConfig
from worker.gpu import GpuMeter
from worker.heartbeat import Heartbeat
from worker.mirroring import Mirrors
from worker.relay import AskRelay
from worker.run.brief import job_folder, write_brief
from worker.run.child import Child, DeviceLock, StopOrder, isolated_command
from worker.run.pipe import PipeReader
from worker.run.watch.host_kills import HostKills, killed_by_host
from worker.run.watch.lifeline import Beats
from worker.telemetry import Progress, Records, SampleCopier, read_last_step

logger = logging.getLogger(__name__)

EXIT_DRAINED = 75
"""EX_TEMPFAIL: stopped as asked, with a checkpoint."""
EXIT_NO_ROOM = 74
"""EX_IOERR: the disk took no result."""
TURN_S = 0.2
_RETRY_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AttemptPlace:
    """The devices that a slot gives an attempt, with their lock and meter."""

    devices: Sequence[str]
    """torch's names in the attempt's process."""
    cards: str | None
    """Cards that it may see, as ``CUDA_VISIBLE_DEVICES``; None: those that this process may."""
    lock: DeviceLock
    gpu: GpuMeter
    """Reads the first of the devices."""


def run_attempt(
    attempt: Attempt, *, config: WorkerConfig, place: AttemptPlace, asked_s: float, draining: threading.Event
) -> str:
    """Carry one claimed attempt through; whatever goes wrong here ends the attempt and not the slot. asked_s: when the claim was
    asked for, by ``boot_s``; its lease has run since then.

    Returns what ``finish_attempt`` answers, empty where the lease was lost. Raises the database's error when even that cannot be
    written for a lease, which then has run out.
    """
    try:
        return _AttemptRun(attempt, config=config, place=place, asked_s=asked_s, draining=draining).run()
    except DatabaseError:
        raise
    except Exception as error:
        logger.exception("%s ended by a fault of its supervisor", attempt)
        known = DiskFull.behind(error) or MachineFault.behind_system(error, machine=config.host)
        result = {
            "outcome": "failed",
            "reason": known.code if known else "internal",
            "message": known.message if known else "A fault of the worker ended the attempt.",
            "error": known.to_json() if known else None,
        }
        return _finish_within(config.lease_s, attempt, result)


def _finish_within(limit_s: float, attempt: Attempt, result: dict[str, Any]) -> str:
    """Tries again: a disk that is full for the attempt's files is likely to be so for the database."""
    give_up_at = time.monotonic() + limit_s
    while True:
        try:
            return finish_attempt(attempt, result=result, exit_code=None)
        except DatabaseError as error:
            if time.monotonic() > give_up_at:
                raise
            logger.warning("%s: its end is not written, will try again: %s", attempt, error)
            connections.close_all()
            time.sleep(_RETRY_S)


class _AttemptRun:
    def __init__(
        self, attempt: Attempt, *, config: WorkerConfig, place: AttemptPlace, asked_s: float, draining: threading.Event
    ) -> None:
        self._attempt = attempt
        self._job = attempt.job
        self._config = config
        self._place = place
        self._draining = draining
        self._folder = job_folder(config.home, self._job.pk) / "attempts" / str(attempt.number)
        self._progress = Progress(num_steps=self._job.num_steps)
        self._copier = SampleCopier(
            self._folder / "samples.jsonl",
            attempt_number=attempt.number,
            record=lambda rows: records.record_samples(attempt, rows),
            mirror=lambda records: publish_all(attempt.job_id, "sample", records),
            read_gpu=place.gpu.read,
        )
        self._heartbeat = Heartbeat(
            lambda: records.renew_lease(attempt, lease_s=config.lease_s),
            asked_s=asked_s,
            lease_s=config.lease_s,
            interval_s=config.heartbeat_s,
            outage_s=config.outage_s,
        )
        self._pending: list[Callable[[], object]] = []
        self._mirrors = Mirrors(attempt, attempt_folder=self._folder)
        self._stop = StopOrder(grace_s=config.grace_s)
        self._host_kills = HostKills()
        self._retry_at = float("-inf")

    def run(self) -> str:
        """The outcome; empty when the lease was lost meanwhile."""
        write_brief(self._attempt, folder=self._folder, home=self._config.home, devices=self._place.devices)
        relay = AskRelay(self._attempt, config=self._config) if self._job.kind == Kind.SERVE else None
        beats = Beats(self._heartbeat.work_until_s, interval_s=self._config.lease_s / 30)
        try:
            child = Child(
                isolated_command("worker.run.runner", str(self._folder)),
                folder=self._folder,
                lock=self._place.lock,
                cards=self._place.cards,
                beat_fd=beats.child_fd,
                asks_fd=relay.child_fd if relay else None,
            )
        except BaseException:
            beats.close()
            raise
        self._heartbeat.start()
        outcome = ""
        try:
            beats.start()
            if relay:
                relay.start()
            self._mirrors.start()
            self._copy_earlier_samples()
            self._follow(child)
            exit_code = child.reap()
            if not self._heartbeat.is_fenced_out:
                outcome = self._finish(exit_code, was_silent=beats.has_lapsed)
        finally:
            child.close()
            beats.close()
            if relay:
                relay.close()
            self._heartbeat.stop()
            self._mirrors.end(outcome)
        return outcome

    def _follow(self, child: Child) -> None:
        """Until the process has ended and its last words are read."""
        reader = PipeReader(child.pipe_fd)
        has_ended = False
        while not has_ended:
            has_ended = child.has_ended()  # before reading, so that what it said before it ended is still read
            for message in reader.read(timeout_s=0 if has_ended else TURN_S):
                self._hear(message, pid=child.pid)
            self._stop.act(child, self._asked_to_stop(), is_fenced_out=self._heartbeat.is_fenced_out)
            self._write_to_database()
            report_gap(self._attempt.job_id)

    def _copy_earlier_samples(self) -> None:
        self._pending.append(lambda: copy_earlier_samples(self._attempt, home=self._config.home))

    def _asked_to_stop(self) -> str:
        """``discard`` or ``save`` when the job is cancelled, ``pause``, ``drain``, or empty."""
        if self._heartbeat.cancel_mode:
            return self._heartbeat.cancel_mode
        if self._heartbeat.pause_requested:
            return "pause"
        return "drain" if self._draining.is_set() or self._heartbeat.drains else ""

    def _hear(self, message: dict[str, Any], *, pid: int) -> None:
        attempt = self._attempt
        match message:
            case {"type": "started", "resumed_from_step": int(step)}:
                self._pending.append(lambda: records.record_started(attempt, pid=pid, resumed_from_step=step))
                if step:
                    # again: a lost attempt may have gone on until its last checkpoint, from which this one goes on
                    self._copy_earlier_samples()
            case {"type": "phase", "phase": str(phase)}:
                text = str(message.get("message", ""))
                self._pending.append(lambda: records.record_phase(attempt, phase=phase, message=text))
            case {"type": "checkpoint", "step": int(step), "folder": str(folder)}:
                self._pending.append(
                    lambda: records.record_checkpoint(
                        attempt,
                        step=step,
                        folder=folder,
                        manifest_sha256=str(message.get("manifest_sha256", "")),
                        num_bytes=int(message.get("num_bytes", 0)),
                    )
                )
            case {"type": "log", "message": str(text)}:
                publish(attempt.job_id, "log", {"level": str(message.get("level", "info")), "message": text})

    def _write_to_database(self) -> None:
        """Write what is due. While the database is away the attempt goes on, and everything is kept for its return."""
        if time.monotonic() < self._retry_at or self._heartbeat.is_fenced_out:
            return
        try:
            while self._pending:
                self._pending[0]()
                self._pending.pop(0)
            self._progress.add(self._copier.copy_if_due())
            if self._progress.take_if_due():
                records.record_progress(
                    self._attempt,
                    step=self._progress.step,
                    eta_s=self._progress.eta_s,
                    summary=dict(self._progress.summary),
                    num_tokens=self._progress.num_tokens,
                )
        except DatabaseError as error:
            logger.warning("%s: not written, will try again: %s", self._attempt, error)
            connections.close_all()
            self._retry_at = time.monotonic() + _RETRY_S

    def _finish(self, exit_code: int, *, was_silent: bool) -> str:
        """The outcome; empty when the lease was lost meanwhile."""
        killed_in = "" if self._stop.is_asked else self._host_kills.find()
        result = judge_end(
            self._folder,
            exit_code=exit_code,
            was_asked_to_stop=self._stop.is_asked,
            was_silent=was_silent,
            killed_in=killed_in,
        )
        for write in self._pending:
            self._persist(write)
        self._persist(self._copier.copy)
        outcome = self._persist(lambda: finish_attempt(self._attempt, result=result, exit_code=exit_code))
        logger.info("%s ended: %s (exit code %d)", self._attempt, outcome, exit_code)
        return outcome or ""

    def _persist(self, write: Callable[[], T]) -> T | None:
        """Try until it is written; None when the lease was lost meanwhile, and the write with it."""
        while not self._heartbeat.is_fenced_out:
            try:
                return write()
            except DatabaseError as error:
                logger.warning("%s: not written, will try again: %s", self._attempt, error)
                connections.close_all()
                time.sleep(_RETRY_S)
        return None


def judge_end(
    folder: Path, *, exit_code: int, was_asked_to_stop: bool, was_silent: bool = False, killed_in: str = ""
) -> dict[str, Any] | None:
    """``result.json``; where the process left none, what can be said of its end. None: killed by something outside.

    was_silent: this process was halted so long that the attempt's ended itself, which is no fault of the job.
    killed_in: where the kernel counted a process that its out-of-memory killer ended, from ``HostKills``.
    """
    if (result := read_result(folder)) is not None:
        return result
    # TERM kills a process that has not yet come to where it listens for it
    if exit_code == EXIT_DRAINED or (was_asked_to_stop and exit_code in (-signal.SIGTERM, -signal.SIGKILL)):
        return {"outcome": "drained", "message": "Stopped before a new checkpoint was written."}
    if was_silent and exit_code == -signal.SIGKILL:
        return {"outcome": "drained", "message": "The worker was halted for longer than its lease, so the job's process stopped."}
    if exit_code == -signal.SIGKILL and killed_in:
        return killed_by_host(killed_in, last_step=read_last_step(folder / "samples.jsonl"))
    if exit_code < 0:
        return None
    if exit_code == EXIT_NO_ROOM:
        return {"outcome": "failed", "reason": "disk_full", "message": "the disk is full: no room for the result", "error": None}
    return {
        "outcome": "failed",
        "reason": "internal",
        "message": f"The job's process ended with exit code {exit_code} without a result; its log says more.",
        "error": None,
    }


def read_result(folder: Path) -> dict[str, Any] | None:
    """The attempt's ``result.json``, written by rename and so whole; None without one."""
    try:
        result = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def copy_earlier_samples(attempt: Attempt, *, home: Path) -> None:
    """Write what earlier attempts measured and a lost supervisor did not.

    Points past the checkpoint this attempt resumes from stay, under the earlier attempt's number; readers show for each step
    the latest attempt.
    """

    def record(rows: Records) -> bool:
        return records.record_samples(attempt, rows)

    # a supervisor that saw its process end has copied everything and noted the exit code
    lost = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number, exit_code__isnull=True)
    for number in lost.values_list("number", flat=True):
        path = job_folder(home, attempt.job_id) / "attempts" / str(number) / "samples.jsonl"
        num_known = Sample.objects.filter(job_id=attempt.job_id, attempt=number).count()
        SampleCopier(path, attempt_number=number, record=record, num_known=num_known).copy()
