"""Runs jobs one after the other, on a thread of their own or at once: what the host does beside compute.

Knows nothing of what the jobs do. Gradient mode is off inside a job.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Job = Callable[[], None]


class Worker:
    """First in, first out. Without a thread a job is done when ``submit`` returns, and its error comes from there."""

    def __init__(self, *, name: str, device: torch.device, is_threaded: bool) -> None:
        self.is_threaded = is_threaded
        self._executor: ThreadPoolExecutor | None = None
        if is_threaded:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_enter_device, initargs=(device,))
        self._pending: list[Future[None]] = []

    def submit(self, job: Job) -> None:
        if self._executor is None:
            _run(job)
            return
        self._pending = [future for future in self._pending if not future.done() or future.exception()]
        self._pending.append(self._executor.submit(_run, job))

    def join(self) -> None:
        """Wait until all that was submitted is done; raises the first error, once."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Drop what has not begun and end the thread. Never raises what a job met."""
        self._pending = []
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


def _enter_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _run(job: Job) -> None:
    with torch.no_grad():
        job()
