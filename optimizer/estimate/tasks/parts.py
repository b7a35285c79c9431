"""A part of a step in numbers: its bytes, the highest point inside it, its milliseconds on each lane. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, LANES, Tier
from optimizer.estimate.tasks.change import Change
from optimizer.profile.time_kinds import COMPUTE_KINDS

Bytes = NDArray[np.int64]
_BEYOND: Final[tuple[Tier, ...]] = ("host", "disk", "remote")


@dataclass(frozen=True, kw_only=True)
class PartBytes:
    """Device bytes by category, in the order of CATEGORIES; other tiers as one number each."""

    net: Bytes
    rise: int
    """Highest total inside the part above the total at its start; 0 or more."""
    at_rise: Bytes
    """Change of each category from the start to that moment."""
    host_net: int = 0
    host_rise: int = 0
    disk_net: int = 0
    disk_rise: int = 0
    remote_net: int = 0
    remote_rise: int = 0

    @cached_property
    def net_bytes(self) -> int:
        """Bytes over all categories."""
        return int(self.net.sum())

    @cached_property
    def beyond(self) -> tuple[int, ...]:
        """Net and rise of host, disk and remote store, for arrays of many."""
        return self.host_net, self.host_rise, self.disk_net, self.disk_rise, self.remote_net, self.remote_rise


NO_KINDS = (0.0,) * len(COMPUTE_KINDS)


class SpentMs(TypedDict, total=False):
    """Milliseconds of each kind of time on the compute lane; kinds that are left out take none."""

    matmul: float
    attention: float
    half_precision: float
    elementwise: float
    reduction: float
    gather: float
    quantization: float
    dispatch: float
    hooks: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """Milliseconds on each lane (``prediction.Lane``), and what compute's are made of."""

    compute_ms: float
    copy_out_ms: float = 0.0
    copy_in_ms: float = 0.0
    host_ms: float = 0.0
    disk_ms: float = 0.0
    network_ms: float = 0.0
    kinds_ms: tuple[float, ...] = NO_KINDS
    """Time of compute by kind, in the order of COMPUTE_KINDS; sums to ``compute_ms``."""
    kinds_work: tuple[float, ...] = NO_KINDS
    """Work done in each kind: FLOPs of products and attention, bytes read and written of the other kinds of op."""
    recomputed_ms: float = 0.0
    """The part of compute that is done a second time because it was not kept."""

    @classmethod
    def spent(cls, **kinds_ms: Unpack[SpentMs]) -> "PartTime":
        """Time on the compute lane, by kind."""
        by_kind = tuple(kinds_ms.get(kind, 0.0) for kind in COMPUTE_KINDS)
        return cls(compute_ms=sum(by_kind), kinds_ms=by_kind)

    @cached_property
    def by_lane(self) -> tuple[float, ...]:
        """Milliseconds in the order of ``prediction.LANES``, for arrays of many."""
        return tuple(getattr(self, f"{lane}_ms") for lane in LANES)

    @cached_property
    def by_kind(self) -> tuple[float, ...]:
        """Milliseconds of each kind, then the work, then what is recomputed, for arrays of many."""
        return *self.kinds_ms, *self.kinds_work, self.recomputed_ms


def sum_changes(changes: Sequence[Change]) -> PartBytes:
    """Sum up changes in order, on any tier."""
    beyond = dict.fromkeys(_BEYOND, 0)
    highest = dict(beyond)
    level, top, num_before = 0, 0, 0
    for index, (tier, _, num_bytes) in enumerate(changes, start=1):
        if tier == "device":
            level += num_bytes
            if level > top:
                top, num_before = level, index
        else:
            beyond[tier] += num_bytes
            highest[tier] = max(highest[tier], beyond[tier])
    at_rise, net = [0] * len(CATEGORIES), [0] * len(CATEGORIES)
    for index, (tier, slot, num_bytes) in enumerate(changes):
        if tier == "device":
            net[slot] += num_bytes
            if index < num_before:
                at_rise[slot] += num_bytes
    return PartBytes(
        net=np.array(net, dtype=np.int64),
        rise=top,
        at_rise=np.array(at_rise, dtype=np.int64),
        host_net=beyond["host"],
        host_rise=highest["host"],
        disk_net=beyond["disk"],
        disk_rise=highest["disk"],
        remote_net=beyond["remote"],
        remote_rise=highest["remote"],
    )


def sum_device_rows(table: NDArray[np.int64], *, slots: Sequence[int]) -> PartBytes:
    """Sum up rows of changes on the device, each of these categories in this order; for many, without a loop."""
    totals = np.concatenate([[0], table.ravel().cumsum()])
    top = int(totals.argmax())
    net: Bytes = np.zeros(len(CATEGORIES), dtype=np.int64)
    at_rise = np.zeros_like(net)
    num_rows, rest = divmod(top, len(slots))
    net[list(slots)] = table.sum(axis=0)
    at_rise[list(slots)] = table[:num_rows].sum(axis=0)
    if rest:
        at_rise[list(slots[:rest])] += table[num_rows, :rest]
    return PartBytes(net=net, rise=int(totals[top]), at_rise=at_rise)
