"""Runs jobs one after the other, on a thread of their own or at once: what the host does beside compute.

Knows nothing of what the jobs do. Gradient mode is off inside a job.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.meter.lanes import LaneClock

Job = Callable[[], None]


class BackgroundThread:
    """First in, first out. Without a thread a job is done when ``submit`` returns, and its error comes from there."""

    def __init__(
        self, *, name: str, device: torch.device, is_threaded: bool, lanes: LaneClock | None = None
    ) -> None:
        """lanes: where the time of jobs is counted, as the host's."""
        self.is_threaded = is_threaded
        self._lanes = lanes or LaneClock()
        self._executor: ThreadPoolExecutor | None = None
        if is_threaded:
            self._executor = ThreadPoolExecutor(
                1, thread_name_prefix=name, initializer=_enter_thread, initargs=(device, self._lanes)
            )
        self._pending: list[Future[None]] = []

    def submit(self, job: Job) -> None:
        if self._executor is None:
            self._run(job)
            return
        self._pending = [future for future in self._pending if not future.done() or future.exception()]
        self._pending.append(self._executor.submit(self._run, job))

    def join(self) -> None:
        """Wait until all that was submitted is done; raises the first error, once."""
        pending, self._pending = self._pending, []
        if pending:
            with self._lanes.waiting("host"):
                for future in pending:
                    future.result()

    def close(self) -> None:
        """Drop what has not begun and end the thread. Never raises what a job met."""
        self._pending = []
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job) -> None:
        with torch.no_grad(), self._lanes.busy("host"):
            job()


def _enter_thread(device: torch.device, lanes: LaneClock) -> None:
    lanes.enter_thread()
    backend_of(device).enter_thread()
