"""Lets the ranks of one run, each a process with a device of its own, sum, send and compare what they have.

Tensors on the device go through NCCL on CUDA and through gloo on the CPU device; numbers and tensors on the host always through
gloo, over the loopback interface unless ``HEADROOM_RANK_INTERFACE`` or the rank's place names another. Ranks find each other by a
file in a folder that they all name; no port is agreed on and no process group of torch's own is registered. Nothing is pickled:
what is no tensor crosses as numbers or as JSON.

All ranks must call the same methods in the same order. Each wait has a deadline and raises RankLost at its end, or at once where
the connection of a rank that ended is closed, or soon where its computer cannot be reached (``connections.py``). On CUDA a
collective only makes the compute stream wait; the deadline is kept where the process itself waits, in ``settle``, and by NCCL's
own watchdog, which ends the process after twice the time, but has patience for tensors between two ranks (``open_ways``).

What is allocated: nothing that torch's allocator or the meter sees. Numbers and JSON lie in numpy's memory; gloo's and NCCL's
buffers are their own (NCCL's take card memory beside torch's). ``receive`` writes to a tensor of the caller's.
"""

import ctypes
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from optimizer.base.errors import InvalidInput, RankLost
from optimizer.runtime.meter.lanes import LaneClock
from optimizer.runtime.ranks.alike import RankFacts, exchange_facts, require_alike
from optimizer.runtime.ranks.connections import giving_up_silent_connections
from optimizer.runtime.ranks.interface import INTERFACE_VARIABLE, LOOPBACK, find_interface, read_boot_id
from optimizer.runtime.ranks.nccl import make_nccl_group

TIMEOUT_S: Final = 300.0
"""Ranks do equal work, so a wait is as long as the slowest of them is slower than the others."""
PATIENCE_S: Final = 24 * 3600.0
"""Longest wait for what one rank does alone: loading, checkpoints, export. A rank that ends meanwhile is noticed at once."""
_STORE_FILE = "rendezvous"
_POLL_S = 1e-4
_FIRST_RANK = 0
_dist: Any = torch.distributed
"""Its classes for groups and stores have no annotations."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of one process among the ranks of its run."""

    rank: int
    """From 0; rank 0 reports, decides and writes."""
    num_ranks: int
    folder: Path
    """Folder in which the ranks find each other: the same for all, on a file system that they share, new for each start."""
    timeout_s: float = TIMEOUT_S
    """Longest wait for the others in a step, in seconds."""
    interface: str = ""
    """Network interface of this machine by which gloo reaches the other ranks; what ``HEADROOM_RANK_INTERFACE`` names unless
    given, else the loopback. On several machines each names its own."""
    machine: str = ""
    """Name of the rank's machine, for messages; the host's unless given."""


class Arriving:
    """A tensor that was asked for and may be on its way."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], None] | None) -> None:
        """wait: None where it is there."""
        self._wait = wait

    def wait(self) -> None:
        """Have compute that is queued from now on run once it is there, and once it was sent. Of no effect the second time."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Ranks:
    """The ranks of one run, as one of them sees them. A context manager; waits for all others when it is made."""

    def __init__(
        self,
        place: RankPlace,
        *,
        device: torch.device,
        plan: str = "",
        whole: "Ranks | None" = None,
        members: Sequence[int] = (),
    ) -> None:
        """plan: fingerprint of what all of them carry out. whole, members: of some of the ranks of a run, all of them and the
        numbers of these there (``among``).

        Raises RankLost where the others do not come in time, RanksDiffer where one of them has other versions or another plan,
        InvalidInput where there is no such interface, or where it reaches this computer alone and others are elsewhere,
        OutOfDeviceMemory where a card has no room for NCCL's own.
        """
        self.rank = place.rank
        self.num_ranks = place.num_ranks
        self.timeout_s = place.timeout_s
        self.interface = find_interface(place.interface)
        self._place, self._torch_device, self._whole = place, device, whole
        self._some: dict[tuple[int, ...], Ranks] = {}
        self.lanes = LaneClock()
        """Counts the time of waits as the network's; a trainer has its own put here."""
        self._num_bytes = 0
        self._is_cuda = device.type == "cuda"
        self._under_way: deque[Any] = deque()
        """NCCL's collectives that the compute stream was not yet made to wait for."""
        self._last: Any = None
        with self._naming_loss("the others to start"):
            self._store: Any = (
                self._find_others(plan) if whole is None else _dist.PrefixStore(f"of {list(members)}", whole._store)
            )
            self._host = self._make_gloo(self._store)
            self._device: Any = self._make_nccl(self._store, device, name="device") if self._is_cuda else self._host
        self._ways: list[Any] = [self._device]
        """Groups for tensors between two ranks, which on CUDA go one after the other within a group, whoever they are for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_first(self) -> bool:
        return self.rank == _FIRST_RANK

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that were given to collectives since the start, also among some of the ranks."""
        return self._num_bytes + sum(some.num_bytes for some in self._some.values())

    def among(self, members: Sequence[int]) -> "Ranks":
        """Some of the ranks, of whom this is one, as a run of their own: they have numbers by their order in ``members``. Asked
        for by all of these, and made once; on CUDA with NCCL's memory for another group. They end with all.
        """
        key = tuple(members)
        if key == tuple(range(self.num_ranks)):
            return self
        if key not in self._some:
            place = replace(self._place, rank=key.index(self.rank), num_ranks=len(key))
            self._some[key] = Ranks(place, device=self._torch_device, whole=self, members=key)
        self._some[key].lanes = self.lanes
        return self._some[key]

    def close(self) -> None:
        """Leave; ranks that still wait for this one raise RankLost. Of no effect the second time."""
        for some in self._some.values():
            some.close()
        device, others, host = self._device, self._ways[1:], self._host
        self._device = self._host = self._last = None
        self._ways = []
        for way in others if self._is_cuda else ():
            way.abort()
        self._under_way.clear()
        if device is not None and device is not host:
            # Not shutdown, which waits for what a lost rank will never do.
            device.abort()

    # Tensors on the device; in place, contiguous or at least without gaps.

    def all_reduce_(self, tensor: torch.Tensor, *, waits: bool = True) -> None:
        """Make it the sum over the ranks, the same bits on each. waits: False leaves the waiting to ``settle``, on CUDA."""
        given = self._given(tensor)
        work = self._post(lambda: self._device.allreduce([given]), "the sum of a tensor")
        if self._is_cuda and not waits:
            self._under_way.append(work)
        else:
            self._finish(work, "the sum of a tensor")

    def reduce_(self, tensor: torch.Tensor, *, owner: int) -> None:
        """Make it the sum over the ranks on the owner; the others' numbers are undefined afterwards."""
        options = _dist.ReduceOptions()
        options.rootRank = owner
        given, waiting_for = self._given(tensor), "the sum of a tensor"
        self._finish(self._post(lambda: self._device.reduce([given], options), waiting_for), waiting_for)

    def broadcast_(self, tensor: torch.Tensor, *, owner: int) -> None:
        """Make it what the owner has."""
        self._finish(self._post_broadcast(tensor, owner=owner), "a tensor of another rank")

    def begin_broadcast(self, tensor: torch.Tensor, *, owner: int) -> "Arriving":
        """Have it become what the owner has. Who reads or writes it, on the owner too, waits first; the CPU device has it at
        once.
        """
        work = self._post_broadcast(tensor, owner=owner)
        if not self._is_cuda:
            self._wait(work, "a tensor of another rank")
            return Arriving(None)
        return Arriving(lambda: self._finish(work, "a tensor of another rank"))

    def send_from_device(self, tensor: torch.Tensor, *, to: int) -> None:
        """A contiguous tensor on the device, to a rank that waits in ``receive_on_device``. On CUDA the compute stream waits."""
        self.begin_sending_from_device(tensor, to=to).wait()

    def begin_sending_from_device(self, tensor: torch.Tensor, *, to: int, way: int = 0) -> Arriving:
        """The same without waiting, but for who writes to the tensor or drops it. way: of those that are open; what is sent on
        one way arrives in its order, whatever goes on another.
        """
        if not tensor.numel():
            return Arriving(None)
        waiting_for = f"rank {to} to take hidden states"
        work = self._post(lambda: self._ways[way].send([self._given(tensor)], to, way), waiting_for)
        return Arriving(lambda: self._finish(work, waiting_for, timeout_s=PATIENCE_S))

    def receive_on_device(self, tensor: torch.Tensor, *, source: int, way: int = 0) -> None:
        """Fill a contiguous tensor on the device, of the size of the one that is sent."""
        if tensor.numel():
            given, waiting_for = tensor.detach(), f"rank {source} to send hidden states"
            lent = given if self._is_cuda else _lend(given)
            work = self._post(lambda: self._ways[way].recv([lent], source, way), waiting_for)
            self._finish(work, waiting_for, timeout_s=PATIENCE_S)

    def open_ways(self, number: int) -> None:
        """Before tensors go both ways at once, or in another order than they are taken in. Of all ranks together. On CUDA all
        that a rank sends and takes within a group goes one after the other, since NCCL's groups that are connected at once have
        one stream for it; so each way is a group of its own, with NCCL's memory for one. What goes there waits with patience.
        """
        while len(self._ways) < number:
            name = f"device-{len(self._ways)}"
            self._ways.append(self._make_nccl(self._store, self._torch_device, name=name) if self._is_cuda else self._device)
        if self._is_cuda:
            # Its watchdog counts from when a tensor is asked for, while stages before may compile one after the other.
            for way in self._ways:
                way._set_default_timeout(timedelta(seconds=PATIENCE_S))

    def settle(self, *, timeout_s: float | None = None) -> None:
        """On CUDA: make the compute stream wait for all that was asked for, and wait until it is there, as long as for others in
        a step unless given. Raises RankLost.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        for some in self._some.values():
            some.settle(timeout_s=timeout_s)
        while self._under_way:
            self._finish(self._under_way.popleft(), "the sum of a tensor")
        work, self._last = self._last, None
        if work is None:
            return
        with self._naming_loss("the sums or weights of a step"):
            end_s = time.monotonic() + timeout_s
            while not work.is_completed():
                if time.monotonic() > end_s:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                time.sleep(_POLL_S)
            work.wait()

    # Numbers, JSON and tensors on the host.

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """By rank: what each of them gave, as many numbers each; integers are exact up to 2**53."""
        found = np.zeros((self.num_ranks, len(numbers)), dtype=np.float64)
        found[self.rank] = numbers
        rows: list[list[float]] = self._gathered(found, "numbers of the other ranks").tolist()
        return rows

    def from_first(self, numbers: Sequence[float]) -> list[float]:
        """The numbers that rank 0 gave, on each rank; as many were given by all."""
        return self.exchange(numbers)[_FIRST_RANK]

    def exchange_json(self, value: Any) -> list[Any]:
        """By rank: the JSON-able value of each."""
        encoded = json.dumps(value).encode()
        lengths = [int(length) for (length,) in self.exchange([len(encoded)])]
        found = np.zeros((self.num_ranks, max(lengths)), dtype=np.uint8)
        found[self.rank, : len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        rows = self._gathered(found, "facts of the other ranks")
        return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def barrier(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Return when all ranks have called it."""
        options = _dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._wait(self._host.barrier(options), "all ranks to get this far")

    def broadcast_on_host_(self, tensor: torch.Tensor, *, owner: int) -> None:
        """Make a contiguous tensor on the host what the owner has."""
        options = _dist.BroadcastOptions()
        options.rootRank = owner
        if tensor.numel():
            self._wait(self._host.broadcast([_as_bytes(tensor)], options), "a tensor of another rank", timeout_s=PATIENCE_S)

    def all_reduce_on_host_(self, tensor: torch.Tensor, *, largest: bool = False, num_steps: int = 1) -> None:
        """Make a contiguous tensor on the host the sum over the ranks, or the largest of them, the same bits on each.

        num_steps: that ranks took without each other, each of which may be as late as one may be.
        """
        options = _dist.AllreduceOptions()
        options.reduceOp = _dist.ReduceOp.MAX if largest else _dist.ReduceOp.SUM
        options.timeout = timedelta(seconds=self.timeout_s * num_steps)
        if tensor.numel():
            self._num_bytes += tensor.nbytes
            work = self._host.allreduce([_lend(tensor.detach())], options)
            self._wait(work, "the others to synchronize", timeout_s=self.timeout_s * num_steps)

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """A contiguous tensor on the host, to a rank that waits in ``receive``."""
        if tensor.numel():
            waiting_for = f"rank {to} to take a tensor"
            work = self._post(lambda: self._host.send([_as_bytes(tensor)], to, 0), waiting_for)
            self._wait(work, waiting_for, timeout_s=PATIENCE_S)

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Fill a contiguous tensor on the host, of the size of the one that is sent."""
        if tensor.numel():
            waiting_for = f"rank {source} to send a tensor"
            work = self._post(lambda: self._host.recv([_as_bytes(tensor)], source, 0), waiting_for)
            self._wait(work, waiting_for, timeout_s=PATIENCE_S)

    def begin_sending(self, integers: Sequence[int], *, to: int, tag: int) -> "Sent":
        """Whole numbers to a rank that takes as many with ``receive_integers``; those of one tag arrive in their order."""
        numbers = np.array(integers, dtype=np.int64)
        given = [_as_bytes(torch.from_numpy(numbers))]
        work = self._post(lambda: self._host.send(given, to, tag), f"rank {to} to take numbers")
        return Sent(self, work, numbers, to=to)

    def receive_integers(self, count: int, *, source: int, tag: int) -> NDArray[np.int64]:
        """The oldest that were sent with this tag and not taken yet, in memory that no meter sees. Raises RankLost."""
        numbers = np.zeros(count, dtype=np.int64)
        given, waiting_for = [_as_bytes(torch.from_numpy(numbers))], f"rank {source} to send numbers"
        work = self._post(lambda: self._host.recv(given, source, tag), waiting_for)
        self._wait(work, waiting_for, timeout_s=PATIENCE_S)
        return numbers

    # Helpers.

    def _find_others(self, plan: str) -> Any:
        """The store by which all ranks of a run find each other, once it is known that they may exchange anything."""
        place = self._place
        place.folder.mkdir(parents=True, exist_ok=True)
        store = _dist.FileStore(str(place.folder / _STORE_FILE), place.num_ranks)
        store.set_timeout(timedelta(seconds=place.timeout_s))
        own = RankFacts.find(computer=read_boot_id(), machine=place.machine, device=self._torch_device, plan=plan)
        facts = exchange_facts(own, store=store, rank=place.rank, num_ranks=place.num_ranks)
        self._check_reach([each.computer for each in facts])
        require_alike(facts)
        return store

    def _check_reach(self, computers: Sequence[str]) -> None:
        """Refuse the loopback where others are on other computers; else they would be waited for in vain."""
        for other, computer in enumerate(computers):
            if self.interface == LOOPBACK and computer != computers[self.rank]:
                raise InvalidInput(
                    f"rank {self.rank} would reach the others by {LOOPBACK}, and rank {other} is on another computer",
                    field=INTERFACE_VARIABLE,
                    value=LOOPBACK,
                    allowed="the interface by which this machine reaches the others",
                    hint=f"Set {INTERFACE_VARIABLE} for this machine's worker, such as to eth0, and start it again.",
                )

    def _make_gloo(self, store: Any) -> Any:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(interface=self.interface)]
        options._timeout = timedelta(seconds=self.timeout_s)
        with giving_up_silent_connections():
            return _dist.ProcessGroupGloo(_dist.PrefixStore("host", store), self.rank, self.num_ranks, options)

    def _make_nccl(self, store: Any, device: torch.device, *, name: str) -> Any:
        with self._naming_loss("the others to connect"):
            return make_nccl_group(
                _dist.PrefixStore(name, store),
                rank=self.rank,
                num_ranks=self.num_ranks,
                device=device,
                # So that a wait of this program's own, which can be caught, ends first.
                timeout_s=2 * self.timeout_s,
            )

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        self._num_bytes += tensor.nbytes
        given = tensor.detach()
        if not given.is_contiguous():
            # Of a tensor that is stored in another order of dimensions the storage's order will do: it is the same on each rank.
            given = given.as_strided((given.numel(),), (1,))
        return given if self._is_cuda or not given.numel() else _lend(given)

    def _gathered(self, found: NDArray[Any], waiting_for: str) -> NDArray[Any]:
        """Rows of all ranks, from a table of this rank's and zeros: the sum has them all, in memory that no meter sees."""
        if found.size:
            self._wait(self._host.allreduce([torch.from_numpy(found)]), waiting_for)
        return found

    def _post_broadcast(self, tensor: torch.Tensor, *, owner: int) -> Any:
        options = _dist.BroadcastOptions()
        options.rootRank = owner
        given = self._given(tensor)
        return self._post(lambda: self._device.broadcast([given], options), "a tensor of another rank")

    def _post(self, post: Callable[[], Any], waiting_for: str) -> Any:
        """Ask for something of other ranks. Where a connection was closed before, gloo refuses at once, and NCCL where a
        communicator was aborted.
        """
        with self._naming_loss(waiting_for):
            return post()

    def _finish(self, work: Any, waiting_for: str, *, timeout_s: float | None = None) -> None:
        """On CUDA the compute stream waits, else the process."""
        if not self._is_cuda:
            self._wait(work, waiting_for, timeout_s=timeout_s)
            return
        with self._naming_loss(waiting_for):
            work.wait()
        self._last = work

    def _wait(self, work: Any, waiting_for: str, *, timeout_s: float | None = None) -> None:
        with self._naming_loss(waiting_for), self.lanes.busy("network"):
            if timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))

    @contextmanager
    def _naming_loss(self, waiting_for: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            whole = self._whole or self
            raise RankLost(
                rank=whole.rank,
                num_ranks=whole.num_ranks,
                waiting_for=waiting_for,
                waited_s=time.monotonic() - start_s,
                cause=_in_short(error),
            ) from error


def join_ranks(place: RankPlace, *, device: str) -> Ranks:
    """The ranks of a run for a caller that knows devices by their names alone. Raises RankLost."""
    return Ranks(place, device=torch.device(device))


class Sent:
    """Numbers on their way to another rank."""

    def __init__(self, ranks: Ranks, work: Any, numbers: NDArray[np.int64], *, to: int) -> None:
        self._ranks, self._work, self._to = ranks, work, to
        self._numbers = numbers
        """Kept until they are taken."""

    def wait(self) -> None:
        """Until they are taken. Raises RankLost."""
        self._ranks._wait(self._work, f"rank {self._to} to take numbers", timeout_s=PATIENCE_S)


def _lend(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, not owned: gloo's thread may hold what it was given for a moment after the wait for it has ended, and a
    gradient that is dropped then would still count.
    """
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _in_short(error: BaseException) -> str:
    """The first sentence of a library's error, without the place in its sources."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.partition("] ")[2].partition(". ")[0] if text.startswith("[") else text
