"""The CPU as a device that is asynchronous in the worst legal way: ``hostile_device`` puts it in place of the CPU's backend."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from optimizer.runtime.device.backends import in_place_of_its_device
from optimizer.runtime.device.cpu import CpuBackend
from tests.hostile_device.footprint import POISON
from tests.hostile_device.modes import ComputeMode, HostMode, SideStreamMode
from tests.hostile_device.streams import HostileStream, Queues, Schedule


class _Here(threading.local):
    """The side stream on which a thread queues its work; None: compute's."""

    stream: HostileStream | None = None


class HostileBackend(CpuBackend):
    """Streams that work late, early or at random; memory that is poison until something was written to it."""

    is_asynchronous = True

    def __init__(self, *, schedule: Schedule = "late", seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.queues = Queues(schedule=schedule, seed=seed)
        self._here = _Here()

    @property
    def faults(self) -> list[str]:
        return self.queues.races.faults

    def make_stream(self) -> Any:
        return self.queues.make_stream()

    def current_stream(self) -> Any:
        return self._here.stream or self.queues.compute

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        outer, self._here.stream = self._here.stream, stream
        try:
            with SideStreamMode(self.queues, stream):
                yield
        finally:
            self._here.stream = outer

    def synchronize(self) -> None:
        self.queues.synchronize()

    def enter_thread(self) -> None:
        # For the thread's life: it ends with its executor.
        HostMode(self.queues).__enter__()

    def empty_pinned(self, num_bytes: int) -> torch.Tensor:
        data = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.register(data)
        return data

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch itself keeps such memory until what was queued from it is done.
        return tensor.clone()

    def register(self, data: torch.Tensor) -> int:
        with self.queues.lock:
            self.queues.races.pin(data.untyped_storage())
        return 0

    def unregister(self, data: torch.Tensor) -> None:
        with self.queues.lock:
            self.queues.let_go(data.untyped_storage(), "was unpinned")


@contextmanager
def hostile_device(*, schedule: Schedule = "late", seed: int = 0) -> Iterator[HostileBackend]:
    """Inside, the CPU device is hostile; at the end nothing may have been at fault. Raises AssertionError with what was."""
    backend = HostileBackend(schedule=schedule, seed=seed)
    with in_place_of_its_device(backend), _watching_sizes(backend.queues), _late_threads(backend.queues):
        with ComputeMode(backend.queues):
            yield backend
        assert not backend.faults, f"{len(backend.faults)} faults:\n" + "\n".join(dict.fromkeys(backend.faults))


@contextmanager
def _watching_sizes(queues: Queues) -> Iterator[None]:
    """A storage that shrinks lets its memory go, and gets poison where it grows."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: Any, num_bytes: int) -> Any:
        before_bytes = storage.nbytes()
        with queues.lock:
            if num_bytes != before_bytes and before_bytes:
                queues.let_go(storage, "was let go")
            result = resize(storage, num_bytes)
            if num_bytes > before_bytes and storage.device.type == "cpu":
                with _disable_current_modes():
                    grown = torch.empty(0, dtype=torch.uint8).set_(storage)
                    grown[before_bytes:].fill_(POISON)
                    queues.made(grown)
        return result

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def _late_threads(queues: Queues) -> Iterator[None]:
    """Work that is given to a thread begins a moment later."""
    submit = ThreadPoolExecutor.submit

    def late(executor: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            time.sleep(queues.delay_s())
            return function(*args, **kwargs)

        return submit(executor, run)

    ThreadPoolExecutor.submit = late  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
