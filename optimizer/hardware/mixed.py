"""Machines with several kinds of devices: cards of the table (``2x RTX 3060, RTX 4090``), and devices of unequal memory that the
CPU plays (``1GiB, 2GiB``). Torch-free.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Unpack

from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.shown import shown_value
from optimizer.base.units import format_bytes, parse_bytes
from optimizer.hardware.devices import Beside, find_device, table_machine
from optimizer.hardware.machine import DeviceKind, Machine
from optimizer.hardware.peers import SeveralDevices, read_devices_text, read_unlike_link

_COUNT: Final = re.compile(r"\d+\s*x")
_MACHINE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of machines: letters, digits, dots and dashes, as host names have them."""
_ALLOWED: Final = (
    "a number, a number and one card such as 2x RTX 4090, several kinds such as 2x RTX 3060, RTX 4090, or with the machine "
    "that they are in such as RTX 4090, RTX 3060@office"
)


def read_kinds(text: str) -> tuple[SeveralDevices, ...]:
    """Devices by machine and kind, as people ask for them; a number alone has no name. Raises InvalidInput."""
    parts = [part.strip() for part in text.replace("+", ",").split(",")]
    if len(parts) == 1 and "@" not in text:
        return (read_devices_text(text),)
    counts: dict[tuple[str, str], int] = {}
    for part in parts:
        devices, at, place = (piece.strip() for piece in part.partition("@"))
        kind = read_devices_text(devices if devices.isdigit() or _COUNT.match(devices) else f"1x {devices}")
        if not kind.name or (at and not _MACHINE.fullmatch(place)):
            lacks = "names no machine behind its @ that can be one" if kind.name else "names no card in one of its parts"
            raise InvalidInput(
                f"devices {text[:80]!r} {lacks}; allowed: {_ALLOWED}",
                field="devices",
                value=shown_value(text),
                allowed=_ALLOWED,
            )
        key = place, find_device(kind.name).name
        counts[key] = counts.get(key, 0) + kind.count
    return tuple(SeveralDevices(name=name, count=count, machine=place) for (place, name), count in counts.items())


def mixed_machine(kinds: Sequence[SeveralDevices], *, peer_link: str | None = None, **beside: Unpack[Beside]) -> Machine:
    """A machine with these cards, which share its host and its disk (several machines: ``joined.cards_of``). beside, peer_link:
    as ``table_machine`` has them.

    Unlike cards have no NVLink to each other, and the slowest card's link is the link of all. Raises InvalidInput.
    """
    total, places = sum(kind.count for kind in kinds), {kind.machine for kind in kinds}
    if len(places) > 1:
        raise InvalidInput(
            f"devices are in several machines ({', '.join(place or 'here' for place in sorted(places))}), which links must join",
            field="devices",
            value=total,
            allowed="devices of one machine; of several with their links (joined.cards_of, --link)",
        )
    if total > MAX_DEVICES:
        raise InvalidInput(
            f"{total} devices are asked for; allowed: 1 to {MAX_DEVICES}",
            field="devices",
            value=total,
            allowed={"minimum": 1, "maximum": MAX_DEVICES},
        )
    if len(kinds) == 1:
        return table_machine(kinds[0].name, num_devices=kinds[0].count, peer_link=peer_link, **beside)
    machines = [table_machine(kind.name, num_others=total - 1, **beside) for kind in kinds]
    first, *others = machines
    names = [f"{kind.count}x {kind.name}" if kind.count > 1 else kind.name for kind in kinds]
    return replace(
        first,
        name=f"{', '.join(names)} (from the table)",
        num_devices=kinds[0].count,
        peers=read_unlike_link(
            [find_device(kind.name) for kind in kinds], peer_link, num_cards=total, cards_per_switch=first.cards_per_switch
        ),
        others=tuple(
            DeviceKind(device=machine.device, rates=machine.rates, num_devices=kind.count)
            for machine, kind in zip(others, kinds[1:], strict=True)
        ),
    )


def read_played(text: str) -> int | tuple[int, ...]:
    """Devices for the CPU to play: a number of them, which share its memory, or the bytes of each. Raises ValueError."""
    allowed = f"1 to {MAX_DEVICES}, or the memory of each device such as 1GiB, 2GiB"
    try:
        if text.strip().isdecimal():
            found: int | tuple[int, ...] = int(text)
        else:
            found = tuple(parse_bytes(part.strip()) for part in text.split(","))
    except (ValueError, InvalidInput) as error:
        raise ValueError(f"{text!r}; allowed: a number from {allowed}") from error
    number = found if isinstance(found, int) else len(found)
    if not 1 <= number <= MAX_DEVICES or (not isinstance(found, int) and min(found) < 1):
        raise ValueError(f"{text!r}; allowed: a number from {allowed}")
    return found


def play_devices(machine: Machine, sizes: Sequence[int]) -> Machine:
    """The machine as if each of the CPU's devices had so many bytes of its own. Those of equal size are of one kind.

    All have the machine's rates: they share its cores. Raises InvalidInput for more bytes than the machine has.
    """
    if machine.device.kind != "cpu":
        return machine
    memory_bytes = machine.device.memory_bytes + machine.host_memory_bytes
    if sum(sizes) >= memory_bytes:
        raise InvalidInput(
            f"devices with {format_bytes(sum(sizes))} together are to be played; the machine has {format_bytes(memory_bytes)}",
            field="devices",
            value=sum(sizes),
            allowed=f"less than {format_bytes(memory_bytes)} together",
        )
    kinds = [
        DeviceKind(
            device=replace(machine.device, name=f"CPU with {format_bytes(size)}", memory_bytes=size, is_capped=True),
            rates=machine.rates,
            num_devices=list(sizes).count(size),
        )
        for size in dict.fromkeys(sizes)
    ]
    return replace(
        machine,
        device=kinds[0].device,
        num_devices=kinds[0].num_devices,
        others=tuple(kinds[1:]),
        host_memory_bytes=memory_bytes - sum(sizes),
    )
