"""Several machines that a network joins, as one that plans may use: each kind of device says which machine it is in. Torch-free.

A rank's device, rates, host, disk and threads are those of its own machine. Ranks of one machine exchange over its own link;
where ranks of several exchange, all of them do so at the rate and with the delay of the network, the slowest one of several.

*Not modelled*: exchanges that sum within a machine first; several ranks of one machine that send over its one connection at the
same time, but in a ring only the last of them does, since they are neighbours; networks that lose or reorder frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Unpack

from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.shown import shown_value
from optimizer.hardware.devices import Beside
from optimizer.hardware.machine import DeviceKind, Host, Machine, PeerLink
from optimizer.hardware.mixed import mixed_machine, read_kinds
from optimizer.hardware.peers import SeveralDevices, read_network

HERE: Final = "here"
"""Name of the machine at hand, whose devices need not say where they are."""
_LINK: Final = "a machine and its link such as office=100Mbit,20ms"


def join_machines(machines: Sequence[Machine], *, link: PeerLink) -> Machine:
    """One machine with the devices of all, each called ``<device>@<machine>``. link: between any two machines, over a network.

    Host memory, disk and remote store stay each machine's own (``Machine.hosts``); what the whole says of them is what the
    smallest machine has, and of a remote store, which may be one for all, an equal part. Facts are those of all machines.
    Raises InvalidInput for fewer than 2 machines, names that are the same or hold an ``@``, the CPU beside cards, more devices
    than a plan may have, and a link of another kind.
    """
    _check_machines(machines, link)
    hosts = tuple(
        Host(
            name=machine.name,
            num_devices=machine.total_devices,
            host_memory_bytes=machine.host_memory_bytes,
            disk_free_bytes=machine.disk_free_bytes,
            remote_free_bytes=machine.remote_free_bytes // len(machines),
            num_threads=machine.num_threads,
            packs_bf16=machine.packs_bf16,
            packs_fp32=machine.packs_fp32,
            peers=machine.peers,
            cards_per_switch=machine.cards_per_switch,
        )
        for machine in machines
    )
    first, *others = (_placed(kind, machine.name) for machine in machines for kind in machine.kinds)
    return replace(
        machines[0],
        name=" and ".join(host.name for host in hosts),
        device=first.device,
        num_devices=first.num_devices,
        others=tuple(others),
        peers=link,
        hosts=hosts,
        host_memory_bytes=min(host.host_memory_bytes for host in hosts),
        disk_free_bytes=min(host.disk_free_bytes for host in hosts),
        remote_free_bytes=min(host.remote_free_bytes for host in hosts),
        facts={name: fact for machine in reversed(machines) for name, fact in machine.facts.items()},
    )


def cards_of(
    devices: str | Sequence[SeveralDevices],
    *,
    links: Mapping[str, str] | None = None,
    peer_link: str | None = None,
    **beside: Unpack[Beside],
) -> Machine:
    """A machine with cards of the table, or several that a network joins: ``2x RTX 4090, RTX 3060@office``.

    Devices without a machine's name are in ``here``. links: by machine, the rate and the delay of its link to all others
    (``{"office": "100Mbit,20ms"}``); one machine may do without, as the others' links lead to it. Between two machines the
    slower link counts, and in a plan the slowest of all. peer_link, beside: within each machine, as ``mixed_machine`` has them.
    Raises InvalidInput.
    """
    kinds = read_kinds(devices) if isinstance(devices, str) else devices
    names = list(dict.fromkeys(kind.machine or HERE for kind in kinds))
    link = _slowest_link(names, links or {})
    machines = [
        mixed_machine([kind for kind in kinds if (kind.machine or HERE) == name], peer_link=peer_link, **beside)
        for name in names
    ]
    if link is None:
        return machines[0]
    return join_machines([replace(machine, name=name) for machine, name in zip(machines, names, strict=True)], link=link)


def read_links(texts: Sequence[str]) -> dict[str, str]:
    """The links of machines by their names, as ``office=100Mbit,20ms``. Raises InvalidInput."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, link = (part.strip() for part in text.partition("="))
        if not name or not link:
            raise _wrong_link(f"link {text[:80]!r} is not understood; allowed: {_LINK}", text)
        if name in found:
            raise _wrong_link(f"machine {name} is given two links, {found[name]} and {link}; allowed: one", text)
        found[name] = link
    return found


def _slowest_link(names: Sequence[str], links: Mapping[str, str]) -> PeerLink | None:
    """The lowest rate and the longest delay; None for one machine."""
    unknown = next((name for name in links if name not in names), None)
    if unknown is not None:
        raise _wrong_link(
            f"a link is given for machine {unknown!r}; the devices are in {', '.join(names)}: write RTX 3060@{unknown}", unknown
        )
    if len(names) == 1:
        if names[0] != HERE or links:
            raise _wrong_link(f"all devices are in one machine, {names[0]}; leave out @{names[0]} and its link", names[0])
        return None
    missing = [name for name in names if name not in links]
    if len(missing) > 1:
        asked = [name for name in missing if name != HERE]
        written = " ".join(f"--link {name}=100Mbit,20ms" for name in asked)
        raise _wrong_link(
            f"devices are in {', '.join(names)}, and nothing says how {' and '.join(asked)} can be reached; "
            f"write {written} (the rate and the delay that the network has)",
            asked,
        )
    found = [read_network(text) for text in links.values()]
    return replace(
        found[0],
        bytes_per_s=min(link.bytes_per_s for link in found),
        latency_s=max(link.latency_s for link in found),
    )


def _placed(kind: DeviceKind, machine_name: str) -> DeviceKind:
    return replace(kind, device=replace(kind.device, name=f"{kind.device.name}@{machine_name}"))


def _check_machines(machines: Sequence[Machine], link: PeerLink) -> None:
    names = [machine.name for machine in machines]
    marked = [name for machine in machines for name in (machine.name, *_device_names(machine)) if "@" in name]
    kinds = dict.fromkeys(machine.device.kind for machine in machines)
    total = sum(machine.total_devices for machine in machines)
    faults = (
        (len(machines) < 2, f"{len(machines)} machines are to be joined; allowed: 2 or more", names),
        (len(set(names)) < len(names), f"machines {', '.join(names)} are to be joined; each needs a name of its own", names),
        (bool(marked), f"names {', '.join(marked)} hold an @, which stands before a machine's name; call them otherwise", marked),
        (len(kinds) > 1, "machines with cards and one without are to be joined; ranks are all on cards, or all on CPUs", names),
        (total > MAX_DEVICES, f"{total} devices are to be joined; allowed: up to {MAX_DEVICES}", total),
        (link.kind != "network", f"machines are to be joined by {link.kind}; allowed: a network (network_link)", link.kind),
    )
    for is_broken, message, value in faults:
        if is_broken:
            raise InvalidInput(message, field="machines", value=shown_value(value), allowed="2 or more machines and a network")


def _device_names(machine: Machine) -> list[str]:
    return [kind.device.name for kind in machine.kinds]


def _wrong_link(message: str, value: object) -> InvalidInput:
    return InvalidInput(message, field="link", value=shown_value(value), allowed=_LINK)
