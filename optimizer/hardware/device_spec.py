"""Facts about a device before anything is measured on it, and checks that a row of the table can be true.

A row says a rate twice: as its maker prints it, and as what follows from its multiprocessors, clock and architecture.
Where the two part, a brochure's figure with 2:4 sparsity, another card's bandwidth or a slip of the pen is in the row;
``find_faults`` says which. Not checked: power and year.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from optimizer.base.units import GIB, MIB

PCIE_BYTES_PER_S_PER_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""Each way, after line coding (PCI-SIG)."""
RATE_TOLERANCE = 0.03
"""Printed rates are rounded, and some are of a slightly higher clock than the one printed beside them."""
SOLD_GIB = (6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 144, 180, 192)
"""Sizes that cards of 6 to 192 GB are sold as."""
LEAST_SHARE_SHOWN = 0.93
"""Least share of what a card is sold as that its driver shows: error correction on GDDR6 takes a sixteenth."""
LANES = (8, 16)
TENSOR_DTYPES = frozenset({"tf32", "fp16", "bf16", "fp8", "int8"})


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Attained over peak of one kind of work: what to reckon with, and between what it may lie."""

    value: float
    low: float
    high: float
    source: str
    """``assumed`` at its start where nobody measured it."""

    @property
    def is_assumed(self) -> bool:
        return self.source.startswith("assumed")


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One card as its maker describes it. Rates are dense peaks, a multiply-add counted as two."""

    name: str
    generation: str
    """Generation of the chip; what efficiencies go by."""
    compute_capability: str
    year: int
    power_w: int
    """Power that the board may draw, and no less than it needs at full work."""
    num_sms: int
    """Streaming multiprocessors."""
    boost_mhz: int
    tensor_mhz: int
    """Clock of the tensor cores: ``boost_mhz`` but on Hopper and its successors."""
    flops_per_sm_and_clock: Mapping[str, float]
    """FLOPs per multiprocessor and clock by dtype; the dtypes that the card has units for. Products accumulate in fp32
    (int32 for int8)."""
    printed_flops_per_s: Mapping[str, float]
    """FLOPs per second by dtype that the maker prints; dtypes left out follow from the fields above."""
    memory_bytes: int
    """Memory that nvidia-smi shows."""
    cuda_memory_bytes: int | None = None
    """Memory that CUDA reports, less what the driver keeps back; None where nobody published it."""
    memory_bus_bits: int
    memory_bits_per_s_per_pin: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Peak of one direction between host and device."""
    pcie_generation: int | None
    """Generation of the PCIe link; None with a link of another kind (NVLink-C2C)."""
    pcie_lanes: int | None
    source: str
    also_called: tuple[str, ...] = ()
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)
    """Efficiencies by kind: tensor_products, fp32_products, attention, memory, link."""

    @property
    def flops_per_s(self) -> dict[str, float]:
        """FLOPs per second by dtype: as printed, or as it follows where the maker prints nothing."""
        return {dtype: self.derived_flops_per_s(dtype) for dtype in self.flops_per_sm_and_clock} | dict(
            self.printed_flops_per_s
        )

    def derived_flops_per_s(self, dtype: str) -> float:
        """FLOPs per second from multiprocessors, clock and architecture. Raises KeyError for a dtype without units."""
        mhz = self.tensor_mhz if dtype in TENSOR_DTYPES else self.boost_mhz
        return self.num_sms * mhz * 1e6 * self.flops_per_sm_and_clock[dtype]

    @property
    def has_bf16_units(self) -> bool:
        """True where the card has units for bf16; without them bf16 is emulated in fp32, and runs at that rate at best."""
        return "bf16" in self.flops_per_sm_and_clock

    @property
    def fp32_flops_per_s(self) -> float:
        """FLOPs per second in fp32 without TF32, torch's default."""
        return self.flops_per_s["fp32"]

    @property
    def bf16_flops_per_s(self) -> float:
        return self.flops_per_s.get("bf16", self.fp32_flops_per_s)

    @property
    def usable_bytes(self) -> int:
        """Bytes that all processes together can have of the card, contexts included."""
        return self.cuda_memory_bytes or self.memory_bytes


def find_faults(spec: DeviceSpec) -> list[str]:
    """Claims that cannot be true of a card, for people; empty for a row that holds."""
    return [*_rate_faults(spec), *_bandwidth_faults(spec), *_memory_faults(spec), *_link_faults(spec)]


def _rate_faults(spec: DeviceSpec) -> list[str]:
    faults = []
    for dtype, printed in spec.printed_flops_per_s.items():
        if dtype not in spec.flops_per_sm_and_clock:
            faults.append(f"{dtype}: a rate is given, but the chip has no units for it")
            continue
        derived = spec.derived_flops_per_s(dtype)
        if abs(printed / derived - 1) > RATE_TOLERANCE:
            is_double = abs(printed / derived / 2 - 1) <= RATE_TOLERANCE
            why = " (twice the dense rate: the figure with sparsity, or with fp16 accumulation)" if is_double else ""
            faults.append(
                f"{dtype}: {printed / 1e12:.1f} TFLOP/s, but {spec.num_sms} multiprocessors at their clock give "
                f"{derived / 1e12:.1f}{why}"
            )
    if "fp32" not in spec.printed_flops_per_s:
        faults.append("fp32: no printed rate to check the chip with")
    return faults


def _bandwidth_faults(spec: DeviceSpec) -> list[str]:
    derived = spec.memory_bus_bits / 8 * spec.memory_bits_per_s_per_pin
    if abs(spec.memory_bytes_per_s / derived - 1) <= RATE_TOLERANCE:
        return []
    pins = f"{spec.memory_bus_bits} bits at {spec.memory_bits_per_s_per_pin / 1e9:g} Gbit/s a pin"
    return [f"memory bandwidth: {spec.memory_bytes_per_s / 1e9:.0f} GB/s, but {pins} give {derived / 1e9:.0f}"]


def _memory_faults(spec: DeviceSpec) -> list[str]:
    faults = []
    if not any(LEAST_SHARE_SHOWN <= spec.memory_bytes / (size * GIB) <= 1 for size in SOLD_GIB):
        faults.append(f"memory: no card is sold whose driver shows {spec.memory_bytes // MIB:,} MiB")
    cuda_bytes = spec.cuda_memory_bytes
    if cuda_bytes is not None and not LEAST_SHARE_SHOWN <= cuda_bytes / spec.memory_bytes <= 1:
        faults.append(
            f"memory: CUDA's total of {cuda_bytes // MIB:,} MiB is not within 7 % below the driver's "
            f"{spec.memory_bytes // MIB:,} MiB"
        )
    return faults


def _link_faults(spec: DeviceSpec) -> list[str]:
    generation, lanes = spec.pcie_generation, spec.pcie_lanes
    if generation is None or lanes is None:
        return [] if spec.link_bytes_per_s > 0 else ["link: neither PCIe nor a rate"]
    if generation not in PCIE_BYTES_PER_S_PER_LANE or lanes not in LANES:
        return [f"link: PCIe {generation} x{lanes} is not one of PCIe 3, 4, 5 with 8 or 16 lanes"]
    derived = PCIE_BYTES_PER_S_PER_LANE[generation] * lanes
    if abs(spec.link_bytes_per_s / derived - 1) <= RATE_TOLERANCE:
        return []
    return [f"link: {spec.link_bytes_per_s / 1e9:.1f} GB/s, but PCIe {generation} x{lanes} has {derived / 1e9:.1f}"]


class Card(NamedTuple):
    """Facts of a card that decide, beside a plan, how much memory its kernels hold."""

    capability: tuple[int, int] | None
    """Compute capability; None where it is not known."""
    multiprocessors: tuple[int, int, int]
    """Fewest, likely and most: the same where they are known."""
    torch_version: tuple[int, int] | None = None
