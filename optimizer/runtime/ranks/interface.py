"""The network interface by which ranks of several machines meet: what ``HEADROOM_RANK_INTERFACE`` names. Torch-free."""

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

from optimizer.base.errors import InvalidInput
from optimizer.base.shown import shown_value

INTERFACE_VARIABLE: Final = "HEADROOM_RANK_INTERFACE"
LOOPBACK: Final = "lo"
_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR of Linux."""
_MOST_NAME_BYTES: Final = 15


def find_interface(asked: str = "") -> str:
    """The interface that is asked for, else the environment's, else the loopback. Raises InvalidInput where there is no such."""
    name = asked or os.environ.get(INTERFACE_VARIABLE, "") or LOOPBACK
    present = [each for _, each in socket.if_nameindex()]
    if name not in present:
        raise InvalidInput(
            f"network interface {name[:40]!r} is not on this machine; present: {', '.join(present)}",
            field=INTERFACE_VARIABLE,
            value=shown_value(name),
            allowed=present,
        )
    return name


def address_of(interface: str) -> str:
    """The interface's IPv4 address. Raises InvalidInput where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()[:_MOST_NAME_BYTES]))
        except OSError as error:
            raise InvalidInput(
                f"network interface {interface} has no IPv4 address: {error.strerror}",
                field=INTERFACE_VARIABLE,
                value=shown_value(interface),
                allowed="an interface with an IPv4 address",
            ) from error
    return socket.inet_ntoa(answer[20:24])


def read_boot_id() -> str:
    """Same for all processes and containers of one computer, and for no others; its name where that is not known."""
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return socket.gethostname()
