"""Links between the cards of one machine, by the card's name and by whether they reach each other's memory. Torch-free.

Data sheets give an NVLink card's rate of both directions together, over all of its links; the table here holds one direction.
Collectives attain less: NCCL's all-reduce among eight A100 moves some 235 GB/s of 300 each way over NVLink (nccl-tests, bus
bandwidth), and cards without direct access pass every byte through a buffer in the host's memory, written and read by turns.

*Not modelled*: bridges between pairs of cards, cards behind one PCIe switch, several processors with a link between.
"""

from collections.abc import Mapping
from typing import Final, Literal

from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import find_device
from optimizer.hardware.machine import Device, PeerLink
from optimizer.hardware.rates import Rates

NVLINK_BYTES_PER_S: Final[Mapping[str, float]] = {
    "V100 16GB": 150e9,
    "V100 32GB": 150e9,
    "A100 40GB": 300e9,
    "A100 80GB": 300e9,
    "H100 SXM": 450e9,
    "H200 SXM": 450e9,
    "B200 SXM": 900e9,
}
"""One direction of all links of a card, on boards that connect every card with every other (NVIDIA's data sheets of the SXM
forms). Names are those of ``devices.toml``."""
SHARE_ATTAINED: Final[Mapping[Literal["nvlink", "pcie", "host"], float]] = {"nvlink": 0.78, "pcie": 0.8, "host": 0.5}
"""Attained over given rate of collectives: of NVLink's peak, and of a card's copies to and from the host."""
LATENCY_S: Final[Mapping[Literal["nvlink", "pcie", "host"], float]] = {"nvlink": 10e-6, "pcie": 15e-6, "host": 25e-6}
"""Time of a collective of a few bytes between two cards, its launch included; assumed."""


def find_peers(device: Device, rates: Rates, *, reach_each_other: bool) -> PeerLink:
    """The link between cards like this one on one machine.

    reach_each_other: whether the driver lets one card read another's memory.
    """
    kind = _kind_of(device, reach_each_other=reach_each_other)
    if kind == "nvlink":
        given = NVLINK_BYTES_PER_S[_table_name(device.name)]
    else:
        given = min(rates.device_to_host_bytes_per_s, rates.host_to_device_bytes_per_s)
    return PeerLink(kind=kind, bytes_per_s=given * SHARE_ATTAINED[kind], latency_s=LATENCY_S[kind], source="table")


def _kind_of(device: Device, *, reach_each_other: bool) -> Literal["nvlink", "pcie", "host"]:
    if not reach_each_other:
        return "host"
    return "nvlink" if _table_name(device.name) in NVLINK_BYTES_PER_S else "pcie"


def _table_name(name: str) -> str:
    """The table's name of a card, empty for one that is not there."""
    try:
        return find_device(name).name
    except InvalidInput:
        return ""
