"""Reads the kernel's counters of this process's TCP connections: bytes given to them, whatever else uses the interface.

From ``TCP_INFO`` (``linux/tcp.h``), which any process may ask of its own sockets; gloo's are found among the open files.
"""

import os
import socket
import struct
import time
from pathlib import Path

_INFO_BYTES = 256
_SETTLED_S = 0.05
_BYTES_SENT_AT = 200
"""Offset of ``tcpi_bytes_sent``, which ``tcpi_bytes_retrans`` follows."""


def count_sent_bytes() -> int:
    """Bytes of content over all connections since they were made, those sent again left out."""
    total = 0
    for file in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(file.name)))
        except OSError:
            continue
        with connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                sent, again = struct.unpack_from("<QQ", info, _BYTES_SENT_AT)
                total += sent - again
    return total


def count_settled_bytes() -> int:
    """The same once nothing that was given to a connection waits to be sent."""
    found = -1
    while found != (found := count_sent_bytes()):
        time.sleep(_SETTLED_S)
    return found


def count_interface_bytes(interface: str) -> int:
    """Bytes that left an interface of this process's network namespace, as ``/proc/net/dev`` has them."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise LookupError(f"no interface {interface}")
