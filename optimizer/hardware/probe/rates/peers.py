"""The link between the devices of the machine: on the CPU device measured over the loopback, on CUDA from the table of cards, as
far as their driver says that they reach each other.

Processes that play devices on one machine talk over TCP on the loopback, as gloo's do: each byte is copied into the kernel and
out of it again, by the cores that also compute. Two threads and one connection show that in a fraction of a second; starting
processes and a process group for it would take many times as long.

*Not modelled*: what gloo adds (its buffers and the sums), which finished runs correct.
"""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import torch

from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import find_device
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import assumed_link, link_of_kind, peer_link_of

_LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 1 << 20
_NUM_CHUNKS = 32
_NUM_PINGS = 50
_TIMEOUT_S = 10.0


def probe_peers(machine: Machine, *, max_s: float) -> PeerLink | None:
    """The link between devices of the machine, whose own field for it is not read. None on one device."""
    if machine.num_devices == 1:
        return None
    if machine.device.kind == "cuda":
        return _link_of_cards(machine)
    try:
        return probe_loopback(machine.num_devices, max_s=max_s)
    except OSError:
        return assumed_link(replace(machine, peers=None))


def _link_of_cards(machine: Machine) -> PeerLink:
    """NVLink where links of the card are up, PCIe where its driver lets it read another's memory, else through the host."""
    index = machine.device.index
    places = range(index, index + machine.num_devices)
    if all(torch.cuda.can_device_access_peer(one, other) for one in places for other in places if one != other):
        with contextlib.suppress(InvalidInput):  # of a card that is not in the table, and so without a rate
            spec = find_device(machine.device.name)
            return peer_link_of(spec) if _has_nvlink(index) else link_of_kind(spec, "pcie")
    return assumed_link(replace(machine, peers=None))


def _has_nvlink(index: int) -> bool:
    """True if the vendor's library says that a link of the card is up; false where it does not answer."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, 0))
    return False


def probe_loopback(num_devices: int, *, max_s: float) -> PeerLink:
    """Time two sides that send and receive at once; more devices share the cores. Raises OSError where nothing may listen."""
    with ExitStack() as stack:
        here, there = _connect(stack)
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=4))
        latency_s = _round_trip_s(here, there, pool) / 2
        deadline_s = time.perf_counter() + max_s
        seconds = [_exchange_s(here, there, pool)]
        while time.perf_counter() + seconds[-1] < deadline_s:
            seconds.append(_exchange_s(here, there, pool))
    pairs = num_devices / 2
    rate = _NUM_CHUNKS * _CHUNK_BYTES / min(seconds)
    return PeerLink(kind="loopback", bytes_per_s=rate / pairs, latency_s=latency_s, source="measured")


def count_like_cards(index: int) -> int:
    """Cards from this one on that are like it: torch's numbers without a gap, so that each is named by its place."""
    cards = [_card_of(other) for other in range(index, torch.cuda.device_count())]
    return next((place for place, card in enumerate(cards) if card != cards[0]), len(cards))


def _card_of(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory


def _connect(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((_LOOPBACK, 0)) as server:
        here = stack.enter_context(socket.create_connection(server.getsockname()[:2], timeout=_TIMEOUT_S))
        there = stack.enter_context(server.accept()[0])
    for side in (here, there):
        side.settimeout(_TIMEOUT_S)
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def _round_trip_s(here: socket.socket, there: socket.socket, pool: ThreadPoolExecutor) -> float:
    def answer() -> None:
        for _ in range(_NUM_PINGS):
            there.sendall(there.recv(1))

    answered = pool.submit(answer)
    seconds = []
    for _ in range(_NUM_PINGS):
        begin_s = time.perf_counter()
        here.sendall(b"?")
        here.recv(1)
        seconds.append(time.perf_counter() - begin_s)
    answered.result()
    return sorted(seconds)[len(seconds) // 2]


def _exchange_s(here: socket.socket, there: socket.socket, pool: ThreadPoolExecutor) -> float:
    begin_s = time.perf_counter()
    both = [pool.submit(act, side) for side in (here, there) for act in (_send, _receive)]
    for done in both:
        done.result()
    return time.perf_counter() - begin_s


def _send(side: socket.socket) -> None:
    chunk = bytes(_CHUNK_BYTES)
    for _ in range(_NUM_CHUNKS):
        side.sendall(chunk)


def _receive(side: socket.socket) -> None:
    into = memoryview(bytearray(_CHUNK_BYTES))
    left = _NUM_CHUNKS * _CHUNK_BYTES
    while left:
        num_bytes = side.recv_into(into[: min(left, _CHUNK_BYTES)])
        if not num_bytes:
            raise ConnectionResetError("the loopback's connection ended")
        left -= num_bytes
