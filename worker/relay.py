"""Carries asks from Redis to the process of a served model, and its answers back; ends the session when nobody asks.

Two threads beside the attempt's own: one takes asks, one hands answers back. The process knows no Redis, so that what runs a
stranger's template holds no key to it. An ask that was taken is answered, at the latest with an error when the process ends.
"""

import json
import logging
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis
from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from django.utils import timezone

from webapp.jobs.devices.room import read_room
from webapp.jobs.models import DEVICE_JOB_KINDS, Attempt, Job
from webapp.jobs.moves import claimable
from webapp.jobs.trained_model import folder_left
from webapp.wire.serving import SupervisorWire
from worker.config import WorkerConfig
from worker.run.pipe import encode_line

logger = logging.getLogger(__name__)

_BLOCK_MS = 500
_MARK_EVERY_S = 2.0
GIVE_WAY_AFTER_S = 20.0
"""Idle for so long, a session ends at once when another job waits for what it holds."""
_OTHERS_WAIT_S = 3
_PAUSE_AFTER_FAILURE_S = 0.5

Document = dict[str, Any]


class AskRelay:
    """``start`` once the process has begun; ``close`` after it has ended."""

    def __init__(self, attempt: Attempt, *, config: WorkerConfig) -> None:
        self._attempt = attempt
        self._home = config.home
        self._idle_s = float(attempt.job.spec["serving"]["idle_s"])
        self._wire = SupervisorWire(attempt.job_id)
        self._own, self._child = socket.socketpair()
        self._open: dict[str, str] = {}
        """Asks that were taken and not answered to their end, with who listens for each."""
        self._lock = threading.Lock()
        self._busy_at = self._marked_at = time.monotonic()
        self._has_ended = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"{name}-{attempt.job_id}", daemon=True)
            for name, run in (("asks", self._take_asks), ("answers", self._hand_back))
        ]

    @property
    def child_fd(self) -> int:
        return self._child.fileno()

    def start(self) -> None:
        self._child.close()  # the process has its own; with this one open its end would not be seen
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Answer who still waits, and free everything."""
        self._has_ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=5)
        with self._lock:
            left = [(listener, _lost(ask_id)) for ask_id, listener in self._open.items()]
            self._open.clear()
        try:
            if left:
                self._wire.reply(left)
            self._wire.unmark(str(self._attempt.number))
        except (redis.RedisError, OSError) as error:
            logger.warning("%s: %d asks stay without an answer: %s", self._attempt, len(left), error)
        self._wire.close()
        self._own.close()
        self._child.close()

    # From Redis to the process.

    def _take_asks(self) -> None:
        try:
            while not self._has_ended.is_set():
                try:
                    self._mark()
                    for ask in self._wire.take(block_ms=_BLOCK_MS):
                        self._pass_on(ask)
                    if self._is_over():
                        break
                except (redis.RedisError, DatabaseError) as error:
                    logger.warning("%s: no asks can be taken, will try again: %s", self._attempt, error)
                    self._has_ended.wait(_PAUSE_AFTER_FAILURE_S)
            self._own.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the process has ended; the attempt sees to it
        finally:
            connections.close_all()

    def _pass_on(self, ask: Document) -> None:
        self._busy_at = time.monotonic()
        if ask["type"] == "ask":
            with self._lock:
                self._open[ask["id"]] = ask["listener"]
            self._wire.reply([(ask["listener"], {"id": ask["id"], "type": "taken", "attempt": self._attempt.number})])
            if ask.get("adapter") and not self._find_adapter(ask):
                return
        else:
            with self._lock:
                self._open.pop(ask["id"], None)
        self._own.sendall(encode_line(ask))

    def _find_adapter(self, ask: Document) -> bool:
        """Say in the ask where its adapter lies. False where the database does not answer; the ask then has its answer."""
        close_old_connections()
        try:
            ask["adapter_folder"] = str(folder_left(Path(ask["adapter"]).name, kind="adapter", home=self._home))
        except DatabaseError as error:
            logger.warning("%s: an adapter cannot be looked up: %s", self._attempt, error)
            connections.close_all()
            with self._lock:
                self._open.pop(ask["id"], None)
            self._wire.reply([(ask["listener"], _lost(ask["id"], "the database did not answer; ask again"))])
            return False
        return True

    def _mark(self) -> None:
        if time.monotonic() - self._marked_at >= _MARK_EVERY_S or not self._open:
            self._wire.mark_alive(str(self._attempt.number))
            self._marked_at = time.monotonic()

    def _is_over(self) -> bool:
        with self._lock:
            if self._open:
                self._busy_at = time.monotonic()
        idle_s = time.monotonic() - self._busy_at
        return idle_s > self._idle_s or (idle_s > GIVE_WAY_AFTER_S and self._others_wait())

    def _others_wait(self) -> bool:
        """True if a job waits that this machine could run without this one."""
        close_old_connections()
        machine = self._attempt.machine
        if machine is None:
            return False
        since = timezone.now() - timedelta(seconds=_OTHERS_WAIT_S)
        fits = read_room(machine).when_empty()
        return Job.objects.filter(claimable() & fits, kind__in=DEVICE_JOB_KINDS, created_at__lt=since).exists()

    # From the process to Redis.

    def _hand_back(self) -> None:
        try:
            with self._own.makefile("rb") as lines:
                for line in lines:
                    self._answer(line)
        except (OSError, ValueError) as error:
            logger.warning("%s: its answers cannot be read: %s", self._attempt, error)

    def _answer(self, line: bytes) -> None:
        answer = json.loads(line)
        ask_id = str(answer.get("id"))
        self._busy_at = time.monotonic()
        with self._lock:
            listener = self._open.get(ask_id)
            if answer.get("type") in ("end", "error"):
                self._open.pop(ask_id, None)
        if listener is None:
            return  # cancelled meanwhile
        try:
            self._wire.reply([(listener, answer)])
        except redis.RedisError as error:
            logger.warning("%s: an answer was lost: %s", self._attempt, error)


def _lost(ask_id: str, message: str = "the model's process ended; ask again") -> Document:
    return {"id": ask_id, "type": "error", "code": "server_lost", "message": message, "param": None}
