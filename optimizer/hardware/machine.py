"""A machine as the planner sees it: a device, a host, the link between, and rates with where each came from.

Torch-free. ``probe/`` measures one of these on the spot; ``calibration.py`` corrects it with finished runs.
"""

import hashlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from optimizer.base.errors import InvalidInput
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_value

RateSource = Literal["measured", "table"]
PROBE_DISTURBED_FACT = "disturbed"
"""Among a machine's facts, where others used it while it was probed: a sentence with what to do."""
_COLD = " cold"
Curve = tuple[tuple[float, float], ...]
"""Rates attained by size, as (size, rate per second), sizes rising."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Attained rates, not peaks. Floating-point operations count a multiply-add as two."""

    matmul_flops_per_s: dict[str, float]
    """By dtype (fp32, bf16): large matrix products."""
    attention_flops_per_s: dict[str, float]
    """By dtype: fused attention kernels."""
    memory_bytes_per_s: float
    """Element-wise kernels: bytes read plus written, per second."""
    op_overhead_s: float
    """Fixed cost of one op: dispatch on the CPU device, launch on CUDA."""
    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float
    optimizer_elements_per_s: dict[str, float]
    """By state kind (``adamw_32``, ``adamw_8``): parameters updated per second on the device."""
    source: RateSource
    host_optimizer_elements_per_s: float | None = None
    """AdamW with 32-bit state on the host; None where unknown."""
    disk_write_bytes_per_s: float | None = None
    """Sequential, of the disk that holds the scratch folder; None where unknown, as are the next four."""
    disk_read_bytes_per_s: float | None = None
    """Past the system's page cache."""
    disk_cached_read_bytes_per_s: float | None = None
    """Of what the page cache holds."""
    remote_write_bytes_per_s: float | None = None
    """To the store of the remote tier."""
    remote_read_bytes_per_s: float | None = None
    remote_round_trip_s: float | None = None
    """Of a read of a few bytes there; None where unknown. What is as large as a staging buffer has it in its rate."""
    matmul_curves: dict[str, Curve] = field(default_factory=dict)
    """FLOPs per second by FLOPs for each byte moved, under ``mm nt fp32``, ``bmm nn bf16`` (``profile.Op.form``), and all forms
    together under ``mm fp32``; the flat rate where there is none. Of a generation's products of few rows those under ``rows nt
    fp32`` and, of weights that come from memory, ``rows nt fp32 cold``, where there are any. Where a quicker library makes the
    large ones (``formats/matmul_dispatch.py``), the others under ``small nt fp32`` and ``small rows nt fp32``."""
    library_call_s: float = 0.0
    """What each product of that library takes beside its rate."""
    attention_curves: dict[str, Curve] = field(default_factory=dict)
    """The same under ``forward fp32``, ``backward fp32``, causal, and ``forward whole fp32``, not causal
    (``formats.op_costs.WHOLE``); longer sequences have more FLOPs for each byte. Under ``token fp32``,
    of a generation's tokens, bytes per second by bytes moved for each that is written."""
    op_curves: dict[str, Curve] = field(default_factory=dict)
    """Bytes read and written per second by their number, under an op's name (``tanh``), and with its dtype where it is not
    fp32 (``tanh bf16``). An op that is not there takes that of its kind (``elementwise``), else the flat rate. Under ``draw``
    scores per second by their number, of one sequence that draws its token."""
    packing_curves: dict[str, Curve] = field(default_factory=dict)
    """Elements per second by the number of a storage's elements, under ``pack int8``, ``unpack bf16``: to compress what is
    offloaded and to undo that, without the copy."""
    host_attention_curves: dict[str, Curve] = field(default_factory=dict)
    """Of attention to keys and values on the host, by their dtype: FLOPs per second by FLOPs for each byte of them, of which
    there are more where more queries share them. A share of what the host's memory gives where there is none."""
    forward_dispatch_s: float | None = None
    """What an op costs in the runtime's own step beside its kernel: Python, autograd, the meter. None where it was not measured:
    each op that moves bytes then costs ``op_overhead_s``."""
    backward_dispatch_s: float | None = None
    pass_dispatch_s: float | None = None
    """The same in a generation, which notes nothing for a backward; as forward in a step where it was not measured."""
    python_s: dict[str, float] = field(default_factory=dict)
    """Work beside ops: ``recompute op`` and ``selective op`` for an op that runs forward in such a block, the first time or
    again, ``offload`` for a copy, ``step`` once, ``micro-batch`` and ``token`` (of a generation) for a run through the model,
    for each tensor one of ``update many``, ``update one``, ``gradients`` (on the host), ``state`` (there too), ``state at
    home`` (of weights that stream), beside it ``update 8-bit`` of states in 8 bits, ``weights`` for each time that a tensor of
    a block comes (``weights of a pass`` in a generation), and ``keys and values`` for each time that a block's come and go; of
    a generation whose own are in a store beyond the host ``stored weights`` and ``stored keys and values``."""
    cache_bytes: int | None = None
    """The processor's largest cache, which weights read in turn do not stay in if they are more; None where it is not known."""
    wake_s: float = 0.0
    """What an op takes longer that the CPU device's threads share, where the others have fallen asleep since the last one."""
    fresh_bytes_per_s: float | None = None
    """Memory that the process does not have yet, touched for the first time: pages that the system finds and clears."""
    link_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Copies as they were probed: alone, beside compute, both ways at once; for people."""
    probe_slowdown: float = 1.0
    """How many times slower than by itself the machine may have been when this was measured, because others used it
    (``probe/disturbance.py``); 1 where it was left alone, and for rates of the table."""
    time_factors: dict[str, float] = field(default_factory=dict)
    """What finished runs say of each kind of time (``calibration.py``); 1 for those not named."""

    @cached_property
    def fingerprint(self) -> str:
        """Differs where any rate does; made once, and short, since it is part of many keys."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @cached_property
    def with_cold_weights(self) -> "Rates":
        """The same for passes whose weights come from memory each time."""
        cold = {name.removesuffix(_COLD): curve for name, curve in self.matmul_curves.items() if name.endswith(_COLD)}
        return replace(self, matmul_curves={**self.matmul_curves, **cold})

    @cached_property
    def with_page_cache(self) -> "Rates":
        """The same for what is read from the disk's page cache."""
        return replace(self, disk_read_bytes_per_s=self.disk_cached_read_bytes_per_s or self.disk_read_bytes_per_s)

    @cached_property
    def corrected(self) -> dict[tuple[tuple[str, float], ...], "Rates"]:
        """These rates under calibrations, by their factors: a search asks for the same ones hundreds of times."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device tier of one machine."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    """Usable by one job: on the CPU device half of the machine's memory, on CUDA the card less its context."""
    index: int = 0
    total_bytes: int = 0
    """Of the card, as its driver tells processes; 0 where it is not known, and on the CPU device."""
    compute_capability: str = ""
    """Of CUDA cards, ``8.9``; empty where it is not known."""
    context_bytes: int | None = None
    """What of the card is gone before the first tensor, as measured; None where it was not."""
    workspace_bytes: int | None = None
    """Of the matrix libraries, as measured; None where they were not."""
    num_multiprocessors: int | None = None
    """Of CUDA cards, which some kernels' scratch grows with; None where it is not known."""


class Processor(NamedTuple):
    """What decides, beside a plan, how much memory the CPU device's kernels hold."""

    num_threads: int
    packs_bf16: bool = False
    packs_fp32: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine with one device (a layout of several comes later)."""

    name: str
    device: Device
    host_memory_bytes: int
    rates: Rates
    disk_free_bytes: int = 0
    """Of the scratch folder's disk; 0 where there is no disk tier."""
    remote_free_bytes: int = 0
    """Of the remote store; 0 where there is none."""
    num_threads: int = 1
    packs_bf16: bool = False
    """Whether products in bf16 are a library's on the CPU device, which lays matrices out in blocks first: with AVX-512."""
    packs_fp32: bool = False
    """The same of large products in fp32 (``formats/matmul_dispatch.py``): with AVX-512 on processors that are not Intel's."""
    facts: dict[str, str] = field(default_factory=dict)
    """Processor, driver and library versions; for people and records, never for decisions."""

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
        _check_bytes(machine)
        _check_rates(machine.rates)
        return machine


_LEAST_RATE, _LARGEST_RATE = 1e-9, 1e30
_LARGEST_SLOWDOWN = 1e6
_LARGEST_SIZE = 2**60
_ALWAYS_THERE = {"matmul_flops_per_s": "fp32", "attention_flops_per_s": "fp32", "optimizer_elements_per_s": "adamw_32"}
"""Keys that the estimate falls back to."""


def _check_bytes(machine: Machine) -> None:
    for holder, path, least in ((machine.device, "machine.device", 1), (machine, "machine", 0)):
        for entry in fields(holder):
            value = getattr(holder, entry.name)
            if entry.name.endswith("_bytes") and value is not None:
                at_least = least if entry.name == "memory_bytes" else 0
                _require(f"{path}.{entry.name}", value, low=at_least, high=_LARGEST_SIZE)


def _check_rates(rates: Rates) -> None:
    """Rates are above zero; seconds may be zero."""
    for entry in fields(rates):
        path, value = f"machine.rates.{entry.name}", getattr(rates, entry.name)
        low = 0.0 if entry.name.endswith("_s") and not entry.name.endswith("_per_s") else _LEAST_RATE
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            place = f"{path}.{name}" if name else path
            if isinstance(number, tuple):
                _check_curve(place, number)
            elif isinstance(number, int | float):
                _require(place, number, low=low, high=_LARGEST_RATE)
    _require("machine.rates.probe_slowdown", rates.probe_slowdown, low=1.0, high=_LARGEST_SLOWDOWN)
    for table, key in _ALWAYS_THERE.items():
        if key not in getattr(rates, table):
            raise InvalidInput(f"machine.rates.{table} has no {key}", field=f"machine.rates.{table}", allowed=[key])


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
