"""The link between the devices of the machine: on the CPU device measured over the loopback, on CUDA from the table of cards.

Processes that play devices on one machine talk over TCP on the loopback, as gloo's do: each byte is copied into the kernel and
out of it again, by the cores that also compute. Two threads and one connection show that in a fraction of a second; starting
processes and a process group for it would take many times as long.

*Not modelled*: what gloo adds (its buffers and the sums), which finished runs correct.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from optimizer.hardware.machine import Device, PeerLink
from optimizer.hardware.peers import find_peers
from optimizer.hardware.rates import Rates

_LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 1 << 20
_NUM_CHUNKS = 32
_NUM_PINGS = 50
_TIMEOUT_S = 10.0
COPIES_OF_A_BYTE = 4
"""Times that the loopback touches each byte: read and written once into the kernel, once out of it."""
USUAL_LATENCY_S = 30e-6
"""A message on the loopback and the wake of who waits for it; taken where no connection can be made."""


def probe_peers(device: Device, rates: Rates, *, num_devices: int, max_s: float) -> PeerLink | None:
    """None on one device."""
    if num_devices == 1:
        return None
    if device.kind == "cuda":
        return find_peers(device, rates, reach_each_other=_reach_each_other(device.index, num_devices))
    try:
        return probe_loopback(num_devices, max_s=max_s)
    except OSError:
        # every device sends and receives at once through the one memory
        assumed = rates.memory_bytes_per_s / COPIES_OF_A_BYTE / num_devices
        return PeerLink(kind="loopback", bytes_per_s=assumed, latency_s=USUAL_LATENCY_S, source="table")


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
    names = [_card_of(other) for other in range(index, torch.cuda.device_count())]
    return next((place for place, name in enumerate(names) if name != names[0]), len(names))


def _card_of(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory


def _reach_each_other(index: int, num_devices: int) -> bool:
    places = range(index, index + num_devices)
    return all(torch.cuda.can_device_access_peer(a, b) for a in places for b in places if a != b)


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
