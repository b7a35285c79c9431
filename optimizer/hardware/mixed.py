"""Machines with several kinds of cards of the table: ``2x RTX 3060, RTX 4090``. Torch-free."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Unpack

from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.shown import shown_value
from optimizer.hardware.devices import Beside, find_device, table_machine
from optimizer.hardware.machine import DeviceKind, Machine
from optimizer.hardware.peers import SeveralDevices, read_devices_text, read_unlike_link

_COUNT: Final = re.compile(r"\d+\s*x")
_ALLOWED: Final = "a number, a number and one card such as 2x RTX 4090, or several kinds such as 2x RTX 3060, RTX 4090"


def read_kinds(text: str) -> tuple[SeveralDevices, ...]:
    """Devices by kind, as people ask for them; a number alone has no name. Raises InvalidInput."""
    parts = [part.strip() for part in text.replace("+", ",").split(",")]
    if "@" in text:
        raise InvalidInput(
            f"devices {text[:80]!r} are in several machines; plans are for the devices of one machine",
            field="devices",
            value=shown_value(text),
            allowed=_ALLOWED,
        )
    if len(parts) == 1:
        return (read_devices_text(text),)
    found = [read_devices_text(part if part.isdigit() or _COUNT.match(part) else f"1x {part}") for part in parts]
    counts: dict[str, int] = {}
    for kind in found:
        if not kind.name:
            raise InvalidInput(
                f"devices {text[:80]!r} names no card in one of its parts; allowed: {_ALLOWED}",
                field="devices",
                value=shown_value(text),
                allowed=_ALLOWED,
            )
        name = find_device(kind.name).name
        counts[name] = counts.get(name, 0) + kind.count
    return tuple(SeveralDevices(name=name, count=count) for name, count in counts.items())


def mixed_machine(kinds: Sequence[SeveralDevices], *, peer_link: str | None = None, **beside: Unpack[Beside]) -> Machine:
    """A machine with these cards, which share its host and its disk. beside, peer_link: as ``table_machine`` has them.

    Unlike cards have no NVLink to each other, and the slowest card's link is the link of all. Raises InvalidInput.
    """
    total = sum(kind.count for kind in kinds)
    if total > MAX_DEVICES:
        raise InvalidInput(
            f"{total} devices are asked for; allowed: 1 to {MAX_DEVICES}",
            field="devices",
            value=total,
            allowed={"minimum": 1, "maximum": MAX_DEVICES},
        )
    if len(kinds) == 1:
        return table_machine(kinds[0].name, num_devices=kinds[0].count, peer_link=peer_link, **beside)
    machines = [table_machine(kind.name, **beside) for kind in kinds]
    first, *others = machines
    names = [f"{kind.count}x {kind.name}" if kind.count > 1 else kind.name for kind in kinds]
    return replace(
        first,
        name=f"{', '.join(names)} (from the table)",
        num_devices=kinds[0].count,
        peers=read_unlike_link([find_device(kind.name) for kind in kinds], peer_link),
        others=tuple(
            DeviceKind(device=machine.device, rates=machine.rates, num_devices=kind.count)
            for machine, kind in zip(others, kinds[1:], strict=True)
        ),
    )
