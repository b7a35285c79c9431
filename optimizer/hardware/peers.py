"""Links between the devices of one machine: what a card of the table has, and what is assumed where nothing was measured.

NVLink rates are of one direction, from data sheets: GA102 whitepaper (RTX 3090, RTX A6000, A40: 56.25 GB/s), Turing whitepaper
(50 and 25), V100 (150), A100 (300), H100 (450), H100 NVL (300), B200 (900) data sheets. A bridge is taken to be there where a
card can have one. It joins two cards, so three and more are pairs, and what all of them exchange crosses PCIe as well; modules
(SXM) are joined to all others. Professional cards copy to each other over PCIe; GeForce cards do not (NVIDIA disabled it), so
their copies go through the host's memory, in and out again. Behind a PCIe switch these share its one link to the host with all
others there (an NVIDIA engineer in NCCL's issue 1309). Torch-free.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.shown import shown_value
from optimizer.hardware.device_spec import DeviceSpec
from optimizer.hardware.machine import Machine, PeerLink

PeerKind = Literal["nvlink", "pcie", "host"]
PEER_KINDS: Final[tuple[PeerKind, ...]] = get_args(PeerKind)
_NVLINK_GB_PER_S: Final = {
    "V100 16GB": 150.0,
    "V100 32GB": 150.0,
    "RTX 2080 Ti": 50.0,
    "TITAN RTX": 50.0,
    "RTX 3090": 56.25,
    "RTX 3090 Ti": 56.25,
    "RTX A5000": 56.25,
    "RTX A6000": 56.25,
    "A40": 56.25,
    "A30": 100.0,
    "A100 40GB": 300.0,
    "A100 80GB": 300.0,
    "A100 PCIe 80GB": 300.0,
    "H100 PCIe": 300.0,
    "H100 SXM": 450.0,
    "H100 NVL": 300.0,
    "H200 SXM": 450.0,
    "B200 SXM": 900.0,
}
"""Gigabytes per second of one direction to the other card, or through the switch to all others together."""
_BRIDGED: Final = frozenset(
    {
        "RTX 2080 Ti",
        "TITAN RTX",
        "RTX 3090",
        "RTX 3090 Ti",
        "RTX A5000",
        "RTX A6000",
        "A40",
        "A30",
        "A100 PCIe 80GB",
        "H100 PCIe",
        "H100 NVL",
    }
)
"""Cards whose NVLink is a bridge of two."""
CARDS_PER_BRIDGE: Final = 2
_NVLINK_EFFICIENCY: Final = 0.8
"""Assumed share of NVLink's rate that rings attain on large messages."""
_MOST_DELAY_S: Final = 10.0
_LATENCIES_S: Final = {"nvlink": 10e-6, "pcie": 15e-6, "host": 30e-6, "loopback": 100e-6}
"""Assumed: a launch and a flag over the link; through the host two copies and their flags."""
_HOST_SHARES: Final = ((4, 0.65), (MAX_DEVICES, 0.5))
"""Share of a card's link that exchanges of all cards through the host attain, by the most cards. Measured by others, each card
with a link of its own: 18 of 25 GB/s on four RTX 4090 (NCCL's issue 1603), 35 and 28 of 55 on four and eight RTX 5090 (1639)."""
ASSUMED_LOOPBACK_BYTES_PER_S: Final = 1.0e9
"""Assumed of processes on one machine that exchange over its loopback interface, one thread each."""
LOOPBACK: Final = PeerLink(
    kind="loopback",
    bytes_per_s=ASSUMED_LOOPBACK_BYTES_PER_S,
    latency_s=_LATENCIES_S["loopback"],
    source="table",
)
"""Assumed where nothing was measured; what ranks agree on as numbers goes over it on cards, too."""
_FRAME_BYTES, _FRAME_CONTENT_BYTES = 1514, 1448
"""An Ethernet frame of 1500 bytes with its header, and what it holds beside those of IPv4 and TCP with timestamps."""
_NETWORK: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])bit\s*,\s*(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)
_BITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_GEFORCE: Final = ("GTX", "RTX 2", "RTX 3", "RTX 4", "RTX 5", "TITAN")


def peer_link_of(spec: DeviceSpec, *, num_cards: int = 2, cards_per_switch: int = 1) -> PeerLink:
    """The fastest link that all cards of this kind can have to each other in one machine with so many of them."""
    if spec.name in _NVLINK_GB_PER_S and not has_bridges(spec, num_cards=num_cards):
        return _link("nvlink", _NVLINK_GB_PER_S[spec.name] * 1e9 * _NVLINK_EFFICIENCY)
    kind: PeerKind = "host" if spec.name.startswith(_GEFORCE) else "pcie"
    return link_of_kind(spec, kind, num_cards=num_cards, cards_per_switch=cards_per_switch)


def has_bridges(spec: DeviceSpec, *, num_cards: int) -> bool:
    """Report whether NVLink joins pairs of so many cards alone: each then has ``peer_link_of`` two cards to its neighbour."""
    return spec.name in _BRIDGED and num_cards > CARDS_PER_BRIDGE


def link_of_kind(spec: DeviceSpec, kind: PeerKind, *, num_cards: int = 2, cards_per_switch: int = 1) -> PeerLink:
    """A link of this kind between such cards. Raises InvalidInput for NVLink where the card has none."""
    host_link_bytes_per_s = spec.link_bytes_per_s * spec.efficiency["link"].value
    if kind == "host":
        return _link("host", host_link_bytes_per_s * _host_share(num_cards, cards_per_switch))
    if kind == "pcie":
        return _link("pcie", host_link_bytes_per_s)
    found = peer_link_of(spec)
    if found.kind != "nvlink":
        raise InvalidInput(
            f"peer link nvlink is asked for; {spec.name} has no NVLink",
            field="peer_link",
            value=kind,
            allowed=["pcie", "host", "a rate in bytes per second"],
        )
    return found


def _host_share(num_cards: int, cards_per_switch: int) -> float:
    """Share of a card's link to the host that is left to exchanges through it, while all cards exchange."""
    share = next((share for most_cards, share in _HOST_SHARES if num_cards <= most_cards), _HOST_SHARES[-1][1])
    return min(share, 1 / min(cards_per_switch, num_cards))


def assumed_link(machine: Machine) -> PeerLink:
    """The link between a machine's devices: as it says, or what is assumed where it says nothing."""
    if machine.peers is not None:
        return machine.peers
    if machine.device.kind == "cpu":
        return LOOPBACK
    slowest = min(machine.rates.device_to_host_bytes_per_s, machine.rates.host_to_device_bytes_per_s)
    return _link("host", slowest * _host_share(machine.total_devices, machine.cards_per_switch))


def network_link(*, bits_per_s: float, delay_s: float) -> PeerLink:
    """A link between machines, over Ethernet and TCP. delay_s: of a frame from one machine to the other; half of what ``ping``
    says. Beside it a message takes as long as between two processes on one machine.
    """
    return PeerLink(
        kind="network",
        bytes_per_s=bits_per_s / 8 * _FRAME_CONTENT_BYTES / _FRAME_BYTES,
        latency_s=delay_s + _LATENCIES_S["loopback"],
        source="table",
    )


def read_peer_link(spec: DeviceSpec, text: str | None, *, num_cards: int = 2, cards_per_switch: int = 1) -> PeerLink:
    """A link between so many cards: a kind such as ``pcie``, bytes per second such as ``25e9``, or the rate and the delay of a
    network between machines, ``200Mbit,20ms``; None for the best that they can have.

    Raises InvalidInput.
    """
    if text is None:
        return peer_link_of(spec, num_cards=num_cards, cards_per_switch=cards_per_switch)
    for kind in PEER_KINDS:
        if text == kind:
            return link_of_kind(spec, kind, num_cards=num_cards, cards_per_switch=cards_per_switch)
    return _read_network(text) or replace(peer_link_of(spec), bytes_per_s=_read_rate(text))


def read_unlike_link(specs: Sequence[DeviceSpec], text: str | None, *, num_cards: int, cards_per_switch: int = 1) -> PeerLink:
    """The link between cards of several kinds, the slowest card's; None for the best that they can have: PCIe, or copies through
    the host where any is a GeForce card. num_cards: of all kinds. Raises InvalidInput, also for NVLink, which joins cards that
    are alike.
    """
    if text == "nvlink":
        raise InvalidInput(
            f"peer link nvlink is asked for between {', '.join(spec.name for spec in specs)}; it joins cards that are alike",
            field="peer_link",
            value=text,
            allowed=["pcie", "host", "a rate in bytes per second"],
        )
    is_geforce = any(spec.name.startswith(_GEFORCE) for spec in specs)
    known: PeerKind = "pcie" if text == "pcie" or not (text == "host" or is_geforce) else "host"
    links = (link_of_kind(spec, known, num_cards=num_cards, cards_per_switch=cards_per_switch) for spec in specs)
    slowest = min(links, key=lambda link: link.bytes_per_s)
    if text in (None, "pcie", "host"):
        return slowest
    return _read_network(str(text)) or replace(slowest, bytes_per_s=_read_rate(str(text)))


def with_devices(machine: Machine, num_devices: int, *, peer_link: str | None = None) -> Machine:
    """A measured machine with so many devices like its own. peer_link: bytes per second between them, or the rate and the delay
    of a network; None for what is known or assumed. Raises InvalidInput for another text.
    """
    if num_devices == 1:
        return replace(machine, num_devices=1, peers=None)
    link = assumed_link(machine)
    if peer_link is not None:
        link = _read_network(peer_link) or replace(link, bytes_per_s=_read_rate(peer_link))
    return replace(machine, num_devices=num_devices, peers=link)


def read_network(text: str) -> PeerLink:
    """The link between machines, by its rate and its delay: ``200Mbit,20ms``. Raises InvalidInput."""
    found = _read_network(text)
    if found is None:
        raise _no_link(f"link {text[:80]!r} is no network's; allowed: a rate and a delay such as 200Mbit,20ms", text)
    return found


def write_network(*, bytes_per_s: float, delay_s: float) -> str:
    """A network as people write it, ``941Mbit,0.21ms``, in three figures. ``read_network`` reads it back as this rate of content
    and, beside what a message takes on one machine, this delay; what it would refuse becomes the nearest that it allows.
    """
    bits_per_s = min(max(bytes_per_s * 8 * _FRAME_BYTES / _FRAME_CONTENT_BYTES, 8e3), 8e13)
    scale = next(name for name in ("G", "M", "K") if bits_per_s >= _BITS[name.lower()])
    delay_ms = min(delay_s, _MOST_DELAY_S) * 1e3
    return f"{_three_figures(bits_per_s / _BITS[scale.lower()])}{scale}bit,{_three_figures(delay_ms)}ms"


def _three_figures(number: float) -> str:
    """Without an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(number))) if number >= 1e-3 else 3
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _read_network(text: str) -> PeerLink | None:
    """``200Mbit,20ms``; None for what is written in another way."""
    found = _NETWORK.fullmatch(text.strip())
    if found is None:
        return None
    number, scale, delay, unit = found.groups()
    bits_per_s, delay_s = float(number) * _BITS[scale.lower()], float(delay) * _SECONDS[unit.lower()]
    if not 8e3 <= bits_per_s <= 8e13 or delay_s > _MOST_DELAY_S:
        raise _no_link(f"peer link {text!r} is no link; allowed: 8Kbit to 80000Gbit, and at most {_MOST_DELAY_S:g} s", text)
    return network_link(bits_per_s=bits_per_s, delay_s=delay_s)


def _no_link(message: str, text: str) -> InvalidInput:
    allowed = "a rate and a delay such as 200Mbit,20ms"
    return InvalidInput(message, field="peer_link", value=shown_value(text), allowed=allowed)


def _read_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1e3 <= rate <= 1e13:
        raise InvalidInput(
            f"peer link {text!r} is no link; allowed: {', '.join(PEER_KINDS)}, or bytes per second from 1e3 to 1e13, or "
            "a rate and a delay such as 200Mbit,20ms",
            field="peer_link",
            value=shown_value(text),
            allowed=[*PEER_KINDS, "bytes per second", "a rate and a delay"],
        )
    return rate


@dataclass(frozen=True, kw_only=True)
class SeveralDevices:
    """Devices of one kind in one machine, as people ask for them: ``2``, ``2x RTX 4090``, ``2x RTX 4090@office``."""

    name: str
    """The card's name; empty where only a number was given."""
    count: int
    machine: str = ""
    """The machine that they are in; empty for the one at hand."""


def read_devices_text(text: str) -> SeveralDevices:
    """A number of devices, or a number and a card's name (several kinds or machines: ``mixed.read_kinds``). Raises
    InvalidInput.
    """
    count, _, name = (part.strip() for part in text.partition("x"))
    if not count.isdigit() or int(count) < 1:
        raise InvalidInput(
            f"devices {text[:80]!r} is not understood; allowed: a number such as 2, or a number and a card such as 2x RTX 4090",
            field="devices",
            value=shown_value(text),
            allowed="a number, or a number and one card such as 2x RTX 4090",
        )
    return SeveralDevices(name=name, count=int(count))


def _link(kind: PeerKind, bytes_per_s: float) -> PeerLink:
    return PeerLink(kind=kind, bytes_per_s=bytes_per_s, latency_s=_LATENCIES_S[kind], source="table")
