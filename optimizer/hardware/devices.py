"""Devices by name, for planning on a card that was never measured. The table itself is ``devices.toml``.

Peaks are dense: data sheets since 2020 print the rate with 2:4 sparsity, which training does not have, at twice the
dense one. bf16 is the tensor-core rate with fp32 accumulation (half of fp16 accumulation on GeForce cards); fp32 is
the rate without TF32, torch's default. ``table_machine`` turns peaks into attained rates with the table's efficiencies,
published for few generations and assumed for the rest; a probe or a finished run on the card replaces them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

from optimizer.base.errors import InvalidInput
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.shown import shown_value
from optimizer.base.units import GIB, MIB, format_bytes
from optimizer.hardware.cuda_facts import bytes_beside_tensors
from optimizer.hardware.device_spec import DeviceSpec
from optimizer.hardware.device_table import read_devices
from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.peers import CARDS_PER_BRIDGE, has_bridges, peer_link_of, read_peer_link
from optimizer.hardware.rates import Rates
from optimizer.optimizers import UpdateRate

OP_OVERHEAD_S = 8e-6
"""One kernel launched by eager PyTorch, dispatch included."""
ADAMW_BYTES_PER_ELEMENT: Mapping[UpdateRate, float] = {"adamw_32": 28.0, "adamw_8": 16.1}
"""Read and written per fp32 parameter: weight and both moments twice, gradient once; an 8-bit moment adds its scale."""
ASSUMED_HOST_MEMORY_BYTES = 32 * GIB
"""Host of a card that is only a name: what most owners of one card have. ``--host-memory`` says otherwise."""
ASSUMED_DISK_BYTES = 256 * GIB
"""Free on its disk: a quarter of a terabyte drive. ``--disk`` says otherwise."""
ASSUMED_DISK_READ_BYTES_PER_S, ASSUMED_DISK_WRITE_BYTES_PER_S = 3.0e9, 1.5e9
"""An NVMe drive on PCIe 3.0 x4 (3.9 GB/s at most), read in long runs, and written for longer than its quick cells last."""
ASSUMED_UPDATES_PER_CHANNEL = 4e8
"""Parameters that AdamW updates in a second for each channel of the host's memory. ZeRO-Offload (arXiv 2101.06840) prints 0.22 s
for a billion on two sockets of six channels each at 2666 MT/s; at 3200, which desktops since 2019 have, a channel gives this."""
ASSUMED_CHANNELS = ((2, 2), (4, 4), (MAX_DEVICES, 8))
"""Channels of the host's memory, by the most cards: a desktop's for two, a workstation's for four, a server's for more."""
ASSUMED_CARDS_PER_SWITCH = ((4, 1), (MAX_DEVICES, 2))
"""Cards that share one PCIe link to the host, by the most cards: boards with slots for four have lanes for each. Machines of
eight that owners describe have links of their own, pairs and fours behind switches, about as often each (NCCL's issues 1086 and
1530, nccl-tests' 269 and 307, nvbandwidth's 53)."""
BESIDE_FACT = "beside the card"
"""Among a machine's facts, the host and the disk that a card of the table is taken to have, in words."""
_MAKERS = ("nvidia", "geforce", "tesla", "quadro")


class Beside(TypedDict, total=False):
    """The machine around a card of the table, as far as it is not assumed; arguments of ``table_machine``."""

    host_memory_bytes: int
    disk_bytes: int
    cards_per_switch: int


def known_devices() -> dict[str, DeviceSpec]:
    """The table by name, oldest generation first. Read from the package's file at the first call."""
    return read_devices()


def find_device(name: str) -> DeviceSpec:
    """The card called so, in any spelling of spaces, dashes and case, with or without NVIDIA, GeForce or Tesla in front.

    The size of the memory may be left out where only one card has the name. The names that nvidia-smi prints are known too.
    Raises InvalidInput that lists the table, also where a name such as ``A100 80`` or ``H100`` could be several cards.
    """
    devices = known_devices()
    wanted = _squeezed(str(name))
    matching = [spec for spec in devices.values() if wanted in _spellings(spec)]
    matching = matching or [spec for spec in devices.values() if wanted == _squeezed(_without_size(spec.name))]
    matching = matching or [spec for spec in devices.values() if wanted and _squeezed(spec.name).startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    meaning = f"could be {' or '.join(spec.name for spec in matching)}" if matching else "is not in the table"
    raise InvalidInput(
        f"GPU {name!r} {meaning}; known: {', '.join(devices)}",
        field="gpu",
        value=shown_value(name),
        allowed=list(devices),
        hint="Choose a name of the list, measure the machine itself with `probe`, or add a row (docs/devices.md).",
    )


def table_machine(
    name: str,
    *,
    host_memory_bytes: int = ASSUMED_HOST_MEMORY_BYTES,
    disk_bytes: int = ASSUMED_DISK_BYTES,
    cards_per_switch: int | None = None,
    num_devices: int = 1,
    num_others: int = 0,
    peer_link: str | None = None,
) -> Machine:
    """A machine with this card, rates from its data sheet, and an assumed host and disk. Raises InvalidInput for an unknown name.

    disk_bytes: free ones; 0 for a machine without a scratch disk. num_devices: so many of the card, which share host and disk.
    num_others: cards of other kinds there. cards_per_switch: how many share one PCIe link to the host; None for what is assumed.
    peer_link: the link between them, as ``peers.read_peer_link`` has it; None for the best that such cards can have.
    """
    spec = find_device(name)
    num_cards = num_devices + num_others
    cards_per_switch = _read_cards_per_switch(cards_per_switch, num_cards)
    memory_bytes_per_s = spec.memory_bytes_per_s * spec.efficiency["memory"].value
    link_bytes_per_s = spec.link_bytes_per_s * spec.efficiency["link"].value
    peaks = _training_peaks(spec)
    rates = Rates(
        matmul_flops_per_s={dtype: peak * products_efficiency(spec, dtype) for dtype, peak in peaks.items()},
        attention_flops_per_s={dtype: peak * spec.efficiency["attention"].value for dtype, peak in peaks.items()},
        memory_bytes_per_s=memory_bytes_per_s,
        op_overhead_s=OP_OVERHEAD_S,
        device_to_host_bytes_per_s=link_bytes_per_s,
        host_to_device_bytes_per_s=link_bytes_per_s,
        optimizer_elements_per_s={kind: memory_bytes_per_s / size for kind, size in ADAMW_BYTES_PER_ELEMENT.items()},
        source="table",
        host_optimizer_elements_per_s=ASSUMED_UPDATES_PER_CHANNEL * _by_cards(ASSUMED_CHANNELS, num_cards),
        disk_read_bytes_per_s=ASSUMED_DISK_READ_BYTES_PER_S if disk_bytes else None,
        disk_write_bytes_per_s=ASSUMED_DISK_WRITE_BYTES_PER_S if disk_bytes else None,
    )
    whole = Device(
        kind="cuda",
        name=spec.name,
        memory_bytes=spec.usable_bytes,
        total_bytes=spec.usable_bytes,
        compute_capability=spec.compute_capability,
        num_multiprocessors=spec.num_sms,
    )
    taken_bytes = bytes_beside_tensors(whole)
    peers = None
    if num_devices > 1:
        peers = read_peer_link(spec, peer_link, num_cards=num_cards, cards_per_switch=cards_per_switch)
    has_pairs = peer_link is None and num_devices > 1 and has_bridges(spec, num_cards=num_cards)
    return Machine(
        name=f"{spec.name} (from the table)",
        device=replace(whole, memory_bytes=spec.usable_bytes - taken_bytes),
        host_memory_bytes=host_memory_bytes,
        disk_free_bytes=disk_bytes,
        rates=rates,
        facts=_facts(spec, taken_bytes=taken_bytes) | {BESIDE_FACT: _describe_beside(host_memory_bytes, disk_bytes)},
        num_devices=num_devices,
        cards_per_switch=cards_per_switch,
        peers=peers,
        peers_within=peer_link_of(spec) if has_pairs else None,
        num_within=CARDS_PER_BRIDGE if has_pairs else 1,
    )


def _read_cards_per_switch(stated: int | None, num_cards: int) -> int:
    if stated is None:
        return _by_cards(ASSUMED_CARDS_PER_SWITCH, num_cards)
    if not 1 <= stated <= MAX_DEVICES:
        raise InvalidInput(
            f"{stated} cards for each PCIe switch are stated; allowed: 1 to {MAX_DEVICES}",
            field="cards_per_switch",
            value=stated,
            allowed={"minimum": 1, "maximum": MAX_DEVICES},
        )
    return min(stated, num_cards)


def _by_cards(numbers: Sequence[tuple[int, int]], num_cards: int) -> int:
    """The number beside the least that is not below the number of cards; the last for more."""
    return next((number for most_cards, number in numbers if num_cards <= most_cards), numbers[-1][1])


def _describe_beside(host_memory_bytes: int, disk_bytes: int) -> str:
    disk = f"{format_bytes(disk_bytes)} free on an NVMe disk" if disk_bytes else "no scratch disk"
    assumed = "assumed" if (host_memory_bytes, disk_bytes) == (ASSUMED_HOST_MEMORY_BYTES, ASSUMED_DISK_BYTES) else "as stated"
    return f"{format_bytes(host_memory_bytes)} of host memory, {disk}; {assumed} (--host-memory, --disk)"


def products_efficiency(spec: DeviceSpec, dtype: str) -> float:
    """Attained over peak of large matrix products; emulated dtypes run on the fp32 units."""
    has_faster_units = spec.flops_per_s.get(dtype, 0.0) > spec.fp32_flops_per_s
    return spec.efficiency["tensor_products" if has_faster_units else "fp32_products"].value


def _training_peaks(spec: DeviceSpec) -> dict[str, float]:
    return {
        "fp32": spec.fp32_flops_per_s,
        "bf16": spec.bf16_flops_per_s,
        "fp16": spec.flops_per_s.get("fp16", spec.fp32_flops_per_s),
    }


def _facts(spec: DeviceSpec, *, taken_bytes: int) -> dict[str, str]:
    efficiency = spec.efficiency["tensor_products"]
    return {
        "source": spec.source,
        "architecture": f"{spec.generation.replace('_', ' ')}, compute capability {spec.compute_capability}, {spec.year}",
        "power": f"{spec.power_w} W",
        "efficiency of products": f"{efficiency.value:.2f} ({efficiency.low:.2f} to {efficiency.high:.2f}); {efficiency.source}",
        "context": f"{taken_bytes // MIB} MiB for the CUDA context and workspaces taken off the card's memory",
    }


def _spellings(spec: DeviceSpec) -> set[str]:
    return {_squeezed(name) for name in (spec.name, *spec.also_called)}


def _without_size(name: str) -> str:
    words = name.split()
    return " ".join(words[:-1]) if words[-1].endswith("GB") else name


def _squeezed(name: str) -> str:
    squeezed = "".join(letter for letter in name.lower() if letter.isalnum())
    for maker in _MAKERS:
        squeezed = squeezed.removeprefix(maker)
    return squeezed
