"""A profile at one shape, as numbers: each part's bytes, peak and time. What all plans of that shape share is computed once.

A part is summed up by what it changes (``net``), the highest point inside it relative to its start (``rise``) and what
is in memory at
that point. That is all a peak over parts needs, so pricing a plan costs one row per part, not one per op.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.categories import CATEGORIES, Category, Tier
from optimizer.hardware.machine import Rates
from optimizer.plan.activations import BlockChoice
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Op, Part, Profile
from optimizer.profile.sizes import NUM_MONOMIALS, Shape, Terms, evaluate, monomials

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


class CompiledShape:
    """One regime of a profile at one micro-batch size and sequence length."""

    def __init__(self, profile: Profile, *, weights: WeightsPlan, shape: Shape) -> None:
        self.regime = profile.regime(weights.representation, shape)
        self.shape = shape
        self.compute_dtype = weights.dtype if weights.autocast == "off" else weights.autocast
        # Not the profile itself: it is what decides how long this is kept.
        self._parts = profile.parts
        self._ops = _OpSizes(profile.ops, shape)
        self._changes = [(c.tier, _SLOT[c.category], evaluate(c.num_bytes, shape)) for c in profile.changes]
        self._bytes: dict[tuple[object, ...], PartBytes] = {}
        self._times: dict[tuple[object, ...], PartTime] = {}
        self._op_s: dict[str, NDArray[np.float64]] = {}

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
            if rates_key not in self._op_s:
                self._op_s[rates_key] = self._ops.seconds(rates, self.compute_dtype)
            self._times[key] = self._sum_times(self._part(name), self._op_s[rates_key])
        return self._times[key]

    def _part(self, name: "PartName") -> Part:
        if isinstance(name, str):
            return self._parts[self.regime.parts[name]]
        choice, template, which = name
        index: int = getattr(self.regime.templates[choice][template], which)
        return self._parts[index]

    def _sum_bytes(self, part: Part, releases: tuple[tuple[int, int], ...]) -> PartBytes:
        changes = [self._changes[index] for index in part.changes]
        at = list(part.changes_at)
        for index, after in releases:
            num_bytes, category = self.shared_bytes(index)
            place = sum(1 for other in at if other <= after)
            changes.insert(place, ("device", _SLOT[category], -num_bytes))
            at.insert(place, after)
        return _sum_changes(changes)

    def _sum_times(self, part: Part, op_s: NDArray[np.float64]) -> PartTime:
        indices = np.array(part.ops, dtype=np.int64)
        lanes = self._ops.lanes[indices]
        compute_s, copy_out_s, copy_in_s = np.bincount(lanes, weights=op_s[indices], minlength=len(_LANES))
        return PartTime(
            compute_ms=float(compute_s) * 1000, copy_out_ms=float(copy_out_s) * 1000, copy_in_ms=float(copy_in_s) * 1000
        )


PartName = str | tuple[BlockChoice, int, str]
"""A name of PART_NAMES, or (choice, template, ``forward`` | ``backward_first`` | ``backward_accumulate``)."""

_LANES = ("compute", "copy_out", "copy_in")


class _OpSizes:
    """All ops of a profile at one shape, as arrays."""

    def __init__(self, ops: Sequence[Op], shape: Shape) -> None:
        values = np.array(monomials(shape), dtype=np.float64)
        self._flops = _terms_of(op.flops for op in ops) @ values
        self._written_bytes = _terms_of(op.written_bytes for op in ops) @ values
        self._moved_bytes = _terms_of(op.read_bytes for op in ops) @ values + self._written_bytes
        self._kinds = np.array([op.kind for op in ops])
        self.lanes = np.array([_LANES.index(op.kind) if op.kind in _LANES else 0 for op in ops], dtype=np.int64)

    def seconds(self, rates: Rates, dtype: str) -> NDArray[np.float64]:
        """Of each op: copies at the link's rate, the rest the longer of moving bytes and computing."""
        seconds = self._moved_bytes / rates.memory_bytes_per_s
        tables = {"matmul": rates.matmul_flops_per_s, "attention": rates.attention_flops_per_s}
        for kind, table in tables.items():
            chosen = self._kinds == kind
            compute_s = self._flops[chosen] / table.get(dtype, table["fp32"])
            seconds[chosen] = np.maximum(seconds[chosen], compute_s)
        links = {"copy_out": rates.device_to_host_bytes_per_s, "copy_in": rates.host_to_device_bytes_per_s}
        for kind, bytes_per_s in links.items():
            chosen = self._kinds == kind
            seconds[chosen] = self._written_bytes[chosen] / bytes_per_s
        return seconds + rates.op_overhead_s


def _terms_of(sizes: Iterable[Terms]) -> NDArray[np.float64]:
    return np.array(list(sizes), dtype=np.float64).reshape(-1, NUM_MONOMIALS)


def _sum_changes(changes: list[tuple[Tier, int, int]]) -> PartBytes:
    """changes: tier, place of the category, bytes."""
    device = np.zeros((len(changes) + 1, len(CATEGORIES)), dtype=np.int64)
    host = [0]
    for row, (tier, slot, num_bytes) in enumerate(changes, start=1):
        if tier == "device":
            device[row, slot] = num_bytes
        else:
            host.append(host[-1] + num_bytes)
    levels = device.cumsum(axis=0)
    totals = levels.sum(axis=1)
    top = int(totals.argmax())
    return PartBytes(net=levels[-1], rise=int(totals[top]), at_rise=levels[top], host_net=host[-1], host_rise=max(host))


_compiled: dict[tuple[int, str, Shape], CompiledShape] = {}


def compile_shape(profile: Profile, weights: WeightsPlan, shape: Shape) -> CompiledShape:
    """Raises InvalidWorkload beyond the position table. Kept while the profile lives, the oldest dropped after a few dozen."""
    key = (id(profile), weights.representation, shape)
    if key not in _compiled:
        compiled = CompiledShape(profile, weights=weights, shape=shape)
        if len(_compiled) >= _MAX_CACHED:
            del _compiled[next(iter(_compiled))]
        _compiled[key] = compiled
        weakref.finalize(profile, _compiled.pop, key, None)
    return _compiled[key]
