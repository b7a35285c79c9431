"""The process group of one attempt: how it is started, what it may see, how it is ended.

It gets a scrubbed environment, one pipe to talk on, a lifeline, and a lock. The lock is a ``flock`` on open files that the group
inherits, so it is free exactly when the last process of the group is gone.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from optimizer.base.disk import FLOOR_VARIABLE
from optimizer.base.heap import MALLOC_SETTINGS
from optimizer.base.threads import WAIT_POLICY, wait_policy
from worker.run.watch.halted import HaltWatch

BASE_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Those that any process beside a worker needs."""
ALLOWED_VARIABLES = (
    *BASE_VARIABLES,
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    FLOOR_VARIABLE,
    "HEADROOM_DEVICES",
    "HEADROOM_FP32_PRODUCTS",
    "HEADROOM_NUM_THREADS",
    "HEADROOM_RANK_INTERFACE",
    # Of a store that lends its memory to jobs; not the service's own, which no job may know.
    "HEADROOM_REMOTE_URL",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    *WAIT_POLICY,
    *MALLOC_SETTINGS,
)
"""An allow-list, because a deny-list forgets the next secret; the worker's environment holds several."""
NCCL_PREFIX = "NCCL_"
"""Names of NCCL's own settings begin so. They are allowed too: some dozens, of which none is a secret."""

FIXED_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Nothing is fetched by a job."""

DEFAULT_VARIABLES = {
    # CUDA else counts the fastest card first, and the vendor's library, which reads temperatures, does not.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}

_PROGRAM_ROOT = Path(__file__).resolve().parent.parent.parent
# -I drops the working directory and PYTHONPATH, so a program that runs from its tree must be found by name. It is appended,
# so that nothing beside the packages can stand in for the standard library.
_BOOTSTRAP = """\
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def isolated_command(module: str, *arguments: str) -> list[str]:
    """``python -I -u -m module arguments``, which works installed and from the source tree alike."""
    return [sys.executable, "-I", "-u", "-c", _BOOTSTRAP, str(_PROGRAM_ROOT), module, *arguments]


def child_environment(environment: Mapping[str, str], *, folder: Path) -> dict[str, str]:
    """The environment of an attempt: the allowed variables, offline switches, and its own folder as home."""
    allowed = {name: value for name, value in environment.items() if name in ALLOWED_VARIABLES or name.startswith(NCCL_PREFIX)}
    return {**DEFAULT_VARIABLES, **wait_policy(environment), **allowed, **FIXED_VARIABLES, "HOME": str(folder)}


class DeviceLock:
    """Exclusive use of a slot, or of devices, on this machine, handed to the child that runs there."""

    def __init__(self, *paths: Path, beside: Sequence[int] = ()) -> None:
        """beside: open files whose locks the child holds as well, and which stay with their owner."""
        self._paths = paths
        self._beside = beside
        self._fds: list[int] = []

    def acquire(self) -> bool:
        """All or none. False while another process holds one of them, also one left over from a worker that died."""
        if self._fds:
            return True
        try:
            for path in self._paths:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError:
            self.release()
            raise
        return True

    @property
    def fds(self) -> list[int]:
        if not self._fds:
            raise RuntimeError(f"{', '.join(map(str, self._paths))} is not held")
        return [*self._fds, *self._beside]

    def release(self) -> None:
        """Close this process's copies; a child that inherited them still holds the lock."""
        while self._fds:
            os.close(self._fds.pop())


class Child:
    """A started process group. ``pipe_fd`` is read without blocking; ``close`` frees what the supervisor holds."""

    def __init__(
        self,
        command: list[str],
        *,
        folder: Path,
        lock: DeviceLock | None = None,
        cards: str | None = None,
        beat_fd: int | None = None,
        asks_fd: int | None = None,
    ) -> None:
        """cards: that it may see, as ``CUDA_VISIBLE_DEVICES``. beat_fd, asks_fd: given to the process as its own; from one it
        learns until when it may work (``lifeline.Beats``), from the other what is asked of it while it runs.
        """
        pipe_read, pipe_write = os.pipe2(os.O_CLOEXEC)
        lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
        environment = child_environment(os.environ, folder=folder)
        environment |= {"HEADROOM_PIPE_FD": str(pipe_write), "HEADROOM_LIFELINE_FD": str(lifeline_read)}
        if cards is not None:
            environment["CUDA_VISIBLE_DEVICES"] = cards
        passed = [pipe_write, lifeline_read, *(lock.fds if lock else [])]
        if lock:
            environment["HEADROOM_LOCK_FDS"] = ",".join(map(str, lock.fds))
        for variable, fd in {"HEADROOM_BEAT_FD": beat_fd, "HEADROOM_ASKS_FD": asks_fd}.items():
            if fd is not None:
                environment[variable] = str(fd)
                passed.append(fd)
        try:
            with (folder / "log.txt").open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env=environment,
                    pass_fds=passed,
                    start_new_session=True,
                )
        except OSError:
            os.close(pipe_read)
            os.close(lifeline_write)
            raise
        finally:
            os.close(pipe_write)
            os.close(lifeline_read)
        os.set_blocking(pipe_read, False)
        self.pipe_fd = pipe_read
        self._lifeline_fd = lifeline_write
        self._halted = HaltWatch(self.pid)
        self._is_closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Report whether the leader has ended. It is not reaped yet, so its number cannot be given to a stranger."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def has_stood_still(self) -> bool:
        """Report whether something has halted the leader, and left it so."""
        return self._halted.has_stood_still()

    def ask_to_stop(self) -> None:
        """TERM to the leader: checkpoint at the next step boundary, then exit 75."""
        if not self.has_ended():
            self._process.terminate()

    def kill_group(self) -> None:
        """KILL to the leader and everything it started. Harmless once they are gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """End what is left of the group and return the leader's exit code, negative for a signal."""
        self.kill_group()
        return self._process.wait()

    def close(self) -> None:
        """Kill, reap and free. Safe to call twice."""
        if self._is_closed:
            return
        self.reap()
        os.close(self.pipe_fd)
        os.close(self._lifeline_fd)
        self._is_closed = True


class StopOrder:
    """Asks an attempt to stop, and ends it when it does not, or when it was halted."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked_at: float | None = None

    @property
    def is_asked(self) -> bool:
        return self._asked_at is not None

    def act(self, child: Child, asked: str, *, is_fenced_out: bool) -> None:
        """Once: TERM, or KILL at once for ``discard`` and for an attempt whose job another claim holds."""
        if is_fenced_out or asked == "discard":
            self._asked_at = self._asked_at or time.monotonic()
            child.kill_group()
        elif asked and self._asked_at is None:
            self._asked_at = time.monotonic()
            child.ask_to_stop()
        elif child.has_stood_still() or (self._asked_at is not None and time.monotonic() - self._asked_at > self._grace_s):
            child.kill_group()
