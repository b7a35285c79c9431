"""Makes a network namespace for each rank and joins them: by a bridge, or by the relay with a rate and a delay.

Each rank's namespace has one interface, ``rank``, at 10.77.0.1 and on, whose counters only its own traffic moves. All of it is
gone when the context ends, also after an error; names carry this process's number, so that two benches do not meet.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from optimizer.base.errors import HeadroomError

INTERFACE: Final = "rank"
_ROOT: Final = Path(__file__).resolve().parents[3]
_MTU: Final = 1500
_BUFFER_BYTES: Final = 64 << 20


class NoNamespaces(HeadroomError):
    """Network namespaces cannot be made here."""

    code = "no_namespaces"


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """An access link for each rank."""

    name: str
    bytes_per_s: float | None = None
    """Bytes per second in each direction; None for a bridge, as fast as the machine."""
    delay_s: float = 0.0
    """Seconds from one rank to another."""
    congestion: str = "cubic"
    """TCP's congestion control: Linux's default, whatever this machine's is."""
    has_small_frames: bool = False
    """True if the kernel cuts what it sends into frames of 1500 bytes before the interface counts them, as a cable has them."""


PROFILES: Final = (
    LinkProfile(name="same box"),
    LinkProfile(name="1 Gbit/s, 1 ms", bytes_per_s=125e6, delay_s=1e-3),
    LinkProfile(name="200 Mbit/s, 20 ms", bytes_per_s=25e6, delay_s=20e-3),
)

SMALL_FRAMES: Final = LinkProfile(name="same box, frames of 1500 bytes", has_small_frames=True)


class Namespaces:
    """The namespaces of one bench, while it lasts."""

    def __init__(self, names: Sequence[str], *, ports: Sequence[str] = ()) -> None:
        """ports: by rank, the bridge's interface to its namespace, where there is a bridge."""
        self._names = list(names)
        self._ports = list(ports)

    def prefix(self, rank: int) -> list[str]:
        """Words before a command that runs in a rank's namespace."""
        return ["ip", "netns", "exec", self._names[rank]]

    def cut(self, rank: int) -> None:
        """Pull a rank's cable out of the bridge: its addresses and routes stay, and no one hears of it."""
        _run("ip", "link", "set", self._ports[rank], "down")

    def mend(self, rank: int) -> None:
        """Put it back."""
        _run("ip", "link", "set", self._ports[rank], "up")


@contextmanager
def joined_namespaces(num_ranks: int, profile: LinkProfile) -> Iterator[Namespaces]:
    """Namespaces that reach each other. Raises NoNamespaces, with what the system said, where they may not be made."""
    stem = f"hr{os.getpid()}"
    names = [f"{stem}n{rank}" for rank in range(num_ranks)]
    relay: subprocess.Popen[str] | None = None
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        devices = [f"{stem}d{rank}" for rank in range(num_ranks)]
        if profile.bytes_per_s is None:
            _join_by_bridge(f"{stem}b", devices, names)
        else:
            relay = _start_relay(devices, profile)
            for device, name in zip(devices, names, strict=True):
                _run("ip", "link", "set", device, "netns", name)
                _run("ip", "-n", name, "link", "set", device, "name", INTERFACE)
        for rank, name in enumerate(names):
            _set_up(name, rank, num_ranks, profile)
        yield Namespaces(names, ports=devices if profile.bytes_per_s is None else ())
    finally:
        if relay is not None:
            assert relay.stdin is not None
            relay.stdin.close()
            relay.wait(timeout=10)
            if relay.stdout is not None:
                relay.stdout.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{stem}b"], capture_output=True, check=False)


def _join_by_bridge(bridge: str, devices: Sequence[str], names: Sequence[str]) -> None:
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "link", "set", bridge, "up")
    for device, name in zip(devices, names, strict=True):
        _run("ip", "link", "add", device, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "link", "set", device, "master", bridge, "up")


def _start_relay(devices: Sequence[str], profile: LinkProfile) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.parallel.links.relay"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    settings = {"names": list(devices), "bytes_per_s": profile.bytes_per_s, "delay_s": profile.delay_s}
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    if process.stdout.readline() != "ready\n":
        raise NoNamespaces(f"the relay between {len(devices)} namespaces did not start", hint="See what it printed above.")
    return process


def _set_up(name: str, rank: int, num_ranks: int, profile: LinkProfile) -> None:
    """Addresses that are known to all, so that nothing but the ranks' own connections is counted."""
    for setting in (
        "ipv6.conf.all.disable_ipv6=1",
        f"ipv4.tcp_wmem=4096 262144 {_BUFFER_BYTES}",
        f"ipv4.tcp_rmem=4096 262144 {_BUFFER_BYTES}",
    ):
        path, _, value = setting.partition("=")
        _run("ip", "netns", "exec", name, "sh", "-c", f"echo '{value}' > /proc/sys/net/{path.replace('.', '/')}")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "link", "set", INTERFACE, "address", _ethernet_of(rank), "mtu", str(_MTU), "up")
    if profile.has_small_frames:
        _run("ip", "-n", name, "link", "set", INTERFACE, "gso_max_segs", "1", "gso_max_size", str(_MTU))
    _run("ip", "-n", name, "addr", "add", f"{_address_of(rank)}/24", "dev", INTERFACE, "noprefixroute")
    for other in range(num_ranks):
        if other != rank:
            _run("ip", "-n", name, "neigh", "add", _address_of(other), "lladdr", _ethernet_of(other), "dev", INTERFACE)
            target = f"{_address_of(other)}/32"
            _run("ip", "-n", name, "route", "add", target, "dev", INTERFACE, "congctl", profile.congestion)


def _address_of(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _ethernet_of(rank: int) -> str:
    return f"02:00:00:00:00:{rank:02x}"


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNamespaces(f"{words[0]} cannot be run: {error}", hint="Install iproute2.") from error
    if done.returncode != 0:
        raise NoNamespaces(
            f"{' '.join(words[:6])} failed: {done.stderr.strip() or done.returncode}",
            hint="Run as root, on a kernel with network namespaces, veth and tun.",
        )
    return done.stdout
