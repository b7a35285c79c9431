"""Queues of work, and when it is done.

Compute's ops are done as they are queued: the host's program is one of their legal orders. Only what compute writes to pinned
memory is held back, as numbers that were taken at once. What is queued on a side stream is done, by the schedule:

late     when something has to have it done: compute waits for an event after it, or the host does
early    as it is queued
random   as late as above at the latest; before, whenever a die says so

Until it is done its destination is poison. If the memory of an op that is not done goes, the op is dropped and a fault noted.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.hostile_device.footprint import Layout, name_of, poison, span_of
from tests.hostile_device.races import COMPUTE, HOST, Clock, Races

Schedule = Literal["late", "early", "random"]
_LATE_S = 0.002
_RUN_ONE = 0.3
"""Probability that a random schedule does one more op when it is asked."""


class HostileEvent:
    """As CUDA's."""

    def __init__(self, stream: "HostileStream", position: int, clock: Clock) -> None:
        self.stream, self.position, self.clock = stream, position, clock

    def synchronize(self) -> None:
        with self.stream.queues.lock:
            self.stream.do_until(self.position)
            self.stream.queues.races.join(HOST, self.clock)


class HostileStream:
    """As CUDA's."""

    def __init__(self, queues: "Queues", name: str) -> None:
        self.queues, self.name = queues, name
        self._waiting: deque[_Job | HostileEvent] = deque()
        self._num_queued = self._num_done = 0

    def record_event(self) -> HostileEvent:
        with self.queues.lock:
            return HostileEvent(self, self._num_queued, self.queues.races.clock_of(self.name))

    def wait_event(self, event: HostileEvent) -> None:
        queues = self.queues
        with queues.lock:
            queues.races.join(self.name, event.clock)
            if self.name == COMPUTE:
                event.stream.do_until(event.position)
            else:
                self.add(event)

    def wait_stream(self, stream: "HostileStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def add(self, job: "_Job | HostileEvent") -> None:
        self._waiting.append(job)
        self._num_queued += 1
        self.queues.may_do(self)

    def do_until(self, position: int) -> None:
        """Do all that was queued before, and all that it waits for. With the lock."""
        while self._num_done < position:
            self.do_one()

    def do_one(self) -> None:
        job = self._waiting.popleft()
        self._num_done += 1
        if isinstance(job, HostileEvent):
            job.stream.do_until(job.position)
        else:
            job.do(self.queues)

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def touches(self, storage: torch.UntypedStorage, start: int, end: int) -> bool:
        """Report whether an op that is not done touches the bytes."""
        jobs = (job for job in self._waiting if isinstance(job, _Job))
        return any(job.touches(storage, start, end) for job in jobs)

    def drop(self, storage: torch.UntypedStorage) -> list[str]:
        """Forget the ops on memory that goes; what they are."""
        gone = [job for job in self._waiting if isinstance(job, _Job) and job.touches(storage, 0, storage.nbytes())]
        for job in gone:
            job.is_dropped = True
        return [str(job.label) for job in gone]


class _Job:
    """An op that waits."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any, *, label: object, kept: torch.Tensor | None) -> None:
        """kept: of the arguments, one that is held until it is done; the others may go before."""
        self.label, self.is_dropped, self._kept = label, False, kept
        self._func = func
        self._layouts: list[Layout] = []
        self._spans: list[tuple[int, int, int]] = []
        self._args, self._kwargs = self._described(args), self._described(kwargs)

    def touches(self, storage: torch.UntypedStorage, start: int, end: int) -> bool:
        key = storage._cdata
        return not self.is_dropped and any(k == key and s < end and start < e for k, s, e in self._spans)

    def do(self, queues: "Queues") -> None:
        if self.is_dropped:
            return
        with _disable_current_modes(), torch.no_grad():
            tensors = [layout.tensor() for layout in self._layouts]
            if any(tensor is None for tensor in tensors):
                queues.races.faults.append(f"memory went before {self.label} was done with it")
                return
            self._func(*self._filled(self._args, tensors), **self._filled(self._kwargs, tensors))

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            span = span_of(value)
            self._layouts.append(Layout(value))
            self._spans.append((span.storage._cdata, span.start, span.end))
            return _Place(len(self._layouts) - 1)
        if isinstance(value, list | tuple):
            return type(value)(self._described(item) for item in value)
        if isinstance(value, dict):
            return {key: self._described(item) for key, item in value.items()}
        return value

    def _filled(self, value: Any, tensors: list[torch.Tensor | None]) -> Any:
        if isinstance(value, _Place):
            return tensors[value.index]
        if isinstance(value, list | tuple):
            return type(value)(self._filled(item, tensors) for item in value)
        if isinstance(value, dict):
            return {key: self._filled(item, tensors) for key, item in value.items()}
        return value


class _Place:
    def __init__(self, index: int) -> None:
        self.index = index


class Queues:
    """All streams of one device."""

    def __init__(self, *, schedule: Schedule, seed: int) -> None:
        self.lock = threading.RLock()
        self.races = Races()
        self._schedule: Schedule = schedule
        self._random = random.Random(seed)
        self.compute = HostileStream(self, COMPUTE)
        self._sides: list[HostileStream] = []

    def make_stream(self) -> HostileStream:
        with self.lock:
            side = HostileStream(self, f"copy stream {len(self._sides) + 1}")
            self._sides.append(side)
            self.races.add_actor(side.name)
        return side

    @property
    def streams(self) -> list[HostileStream]:
        return [self.compute, *self._sides]

    def queue(
        self,
        stream: HostileStream,
        func: Any,
        args: Any,
        kwargs: Any,
        *,
        written: list[torch.Tensor],
        label: object,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Have an op done later; its destination is poison until then. With the lock. kept: as ``_Job`` has it."""
        unread = [tensor for tensor in written if not self._is_waited_for(tensor)]
        job = _Job(func, args, kwargs, label=label, kept=kept)
        if name_of(func) in _OVERWRITES:
            with _disable_current_modes(), torch.no_grad():
                for tensor in unread:
                    poison(tensor)
        stream.add(job)

    def may_do(self, stream: HostileStream) -> None:
        """Now, as the schedule says. With the lock."""
        if self._schedule == "early":
            while not stream.is_idle:
                stream.do_one()
        elif self._schedule == "random":
            while not stream.is_idle and self._random.random() < _RUN_ONE:
                stream.do_one()

    def roll(self) -> None:
        """Some time passes."""
        if self._schedule == "random":
            with self.lock:
                for stream in self.streams:
                    self.may_do(stream)

    def delay_s(self) -> float:
        """Seconds by which a thread begins late."""
        return 0.0 if self._schedule == "early" else self._random.choice((0.0, _LATE_S))

    def do_what_touches(self, stream: HostileStream, tensors: Iterable[torch.Tensor]) -> None:
        """Bring a stream up to date, where what it has to do touches these."""
        if any(stream.touches(span.storage, span.start, span.end) for span in map(span_of, tensors)):
            while not stream.is_idle:
                stream.do_one()

    def made(self, data: torch.Tensor) -> None:
        """Memory came; the block may have been another tensor's until now. With the lock."""
        self.races.access(COMPUTE, "its making", reads=(), writes=(span_of(data),))

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def let_go(self, storage: torch.UntypedStorage, what: str) -> None:
        """Memory goes. With the lock."""
        for stream in self.streams:
            for label in stream.drop(storage):
                self.races.faults.append(f"memory {what} while {stream.name} had {label} still to do with it")
        self.races.let_go(storage, moment=f" ({what})")

    def _is_waited_for(self, tensor: torch.Tensor) -> bool:
        span = span_of(tensor)
        return any(stream.touches(span.storage, span.start, span.end) for stream in self.streams)


_OVERWRITES = ("aten::copy_", "aten::amax", "aten::zero_", "aten::fill_")
"""Ops whose result does not depend on what they write over."""


def stale_event(stream: HostileStream) -> HostileEvent:
    """An event that has happened before anything was queued."""
    return HostileEvent(stream, 0, {})
