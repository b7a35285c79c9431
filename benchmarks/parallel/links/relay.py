"""Forwards Ethernet frames between TAP devices, each behind an access link of a rate, with a delay between any two.

``python -m benchmarks.parallel.links.relay`` reads one line of JSON with the settings, makes the devices, prints ``ready`` and
forwards until its standard input ends. This kernel has no netem, so the delay is made here: a frame leaves its sender's access
link when that has carried all before it, arrives a delay later, and takes its place on the receiver's access link, which begins
with the first bit (cut-through). Queues are bounded: what finds more than ``QUEUE_S`` of its link's rate before it is dropped.

Frames keep what the sender left to the device (segmentation, checksums), so that one of them may hold 64 KiB; the headers of the
frames that a real link would carry instead are counted with its time.
"""

import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

QUEUE_S: Final = 0.5
"""Longest queue before an access link, in seconds of its rate."""
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_VNET_HEADER_BYTES: Final = 10
_MOST_FRAME_BYTES: Final = 1 << 17
_PRIORITY: Final = 2
_SEGMENT_BYTES: Final = 1448
_HEADER_BYTES: Final = 66
"""Ethernet, IPv4 and TCP with timestamps, of each further frame that a device would cut a large one into."""


@dataclass
class _Access:
    """One rank's link to the rest."""

    fd: int
    out_free_s: float = 0.0
    in_free_s: float = 0.0
    coming: list[tuple[float, int, float, bytes]] = field(default_factory=list)
    """When the last bit could be there, the frame's number, its time on the link, the frame: a heap."""
    due: deque[tuple[float, bytes]] = field(default_factory=deque)
    """When the last bit is there, in order."""


class Relay:
    """The devices and what is under way between them."""

    def __init__(self, names: list[str], *, bytes_per_s: float, delay_s: float) -> None:
        self._access = [_Access(fd=_open_tap(name)) for name in names]
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._num_frames = 0

    def run(self, stop_fd: int) -> None:
        """Forward until the descriptor ends."""
        by_fd = {each.fd: each for each in self._access}
        while True:
            wait_s = None if (next_s := self._next_s()) is None else max(0.0, next_s - time.monotonic())
            readable, _, _ = select.select([*by_fd, stop_fd], [], [], wait_s)
            if stop_fd in readable:
                return
            for fd in readable:
                self._take(by_fd[fd])
            self._deliver()

    def _next_s(self) -> float | None:
        firsts = [queue[0][0] for each in self._access for queue in (each.coming, each.due) if queue]
        return min(firsts, default=None)

    def _take(self, source: _Access) -> None:
        while True:
            try:
                frame = os.read(source.fd, _MOST_FRAME_BYTES)
            except BlockingIOError:
                return
            num_bytes = _bytes_on_wire(len(frame) - _VNET_HEADER_BYTES)
            took_s, now_s = num_bytes / self._bytes_per_s, time.monotonic()
            if source.out_free_s > now_s + QUEUE_S:
                continue
            source.out_free_s = max(source.out_free_s, now_s) + took_s
            for target in self._targets(frame, source):
                self._num_frames += 1
                heapq.heappush(target.coming, (source.out_free_s + self._delay_s, self._num_frames, took_s, frame))

    def _targets(self, frame: bytes, source: _Access) -> list[_Access]:
        """By the last byte of the address, which is a rank's; all others for a broadcast."""
        address = frame[_VNET_HEADER_BYTES : _VNET_HEADER_BYTES + 6]
        if address[0] & 1:
            return [each for each in self._access if each is not source]
        return [self._access[address[5]]] if address[5] < len(self._access) else []

    def _deliver(self) -> None:
        now_s = time.monotonic()
        for target in self._access:
            # Only now, so that no frame holds up one that comes before it from elsewhere.
            while target.coming and target.coming[0][0] <= now_s:
                there_s, _, took_s, frame = heapq.heappop(target.coming)
                target.in_free_s = max(there_s, target.in_free_s + took_s)
                target.due.append((target.in_free_s, frame))
            while target.due and target.due[0][0] <= now_s:
                os.write(target.fd, target.due.popleft()[1])


def _bytes_on_wire(num_bytes: int) -> int:
    num_segments = max(1, -(-(num_bytes - _HEADER_BYTES) // _SEGMENT_BYTES))
    return num_bytes + (num_segments - 1) * _HEADER_BYTES


def _open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HEADER_BYTES))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return fd


def main() -> int:
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    relay = Relay(settings["names"], bytes_per_s=settings["bytes_per_s"], delay_s=settings["delay_s"])
    # A late relay would be a slower link than was asked for.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    print("ready", flush=True)
    relay.run(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
