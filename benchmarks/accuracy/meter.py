"""A second opinion on device bytes that shares nothing with the runtime's meter: the allocation events of torch's profiler.

The profiler hears of every allocation and release by torch's CPU allocator, those inside kernels included, with its address.
It is started before the model is built, so the running sum is everything that is alive, not a difference to something assumed.
On the CPU device both tiers are one memory; which buffers are the host's is the one thing taken over from the runtime, by
their addresses. *Not seen*: memory that comes from elsewhere than torch's allocator (``mmap``, libraries' own ``malloc``).
"""

import bisect
import contextlib
import gc
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function

from optimizer.runtime.meter.ledger import NUM_CATEGORIES
from optimizer.runtime.meter.meter import Meter

STEADY = "headroom: steady step"
_HOST = "headroom: on the host:"


@dataclass(kw_only=True)
class _Block:
    """One allocation, from its event to its release."""

    num_bytes: int
    is_on_host: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfiledPeak:
    """Within the steady step."""

    device_bytes: int
    """Most bytes alive at once, buffers of the host's left out."""
    total_bytes: int
    """The same with the host's."""
    num_events: int


class HostMarkingMeter(Meter):  # type: ignore[no-untyped-call]
    """The runtime's meter, which also reports the address of each host buffer to the profiler."""

    def _see(self, tensor: torch.Tensor, slot: int) -> None:
        super()._see(tensor, slot)
        self._report_address(tensor, slot)

    def _count_as(self, tensor: torch.Tensor, slot: int) -> None:
        super()._count_as(tensor, slot)
        self._report_address(tensor, slot)

    def _report_address(self, tensor: torch.Tensor, slot: int) -> None:
        if slot >= NUM_CATEGORIES:
            with record_function(f"{_HOST}{tensor.untyped_storage().data_ptr()}"):
                pass


class AllocationProfile:
    """Enter it before the model is built, and ``steady_step`` around what counts; the peak is there after leaving."""

    def __init__(self) -> None:
        self._profiler: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._alive: frozenset[int] | None = None
        self._peak: ProfiledPeak | None = None

    def __enter__(self) -> "AllocationProfile":
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        if error[0] is None:
            roots = self._profiler.profiler.kineto_results.experimental_event_tree()
            events = sorted(flatten(roots), key=lambda event: event.start_time_ns)
            self._peak = read_peak(events, alive=self._alive)

    @property
    def peak(self) -> ProfiledPeak:
        if self._peak is None:
            raise ValueError("the profile has not ended, or ended with an error")
        return self._peak

    @contextmanager
    def steady_step(self) -> Iterator[None]:
        self._alive = frozenset(list_addresses())
        with record_function(STEADY):
            yield


def list_addresses() -> Iterator[int]:
    """Addresses of the storages of all tensors that Python still knows."""
    gc.collect()
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor | torch.UntypedStorage) or isinstance(found, FakeTensor):
            continue
        # Of sparse tensors and the like the parts are found for themselves.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = found if isinstance(found, torch.UntypedStorage) else found.untyped_storage()
            if storage.device.type == "cpu":
                yield storage.data_ptr()


def flatten(roots: Sequence[Any]) -> Iterator[Any]:
    """Every event of a tree, in no particular order."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


def read_peak(events: Iterable[Any], *, alive: Container[int] | None = None) -> ProfiledPeak:
    """Find the peak in events ordered by time. A release of what was allocated before the first event is passed over.

    alive: addresses of what is there when the steady step begins; what else seems to be there was released on a thread that
    the profiler does not hear. None believes the events. Raises ValueError without a steady step.
    """
    changes: list[tuple[_Block, int]] = []
    live = _Live()
    first, end_ns = None, None
    for event in events:
        if event.name == STEADY:
            changes += live.keep(alive) if alive is not None else []
            first, end_ns = len(changes), event.end_time_ns
        elif event.name.startswith(_HOST):
            live.mark_host(int(event.name.removeprefix(_HOST)))
        elif event.tag == _EventType.Allocation and (end_ns is None or event.start_time_ns <= end_ns):
            fields = event.extra_fields
            changes += live.take(fields.ptr, fields.alloc_size) if fields.alloc_size > 0 else live.release(fields.ptr)
    if first is None:
        raise ValueError("no steady step was profiled")
    device, total = list(_sums(changes, with_host=False)), list(_sums(changes, with_host=True))
    return ProfiledPeak(
        device_bytes=max(device[first:]), total_bytes=max(total[first:]), num_events=len(changes) - first
    )


class _Live:
    """Bytes allocated at the moment, by address."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._addresses: list[int] = []

    def take(self, address: int, num_bytes: int) -> list[tuple[_Block, int]]:
        """Whatever stood there is gone: the profiler does not hear of releases on threads of the runtime's own."""
        first = bisect.bisect_left(self._addresses, address)
        if first and (before := self._addresses[first - 1]) + self._blocks[before].num_bytes > address:
            first -= 1
        last = bisect.bisect_left(self._addresses, address + num_bytes)
        changes = [change for other in self._addresses[first:last] for change in self._drop(other)]
        self._addresses[first:last] = [address]
        block = self._blocks[address] = _Block(num_bytes=num_bytes)
        return [*changes, (block, num_bytes)]

    def release(self, address: int) -> list[tuple[_Block, int]]:
        if address not in self._blocks:
            return []
        del self._addresses[bisect.bisect_left(self._addresses, address)]
        return self._drop(address)

    def keep(self, alive: Container[int]) -> list[tuple[_Block, int]]:
        gone = [address for address in self._addresses if address not in alive]
        return [change for address in gone for change in self.release(address)]

    def mark_host(self, address: int) -> None:
        if address in self._blocks:
            self._blocks[address].is_on_host = True

    def _drop(self, address: int) -> list[tuple[_Block, int]]:
        block = self._blocks.pop(address)
        return [(block, -block.num_bytes)]


def _sums(changes: Iterable[tuple[_Block, int]], *, with_host: bool) -> Iterator[int]:
    """Before the first change and after each."""
    current = 0
    yield current
    for block, delta in changes:
        current += delta if with_host or not block.is_on_host else 0
        yield current
