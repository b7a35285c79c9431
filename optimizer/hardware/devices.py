"""Common GPUs from their makers' data sheets, for planning on a card that was never measured.

Peaks are dense: data sheets since 2020 print the rate with 2:4 sparsity, which training does not have, at twice the
dense one. bf16 is the tensor-core rate with fp32 accumulation (half of fp16 accumulation on GeForce cards); fp32 is
the rate without TF32, torch's default. ``table_machine`` turns peaks into attained rates with the efficiencies below,
which are guesses of one size for all; a probe or a finished run on the card replaces them.
"""

from dataclasses import dataclass
from typing import Literal

from optimizer.errors import InvalidInput
from optimizer.hardware.machine import Device, Machine, Rates
from optimizer.units import GIB, MIB

MATMUL_EFFICIENCY = {"fp32": 0.80, "bf16": 0.65}
"""Attained over peak of large matrix products; fp32 units keep busy more easily than tensor cores."""
ATTENTION_EFFICIENCY = {"fp32": 0.40, "bf16": 0.40}
"""Fused attention, forward and backward together (FlashAttention-2, arXiv 2307.08691, reports 0.35 to 0.7 of peak)."""
MEMORY_EFFICIENCY = 0.80
"""Attained over peak of element-wise kernels."""
LINK_EFFICIENCY = 0.80
"""Attained over peak of pinned copies over PCIe: packet headers and flow control."""
OP_OVERHEAD_S = 8e-6
"""One kernel launched by eager PyTorch, dispatch included."""
CONTEXT_BYTES = 512 * MIB
"""CUDA context, library workspaces and loaded kernels: 141 MiB measured on a T4, 300 MiB typical, more on newer cards."""
ADAMW_BYTES_PER_ELEMENT = {"adamw_32": 28.0, "adamw_8": 16.1}
"""Read and written per fp32 parameter: weight and both moments twice, gradient once; an 8-bit moment adds its scale."""
ASSUMED_HOST_MEMORY_BYTES = 32 * GIB
"""Host of a card that is only a name."""

_PCIE_BYTES_PER_S_PER_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""Each way, after line coding (PCI-SIG)."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One card as its maker describes it. Rates are dense peaks."""

    name: str
    memory_bytes: int
    """As the driver reports it, context not taken off."""
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    pcie_generation: Literal[3, 4, 5]
    source: str
    pcie_lanes: Literal[8, 16] = 16
    has_bf16_units: bool = True
    """Without them bf16 is emulated in fp32; ``bf16_flops_per_s`` is then the fp32 rate at best."""

    @property
    def link_bytes_per_s(self) -> float:
        """Peak of one direction."""
        return _PCIE_BYTES_PER_S_PER_LANE[self.pcie_generation] * self.pcie_lanes


_TURING = "NVIDIA Turing GPU architecture whitepaper WP-09183-001"
_VOLTA = "NVIDIA Tesla V100 data sheet, 2020"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper V2.1, appendix A"
_GA10X = "NVIDIA product page; bf16 from cores, clock and the GA102 whitepaper's rate per tensor core"
_ADA = "NVIDIA Ada GPU architecture whitepaper V2.1, appendix A"
_AD10X = "NVIDIA product page; bf16 from cores, clock and the Ada whitepaper's rate per tensor core"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper V1.1, appendix A"


def _sheet(card: str, year: int, *, sparse: str) -> str:
    return f"NVIDIA {card} data sheet, {year}; it prints bf16 {sparse} TFLOP/s with sparsity"


def _card(
    name: str,
    memory_mib: int,
    rates: tuple[float, float, float],
    *,
    pcie: tuple[Literal[3, 4, 5], Literal[8, 16]],
    source: str,
    has_bf16_units: bool = True,
) -> DeviceSpec:
    """rates: fp32 and bf16 in TFLOP/s, memory in GB/s, the units of the data sheets."""
    fp32, bf16, bandwidth = rates
    return DeviceSpec(
        name=name,
        memory_bytes=memory_mib * MIB,
        fp32_flops_per_s=fp32 * 1e12,
        bf16_flops_per_s=bf16 * 1e12,
        memory_bytes_per_s=bandwidth * 1e9,
        pcie_generation=pcie[0],
        pcie_lanes=pcie[1],
        source=source,
        has_bf16_units=has_bf16_units,
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _card("T4", 15_360, (8.1, 8.1, 320), pcie=(3, 16), source=_TURING, has_bf16_units=False),
        _card("V100 32GB", 32_768, (15.7, 15.7, 900), pcie=(3, 16), source=_VOLTA, has_bf16_units=False),
        _card("RTX 3060 12GB", 12_288, (12.7, 25.5, 360), pcie=(4, 16), source=_GA10X),
        _card("RTX 3080 10GB", 10_240, (29.8, 59.5, 760), pcie=(4, 16), source=_GA102),
        _card("RTX 3090", 24_576, (35.6, 71.0, 936), pcie=(4, 16), source=_GA102),
        _card("RTX A6000", 49_140, (38.7, 154.8, 768), pcie=(4, 16), source=_GA102),
        _card("A10", 23_028, (31.2, 125.0, 600), pcie=(4, 16), source=_sheet("A10", 2021, sparse="250")),
        _card("RTX 4060 Ti 16GB", 16_380, (22.1, 44.1, 288), pcie=(4, 8), source=_AD10X),
        _card("RTX 4070", 12_282, (29.1, 58.3, 504), pcie=(4, 16), source=_AD10X),
        _card("RTX 4070 Ti SUPER", 16_376, (44.1, 88.2, 672), pcie=(4, 16), source=_AD10X),
        _card("RTX 4080", 16_376, (48.7, 97.5, 717), pcie=(4, 16), source=_ADA),
        _card("RTX 4090", 24_564, (82.6, 165.2, 1008), pcie=(4, 16), source=_ADA),
        _card("L4", 23_034, (30.3, 121.0, 300), pcie=(4, 16), source=_sheet("L4", 2023, sparse="242")),
        _card("L40S", 46_068, (91.6, 362.0, 864), pcie=(4, 16), source=_sheet("L40S", 2023, sparse="733")),
        _card("RTX 5090", 32_607, (104.8, 209.5, 1792), pcie=(5, 16), source=_BLACKWELL),
        _card("A100 40GB", 40_960, (19.5, 312.0, 1555), pcie=(4, 16), source=_sheet("A100", 2022, sparse="624")),
        _card("A100 80GB", 81_920, (19.5, 312.0, 2039), pcie=(4, 16), source=_sheet("A100", 2022, sparse="624")),
        _card("H100 PCIe", 81_559, (51.0, 756.0, 2000), pcie=(5, 16), source=_sheet("H100", 2023, sparse="1,513")),
        _card("H100 SXM", 81_559, (67.0, 989.0, 3350), pcie=(5, 16), source=_sheet("H100", 2023, sparse="1,979")),
        _card("H200 SXM", 143_771, (67.0, 989.0, 4800), pcie=(5, 16), source=_sheet("H200", 2024, sparse="1,979")),
    )
}
"""By name. Memory sizes are those nvidia-smi prints for the card."""


def find_device(name: str) -> DeviceSpec:
    """The card called so, in any spelling of spaces, dashes and case, with or without NVIDIA, GeForce or Tesla in front.

    Raises InvalidInput that lists the table, also where a name such as ``A100`` could be several cards.
    """
    wanted = _squeezed(name)
    exact = [spec for spec in DEVICES.values() if _squeezed(spec.name) == wanted]
    matching = exact or [spec for spec in DEVICES.values() if wanted and _squeezed(spec.name).startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    meaning = f"could be {' or '.join(spec.name for spec in matching)}" if matching else "is not in the table"
    raise InvalidInput(
        f"GPU {name!r} {meaning}; known: {', '.join(DEVICES)}",
        field="gpu",
        value=name,
        allowed=list(DEVICES),
        hint="Choose a name of the list, or measure the machine itself with `probe`.",
    )


def table_machine(name: str, *, host_memory_bytes: int = ASSUMED_HOST_MEMORY_BYTES) -> Machine:
    """A machine with this card and rates from its data sheet. Raises InvalidInput for an unknown name."""
    spec = find_device(name)
    peaks = {"fp32": spec.fp32_flops_per_s, "bf16": spec.bf16_flops_per_s}
    memory_bytes_per_s = spec.memory_bytes_per_s * MEMORY_EFFICIENCY
    link_bytes_per_s = spec.link_bytes_per_s * LINK_EFFICIENCY
    rates = Rates(
        matmul_flops_per_s={dtype: peak * MATMUL_EFFICIENCY[dtype] for dtype, peak in peaks.items()},
        attention_flops_per_s={dtype: peak * ATTENTION_EFFICIENCY[dtype] for dtype, peak in peaks.items()},
        memory_bytes_per_s=memory_bytes_per_s,
        op_overhead_s=OP_OVERHEAD_S,
        device_to_host_bytes_per_s=link_bytes_per_s,
        host_to_device_bytes_per_s=link_bytes_per_s,
        optimizer_elements_per_s={kind: memory_bytes_per_s / size for kind, size in ADAMW_BYTES_PER_ELEMENT.items()},
        source="table",
    )
    device = Device(kind="cuda", name=spec.name, memory_bytes=spec.memory_bytes - CONTEXT_BYTES)
    return Machine(
        name=f"{spec.name} (from the table)",
        device=device,
        host_memory_bytes=host_memory_bytes,
        rates=rates,
        facts={"source": spec.source, "context": f"{CONTEXT_BYTES // MIB} MiB taken off the card's memory"},
    )


def _squeezed(name: str) -> str:
    squeezed = "".join(letter for letter in name.lower() if letter.isalnum())
    for maker in ("nvidia", "geforce", "tesla", "quadro"):
        squeezed = squeezed.removeprefix(maker)
    return squeezed
