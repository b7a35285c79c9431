"""A profile at one shape, as numbers: each part's bytes, peak and time. What all plans of that shape share is computed once.

A part is summed up by what it changes (``net``), the highest point inside it relative to its start (``rise``) and what
is in memory at
that point. That is all a peak over parts needs, so pricing a plan costs one row per part, not one per op.
"""

import weakref
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optimizer.categories import CATEGORIES, Category
from optimizer.hardware.machine import Rates
from optimizer.plan.activations import BlockChoice
from optimizer.plan.weights import WeightsDtype
from optimizer.profile.profile import Change, Op, Part, Profile, Regime
from optimizer.profile.sizes import Shape, evaluate, monomials

Bytes = NDArray[np.int64]
_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_MAX_CACHED = 64


@dataclass(frozen=True, kw_only=True)
class PartBytes:
    """Device bytes by category, in the order of CATEGORIES; host bytes as one number."""

    net: Bytes
    rise: int
    """Highest total inside the part above the total at its start; 0 or more."""
    at_rise: Bytes
    """Change of each category from the start to that moment."""
    host_net: int
    host_rise: int


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """Milliseconds on each lane."""

    compute_ms: float
    copy_out_ms: float
    copy_in_ms: float


@dataclass(kw_only=True)
class CompiledShape:
    """One regime of a profile at one micro-batch size and sequence length."""

    regime: Regime
    shape: Shape
    dtype: WeightsDtype
    _bytes: dict[tuple[object, ...], PartBytes] = field(default_factory=dict)
    _times: dict[tuple[object, ...], PartTime] = field(default_factory=dict)

    def shared_bytes(self, index: int) -> tuple[int, Category]:
        shared = self.regime.shared[index]
        return evaluate(shared.num_bytes, self.shape), shared.category

    def part_bytes(self, name: "PartName", *, releases: tuple[tuple[int, int], ...] = ()) -> PartBytes:
        """releases: shared storages that go during the part, as (index, after which op)."""
        key = (name, releases)
        if key not in self._bytes:
            self._bytes[key] = self._sum_bytes(self._part(name), releases)
        return self._bytes[key]

    def part_time(self, name: "PartName", rates: Rates, *, rates_key: str) -> PartTime:
        """rates_key: anything that differs where rates differ; they hold dicts and cannot be hashed themselves."""
        key = (name, rates_key)
        if key not in self._times:
            self._times[key] = _sum_times(self._part(name), self.shape, self.dtype, rates)
        return self._times[key]

    def _part(self, name: "PartName") -> Part:
        if isinstance(name, str):
            return self.regime.parts[name]
        choice, template, which = name
        part: Part = getattr(self.regime.templates[choice][template], which)
        return part

    def _sum_bytes(self, part: Part, releases: tuple[tuple[int, int], ...]) -> PartBytes:
        changes = list(part.changes)
        for index, after in releases:
            shared = self.regime.shared[index]
            gone = tuple(-term for term in shared.num_bytes)
            release = Change(at=after, tier="device", category=shared.category, num_bytes=gone)  # type: ignore[arg-type]
            place = sum(1 for change in changes if change.at <= after)
            changes.insert(place, release)
        return _sum_changes(changes, self.shape)


PartName = str | tuple[BlockChoice, int, str]
"""A name of PART_NAMES, or (choice, template, ``forward`` | ``backward_first`` | ``backward_accumulate``)."""


def _sum_changes(changes: list[Change], shape: Shape) -> PartBytes:
    device = np.zeros((len(changes) + 1, len(CATEGORIES)), dtype=np.int64)
    host = [0]
    for row, change in enumerate(changes, start=1):
        num_bytes = evaluate(change.num_bytes, shape)
        if change.tier == "device":
            device[row, _SLOT[change.category]] = num_bytes
        else:
            host.append(host[-1] + num_bytes)
    levels = device.cumsum(axis=0)
    totals = levels.sum(axis=1)
    top = int(totals.argmax())
    return PartBytes(net=levels[-1], rise=int(totals[top]), at_rise=levels[top], host_net=host[-1], host_rise=max(host))


def _sum_times(part: Part, shape: Shape, dtype: WeightsDtype, rates: Rates) -> PartTime:
    values = np.array(monomials(shape), dtype=np.float64)
    lanes = {"compute": 0.0, "copy_out": 0.0, "copy_in": 0.0}
    for op in part.ops:
        lane = op.kind if op.kind in ("copy_out", "copy_in") else "compute"
        lanes[lane] += _op_s(op, values, dtype, rates)
    return PartTime(
        compute_ms=lanes["compute"] * 1000, copy_out_ms=lanes["copy_out"] * 1000, copy_in_ms=lanes["copy_in"] * 1000
    )


def _op_s(op: Op, values: NDArray[np.float64], dtype: WeightsDtype, rates: Rates) -> float:
    written_bytes = float(values @ op.written_bytes)
    if op.kind == "copy_out":
        return written_bytes / rates.device_to_host_bytes_per_s + rates.op_overhead_s
    if op.kind == "copy_in":
        return written_bytes / rates.host_to_device_bytes_per_s + rates.op_overhead_s
    memory_s = (written_bytes + float(values @ op.read_bytes)) / rates.memory_bytes_per_s
    if op.kind == "memory":
        return memory_s + rates.op_overhead_s
    table = rates.matmul_flops_per_s if op.kind == "matmul" else rates.attention_flops_per_s
    return max(memory_s, float(values @ op.flops) / table.get(dtype, table["fp32"])) + rates.op_overhead_s


_compiled: dict[tuple[int, WeightsDtype, Shape], CompiledShape] = {}


def compile_shape(profile: Profile, dtype: WeightsDtype, shape: Shape) -> CompiledShape:
    """Raises InvalidWorkload beyond the position table. Kept while the profile lives, the oldest dropped after a few dozen."""
    key = (id(profile), dtype, shape)
    if key not in _compiled:
        compiled = CompiledShape(regime=profile.regime(dtype, shape), shape=shape, dtype=dtype)
        if len(_compiled) >= _MAX_CACHED:
            del _compiled[next(iter(_compiled))]
        _compiled[key] = compiled
        weakref.finalize(profile, _compiled.pop, key, None)
    return _compiled[key]
