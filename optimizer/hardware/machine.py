"""A machine as the planner sees it: a device, a host, the link between, and rates with where each came from.

Torch-free. ``probe/`` measures one of these on the spot; ``calibration.py`` corrects it with finished runs.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_value
from optimizer.hardware.curves import Curve
from optimizer.hardware.rates import Rates, RateSource

PROBE_DISTURBED_FACT = "disturbed"
"""Among a machine's facts, where others used it while it was probed: a sentence with what to do."""

NO_COMPILER_FACT = "compiled blocks"
"""Among a machine's facts, where nothing there can compile blocks: what is missing. Machines probed earlier have none."""

COMPILER_FACT = "compiler"
"""Among a machine's facts, where blocks can be compiled: with what. Machines probed earlier have neither of the two."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device tier of one machine."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    """Usable by one job: on the CPU device half of the machine's memory, on CUDA the card less its context."""
    index: int = 0
    total_bytes: int = 0
    """Memory of the card, as its driver reports it; 0 where it is not known, and on the CPU device."""
    compute_capability: str = ""
    """Compute capability of CUDA cards, ``8.9``; empty where it is not known."""
    context_bytes: int | None = None
    """Bytes of the card that are gone before the first tensor, as measured; None where they were not."""
    workspace_bytes: int | None = None
    """Workspaces of the matrix libraries, as measured; None where they were not."""
    num_multiprocessors: int | None = None
    """Multiprocessors of CUDA cards, which some kernels' scratch grows with; None where it is not known."""
    indices: tuple[int, ...] = ()
    """Numbers of all cards of this kind; empty where they follow each other from ``index`` on."""
    is_capped: bool = False
    """On the CPU device: ``memory_bytes`` was set aside for this one beforehand, as a card has its own. Else all devices that
    the CPU plays share one memory."""


class Processor(NamedTuple):
    """Facts that decide, beside a plan, how much memory the CPU device's kernels hold."""

    num_threads: int
    packs_bf16: bool = False
    packs_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class PeerLink:
    """A link between devices of one machine, while all of them use it."""

    kind: Literal["nvlink", "pcie", "host", "loopback", "network"]
    """host: cards without direct access to each other, whose copies go through the host's memory. loopback: processes that play
    devices on one machine. network: between machines, over TCP."""
    bytes_per_s: float
    """One direction between two devices while every device sends and receives; content, without headers of frames."""
    latency_s: float
    """Time of one message of a few bytes, from call to arrival."""
    source: RateSource
    bytes_per_s_by_size: Curve = ()
    """The same rate by the bytes of a tensor, as measured; empty where it was not, and ``bytes_per_s`` is for all."""

    def at_size(self, num_bytes: float) -> "PeerLink":
        """The link with the rate that it has for tensors of this size; between measured sizes a straight line over their
        logarithms.
        """
        if not self.bytes_per_s_by_size or num_bytes <= 0:
            return self
        sizes, rates = zip(*self.bytes_per_s_by_size, strict=True)
        rate = float(np.interp(math.log(num_bytes), [math.log(size) for size in sizes], rates))
        return replace(self, bytes_per_s=rate, bytes_per_s_by_size=())


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Devices of one kind, where a machine has several kinds."""

    device: Device
    rates: Rates
    """Rates of the machine with this kind of device."""
    num_devices: int = 1


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of several machines that a network joins: what its devices share with each other, and with no other machine's."""

    name: str
    """Stands behind the ``@`` of its devices' names."""
    num_devices: int
    """Its devices of all kinds."""
    host_memory_bytes: int
    disk_free_bytes: int = 0
    remote_free_bytes: int = 0
    num_threads: int = 1
    packs_bf16: bool = False
    packs_fp32: bool = False
    peers: PeerLink | None = None
    """The link between its own devices; None on one device."""
    cards_per_switch: int = 1
    """Cards at most behind one PCIe switch, as a machine alone has it (``Machine.cards_per_switch``)."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine with one or several devices: of one kind, or of several. Or several machines (``joined.py``), whose devices are
    then of kinds that name their machine: ``RTX 3060 12GB@office``."""

    name: str
    device: Device
    host_memory_bytes: int
    """Bytes of its memory. Of several machines these, and the free bytes of disk and store, are the smallest one's."""
    rates: Rates
    num_devices: int = 1
    """Devices like ``device``, on CUDA the cards from its index on, each with as much memory; they share the host, the disk and
    the network. On the CPU device processes that play devices, which share its memory and cores."""
    peers: PeerLink | None = None
    """None on one device."""
    peers_within: PeerLink | None = None
    """The link between neighbouring devices where it is faster than ``peers``: of one machine where a network joins several, of
    pairs of cards that a bridge joins. None where it is not."""
    num_within: int = 1
    """Devices at most that exchange over it."""
    cards_per_switch: int = 1
    """Cards at most that share one PCIe link to the host, behind a switch; 1 where each has a link of its own."""
    disk_free_bytes: int = 0
    """Free bytes of the scratch folder's disk; 0 where there is no disk tier."""
    remote_free_bytes: int = 0
    """Free bytes of the remote store; 0 where there is none."""
    num_threads: int = 1
    packs_bf16: bool = False
    """True where products in bf16 are a library's on the CPU device, which lays matrices out in blocks first: with
    AVX-512."""
    others: tuple[DeviceKind, ...] = ()
    """Kinds of devices beside the first, each with another name; ``device``, ``rates`` and ``num_devices`` are of the first."""
    packs_fp32: bool = False
    """True where large products in fp32 are such a library's, too (``formats/matmul_dispatch.py``): with AVX-512 on
    processors that are not Intel's."""
    hosts: tuple[Host, ...] = ()
    """The machines that a network joins, which is ``peers`` then; empty for one machine."""
    devices_per_host: int = 0
    """Devices at most that share the host, the disk and the store, where a plan's ranks are in several machines; 0: all do."""
    facts: dict[str, str] = field(default_factory=dict)
    """Processor, driver and library versions, for people and records; the two on compilers alone decide something."""

    @property
    def is_known_to_compile(self) -> bool:
        """Report whether blocks can surely be compiled there. A card of the table is taken to have what that needs; a machine
        probed before anybody looked is taken to have it not.
        """
        return COMPILER_FACT in self.facts or (self.rates.source == "table" and NO_COMPILER_FACT not in self.facts)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """All kinds of devices, the first kind first."""
        return DeviceKind(device=self.device, rates=self.rates, num_devices=self.num_devices), *self.others

    @property
    def total_devices(self) -> int:
        """Devices of all kinds."""
        return sum(kind.num_devices for kind in self.kinds)

    @property
    def device_names(self) -> str:
        """Names of all kinds of devices: ``RTX 3060 and RTX 4090``."""
        return " and ".join(kind.device.name for kind in self.kinds)

    @property
    def most_memory_bytes(self) -> int:
        """Memory of the largest device."""
        return max(kind.device.memory_bytes for kind in self.kinds)

    @property
    def of_largest_kind(self) -> "Machine":
        """The machine with the devices of one kind alone: those with the most memory, the first of equals."""
        name = max(self.kinds, key=lambda kind: kind.device.memory_bytes).device.name
        return self.among({name}).with_kind(name) if self.others else self

    def among(self, names: Collection[str]) -> "Machine":
        """The machine in which devices of these kinds exchange: of several machines the one that all of them are in, with its own
        link and kinds; else itself. names: those of devices; empty for the first kind.
        """
        found = {host_name(name or self.device.name) for name in names}
        host = next((host for host in self.hosts if found == {host.name}), None)
        if host is None:
            return self
        first, *others = (kind for kind in self.kinds if host_name(kind.device.name) == host.name)
        inside = replace(self._at_host(host), name=host.name, devices_per_host=0, peers=host.peers)
        inside = replace(inside, peers_within=None, num_within=1)
        kinds: dict[str, Any] = {"device": first.device, "rates": first.rates, "num_devices": first.num_devices}
        return replace(inside, others=tuple(others), **kinds)

    def with_kind(self, name: str, *, num_devices: int | None = None) -> "Machine":
        """The machine with the devices of one kind alone, or with so many of them. name: of its device; empty for the first kind.

        Of several machines each device has what its own has, and exchanges over the network (else ``among`` first). Raises
        InvalidInput for a name that no device has.
        """
        kind = next((kind for kind in self.kinds if name in ("", kind.device.name)), None)
        if kind is None:
            known = [kind.device.name for kind in self.kinds]
            raise InvalidInput(
                f"device {name!r} is not in {self.name}, which has {', '.join(known)}",
                field="device",
                value=shown_value(name),
                allowed=known,
            )
        count = kind.num_devices if num_devices is None else num_devices
        host = next((host for host in self.hosts if host.name == host_name(kind.device.name)), None)
        here = self if host is None else self._at_host(host)
        return replace(here, device=kind.device, rates=kind.rates, num_devices=count, others=())

    def _at_host(self, host: Host) -> "Machine":
        return replace(
            self,
            host_memory_bytes=host.host_memory_bytes,
            disk_free_bytes=host.disk_free_bytes,
            remote_free_bytes=host.remote_free_bytes,
            num_threads=host.num_threads,
            packs_bf16=host.packs_bf16,
            packs_fp32=host.packs_fp32,
            cards_per_switch=host.cards_per_switch,
            peers_within=host.peers,
            num_within=host.num_devices,
            hosts=(),
            devices_per_host=host.num_devices,
        )

    def processor_for(self, *, in_fp16: bool) -> Processor:
        """in_fp16: products are torch's own then; what has bf16's sizes elsewhere holds no buffers of the library's."""
        return Processor(num_threads=self.num_threads, packs_bf16=self.packs_bf16 and not in_fp16, packs_fp32=self.packs_fp32)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Machine":
        """Raises InvalidInput that names the first field that is wrong, or that no machine has."""
        machine = from_json(cls, document, path="machine")
        _require("machine.num_devices", machine.num_devices, low=1, high=MAX_DEVICES)
        _require("machine.cards_per_switch", machine.cards_per_switch, low=1, high=MAX_DEVICES)
        _check_bytes(machine)
        _check_rates(machine.rates, "machine.rates")
        _check_others(machine)
        return machine


def host_name(device_name: str) -> str:
    """The machine that a device of joined machines is in; empty where its name says none."""
    return device_name.rpartition("@")[2] if "@" in device_name else ""


_LEAST_RATE, _LARGEST_RATE = 1e-9, 1e30
_LARGEST_SLOWDOWN = 1e6
_LARGEST_SIZE = 2**60
_ALWAYS_THERE = {"matmul_flops_per_s": "fp32", "attention_flops_per_s": "fp32", "optimizer_elements_per_s": "adamw_32"}
"""Keys that the estimate falls back to."""


def _check_others(machine: Machine) -> None:
    """Each kind has a name of its own, and all together are as many devices as a plan may have."""
    names = [kind.device.name for kind in machine.kinds]
    for index, kind in enumerate(machine.others):
        path = f"machine.others[{index}]"
        if kind.device.name in names[: index + 1] or kind.device.kind != machine.device.kind:
            wanted = f"another name than {', '.join(names[: index + 1])}, and the kind {machine.device.kind}"
            raise InvalidInput(
                f"{path}.device is {kind.device.name!r}, a {kind.device.kind} device; allowed: {wanted}",
                field=f"{path}.device",
                value=shown_value(kind.device.name),
                allowed=wanted,
            )
        _require(f"{path}.num_devices", kind.num_devices, low=1, high=MAX_DEVICES)
        _check_rates(kind.rates, f"{path}.rates")
    _require("the number of machine's devices", machine.total_devices, low=1, high=MAX_DEVICES)
    known = {host.name for host in machine.hosts}
    if machine.hosts and {host_name(name) for name in names} != known:
        wanted = f"names that end with @ and one of {', '.join(sorted(known))}, each of them"
        raise InvalidInput(
            f"machine.hosts are joined, with devices {', '.join(names)}; allowed: {wanted}",
            field="machine.hosts",
            value=shown_value(names),
            allowed=wanted,
        )


def _check_bytes(machine: Machine) -> None:
    holders: list[tuple[Device | Machine | Host, str, int]] = [(machine.device, "machine.device", 1), (machine, "machine", 0)]
    holders += [(host, f"machine.hosts[{index}]", 0) for index, host in enumerate(machine.hosts)]
    holders += [(kind.device, f"machine.others[{index}].device", 1) for index, kind in enumerate(machine.others)]
    for holder, path, least in holders:
        for entry in fields(holder):
            value = getattr(holder, entry.name)
            if entry.name.endswith("_bytes") and value is not None:
                at_least = least if entry.name == "memory_bytes" else 0
                _require(f"{path}.{entry.name}", value, low=at_least, high=_LARGEST_SIZE)


def _check_rates(rates: Rates, place: str) -> None:
    """Rates are above zero; seconds may be zero. place: of the rates in the machine."""
    for entry in fields(rates):
        path, value = f"{place}.{entry.name}", getattr(rates, entry.name)
        low = 0.0 if entry.name.endswith("_s") and not entry.name.endswith("_per_s") else _LEAST_RATE
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            of = f"{path}.{name}" if name else path
            if isinstance(number, tuple):
                _check_curve(of, number)
            elif isinstance(number, int | float):
                _require(of, number, low=low, high=_LARGEST_RATE)
    _require(f"{place}.probe_slowdown", rates.probe_slowdown, low=1.0, high=_LARGEST_SLOWDOWN)
    for table, key in _ALWAYS_THERE.items():
        if key not in getattr(rates, table):
            raise InvalidInput(f"{place}.{table} has no {key}", field=f"{place}.{table}", allowed=[key])


def _check_curve(path: str, curve: Curve) -> None:
    for number in (number for point in curve for number in point):
        _require(path, number, low=_LEAST_RATE, high=_LARGEST_RATE)
    sizes = [size for size, _ in curve]
    if not sizes or sizes != sorted(set(sizes)):
        raise InvalidInput(f"{path} has {len(sizes)} sizes; allowed: one or more, rising", field=path, allowed="rising sizes")


def _require(path: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidInput(
            f"{path} is {value:g}; allowed: {low:g} to {high:g}",
            field=path,
            value=shown_value(value),
            allowed={"minimum": low, "maximum": high},
        )
