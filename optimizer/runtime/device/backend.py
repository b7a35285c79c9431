"""The interface that the runtime asks of a device beyond tensors: streams, events, pinned memory, its allocator.

Two kinds of device stand behind it. A *synchronous* one (the CPU) does everything at once: it has no stream to make, and none
of the calls about streams is ever made to it. An *asynchronous* one (CUDA) queues work on streams: compute on the stream that
is current, copies beside it on streams that ``make_stream`` makes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's queue."""

    def synchronize(self) -> None:
        """Have the host wait until all that was queued before it is done."""


class Stream(Protocol):
    """A queue of the device, worked off in order."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """Have what is queued from now on run after the event. The host does not wait."""

    def wait_stream(self, stream: "Stream") -> None:
        """Have what is queued from now on run after all that is queued on the other now."""

    def synchronize(self) -> None:
        """Have the host wait until the queue is empty."""


class DeviceMemory(Protocol):
    """The caching allocator of a device with memory of its own. Bytes, as torch counts them."""

    @property
    def total_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """Left of the whole device, by all processes."""

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def peak_allocated_bytes(self) -> int:
        """Since ``reset_peak``."""

    @property
    def peak_reserved_bytes(self) -> int:
        """Since ``reset_peak``."""

    def reset_peak(self) -> None: ...

    def limit(self, share: float) -> None:
        """Refuse to reserve more than this share of the device, from 0 to 1."""

    def release_cached(self) -> None:
        """Give blocks that no tensor uses back to the device."""

    def set_expandable_segments(self, *, is_on: bool) -> None: ...

    def clear_workspaces(self) -> None:
        """Have the matrix libraries let go of the scratch memory that they took."""


class Backend(Protocol):
    """One device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_asynchronous(self) -> bool:
        """True if copies run beside compute, and compute beside the host."""

    @property
    def memory(self) -> DeviceMemory | None:
        """None where the device is the host's own memory, which has no allocator to ask."""

    # Streams.

    def make_stream(self) -> Stream | None:
        """A stream for copies beside compute; None where nothing runs beside it."""

    def current_stream(self) -> Stream:
        """The stream on which this thread queues its work."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue what this thread does inside on ``stream``."""

    def synchronize(self) -> None:
        """Have the host wait for all streams."""

    def current(self) -> AbstractContextManager[object]:
        """Inside, the device is the one that this thread's work goes to where no device is named."""

    def enter_thread(self) -> None:
        """The same for the rest of a thread's life."""

    # Pinned memory: host memory that the device reads and writes by itself.

    def empty_pinned(self, num_bytes: int) -> torch.Tensor:
        """Bytes, not initialized; torch rounds them up to a power of two. Raises RuntimeError where no more can be pinned."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory; the tensor itself where nothing is pinned."""

    def register(self, data: torch.Tensor) -> int:
        """Pin host memory where it lies; 0, or the driver's number for why it cannot."""

    def unregister(self, data: torch.Tensor) -> None: ...

    # What it is.

    @property
    def name(self) -> str: ...

    @property
    def exchange_versions(self) -> Mapping[str, str]:
        """Versions of the libraries by which devices of this kind exchange tensors and which torch's version does not imply."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of a CUDA card; None of other devices."""

    @property
    def computes_bf16(self) -> bool:
        """False where torch would emulate it."""

    def random_state(self) -> torch.Tensor | None:
        """State of the device's own random numbers; None where it draws the host's."""

    def set_random_state(self, state: torch.Tensor) -> None: ...
