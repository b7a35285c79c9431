"""Reads ``devices.toml``: the rows as people write them, into specs in bytes and FLOPs per second.

A row with a misspelt key or a wrong type is refused by name. Whether a row can be true is ``device_spec.find_faults``'s.
"""

import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidInput
from optimizer.base.serialize import from_json
from optimizer.base.units import GIB, MIB
from optimizer.hardware.device_spec import PCIE_BYTES_PER_S_PER_LANE, DeviceSpec, Efficiency

TABLE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True, kw_only=True)
class _Rates:
    generation: str
    flops_per_sm_and_clock: dict[str, float]
    source: str


@dataclass(frozen=True, kw_only=True)
class _Chip:
    sms: int
    boost_mhz: int
    tensor_mhz: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Memory:
    mib: int
    bus_bits: int
    gbit_per_s_per_pin: float
    gb_per_s: float
    cuda_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Link:
    pcie: int | None = None
    lanes: int | None = None
    nvlink_c2c_gb_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        if self.nvlink_c2c_gb_per_s is not None:
            return self.nvlink_c2c_gb_per_s * 1e9
        return PCIE_BYTES_PER_S_PER_LANE.get(self.pcie or 0, 0.0) * (self.lanes or 0)


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    rates: str
    compute_capability: str
    year: int
    chip: _Chip
    tflops: dict[str, float]
    memory: _Memory
    link: _Link
    power_w: int
    source: str
    also_called: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Table:
    rates: dict[str, _Rates]
    efficiency: dict[str, dict[str, Efficiency]]
    devices: tuple[_Row, ...] = field(default=())


@functools.cache
def read_devices() -> dict[str, DeviceSpec]:
    """The package's table by name, in the file's order; read once."""
    return parse_devices(tomllib.loads(TABLE.read_text(encoding="utf-8")))


def parse_devices(document: Any) -> dict[str, DeviceSpec]:
    """Devices of a parsed TOML document. Raises InvalidInput with the dotted path of what is wrong."""
    table = from_json(_Table, document, path="devices.toml")
    specs: dict[str, DeviceSpec] = {}
    for row in table.devices:
        if row.rates not in table.rates:
            raise InvalidInput(
                f"devices.toml: {row.name} has rates {row.rates!r}; the file has {', '.join(table.rates)}",
                field="rates",
                value=row.rates,
                allowed=list(table.rates),
            )
        if row.name in specs:
            raise InvalidInput(f"devices.toml: {row.name} is there twice", field="name", value=row.name)
        rates = table.rates[row.rates]
        efficiency = table.efficiency["any"] | table.efficiency.get(rates.generation, {})
        specs[row.name] = _spec(row, rates, efficiency)
    return specs


def _spec(row: _Row, rates: _Rates, efficiency: dict[str, Efficiency]) -> DeviceSpec:
    cuda_gib = row.memory.cuda_gib
    return DeviceSpec(
        name=row.name,
        generation=rates.generation,
        compute_capability=row.compute_capability,
        year=row.year,
        power_w=row.power_w,
        num_sms=row.chip.sms,
        boost_mhz=row.chip.boost_mhz,
        tensor_mhz=row.chip.tensor_mhz or row.chip.boost_mhz,
        flops_per_sm_and_clock=rates.flops_per_sm_and_clock,
        printed_flops_per_s={dtype: tflops * 1e12 for dtype, tflops in row.tflops.items()},
        memory_bytes=row.memory.mib * MIB,
        cuda_memory_bytes=None if cuda_gib is None else round(cuda_gib * GIB / MIB) * MIB,
        memory_bus_bits=row.memory.bus_bits,
        memory_bits_per_s_per_pin=row.memory.gbit_per_s_per_pin * 1e9,
        memory_bytes_per_s=row.memory.gb_per_s * 1e9,
        link_bytes_per_s=row.link.bytes_per_s,
        pcie_generation=row.link.pcie,
        pcie_lanes=row.link.lanes,
        source=row.source,
        also_called=row.also_called,
        efficiency=efficiency,
    )
