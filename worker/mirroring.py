"""The supervisor's side of mirrors: a process for each beside an attempt, and what it says kept with the job.

The attempt neither knows of them nor waits for them. A mirror's process is given the variables of its own service and no others;
the attempt's process is given none of them.
"""

import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections

from webapp.attempts.records import record_mirror
from webapp.jobs.models import Attempt, Kind
from worker.run.child import BASE_VARIABLES, isolated_command

logger = logging.getLogger(__name__)

ALLOWED_VARIABLES = (
    *BASE_VARIABLES,
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "https_proxy",
    "http_proxy",
    "no_proxy",
)
OWN_VARIABLES = {"wandb": ("WANDB_",), "mlflow": ("MLFLOW_", "DATABRICKS_")}
"""The beginnings of a service's variables."""
ENDINGS = ("succeeded", "failed", "cancelled")


def mirror_environment(environment: Mapping[str, str], *, name: str, home: Path) -> dict[str, str]:
    """The environment of a mirror's process: the allowed variables and those of its service."""
    own = OWN_VARIABLES[name]
    kept = {key: value for key, value in environment.items() if key in ALLOWED_VARIABLES or key.startswith(own)}
    return {**kept, "HOME": str(home)}


class Mirrors:
    """The mirrors of one attempt. Nothing here raises what would end the attempt."""

    def __init__(self, attempt: Attempt, *, attempt_folder: Path) -> None:
        self._attempt = attempt
        self._folder = attempt_folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        job = self._attempt.job
        for name in job.spec.get("mirrors", ()) if job.kind in (Kind.TRAIN, Kind.GENERATE) else ():
            if name not in settings.HEADROOM_MIRRORS:
                _record(self._attempt, name, trouble="this worker has not opened it (HEADROOM_MIRRORS)")
                continue
            try:
                self._start(name)
            except OSError as error:
                _record(self._attempt, name, trouble=f"its process could not be started: {error.strerror}")

    def end(self, outcome: str) -> None:
        """Say how the attempt ended, and leave them: they have a minute of their own for what is still to be sent."""
        for process in self._processes:
            if process.stdin is None:
                continue
            try:
                process.stdin.write(f"{outcome if outcome in ENDINGS else ''}\n".encode())
                process.stdin.close()
            except OSError as error:
                logger.warning("a mirror of %s was gone before the run's end: %s", self._attempt, error.strerror)
        self._processes = []

    def _start(self, name: str) -> None:
        home = self._folder.parent.parent / "mirrors"
        home.mkdir(mode=0o700, exist_ok=True)
        process = subprocess.Popen(
            isolated_command("worker.mirrors.program", name, str(self._folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env=mirror_environment(os.environ, name=name, home=home),
            start_new_session=True,
        )
        self._processes.append(process)
        arguments = (process, self._attempt, name)
        threading.Thread(target=_follow_in_thread, args=arguments, name=f"mirror-{name}", daemon=True).start()


def follow(process: "subprocess.Popen[bytes]", attempt: Attempt, name: str) -> None:
    """Keep what a mirror says with its job, until it has ended."""
    url = trouble = ""
    try:
        for line in process.stdout or ():
            said = json.loads(line)
            url, trouble = str(said["url"]), str(said["trouble"])
            _record(attempt, name, url=url, trouble=trouble)
        if (exit_code := process.wait()) and not trouble:
            _record(attempt, name, url=url, trouble=f"its process ended with exit code {exit_code}")
    except Exception:
        logger.exception("mirror %s of %s is no longer followed", name, attempt)


def _follow_in_thread(process: "subprocess.Popen[bytes]", attempt: Attempt, name: str) -> None:
    try:
        follow(process, attempt, name)
    finally:
        connections.close_all()


def _record(attempt: Attempt, name: str, *, url: str = "", trouble: str = "") -> None:
    if trouble:
        logger.warning("mirror %s of %s: %s", name, attempt, trouble)
    try:
        record_mirror(attempt, name=name, url=url, trouble=trouble)
    except DatabaseError as error:
        logger.warning("mirror %s of %s: its state was not written: %s", name, attempt, error)
