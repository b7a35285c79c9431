"""Measures a machine whose cards are of several kinds: each kind by its first card, and the link between all of them.

*Not modelled*: one link is slower than another; the rate is that of all cards exchanging at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from optimizer.hardware.machine import DeviceKind, Machine
from optimizer.hardware.probe.rates.peers import count_on_one_switch, probe_peers

PROBE_PEERS_S = 1.0


def list_card_kinds() -> list[list[int]]:
    """torch's indices of all cards, those of one name and size together, in the order of their first."""
    found: dict[tuple[str, int], list[int]] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.setdefault((properties.name, properties.total_memory), []).append(index)
    return list(found.values())


def probe_kinds(kinds: Sequence[Sequence[int]], *, probe: Callable[[str], Machine]) -> Machine:
    """A machine with all kinds of cards, the first kind first. probe: measures the machine by one card: ``cuda:2``."""
    machines = [probe(f"cuda:{indices[0]}") for indices in kinds]
    machine = with_kinds(machines, kinds)
    machine = replace(machine, cards_per_switch=count_on_one_switch(machine))
    return replace(machine, peers=probe_peers(machine, max_s=PROBE_PEERS_S))


def with_kinds(machines: Sequence[Machine], kinds: Sequence[Sequence[int]]) -> Machine:
    """One machine of several that were measured by a card of each kind. kinds: indices of its cards, by kind."""
    names = [machine.device.name for machine in machines]
    devices = [
        replace(
            machine.device,
            name=_own_name(names, place, machine),
            index=indices[0],
            indices=tuple(indices),
        )
        for place, (machine, indices) in enumerate(zip(machines, kinds, strict=True))
    ]
    others = [
        DeviceKind(device=device, rates=machine.rates, num_devices=len(indices))
        for device, machine, indices in zip(devices[1:], machines[1:], kinds[1:], strict=True)
    ]
    return replace(machines[0], device=devices[0], num_devices=len(kinds[0]), others=tuple(others))


def _own_name(names: Sequence[str], place: int, machine: Machine) -> str:
    """Cards of one name and several sizes differ by their bytes."""
    is_alone = list(names).count(names[place]) == 1
    return names[place] if is_alone else f"{names[place]} ({machine.device.total_bytes} bytes)"
