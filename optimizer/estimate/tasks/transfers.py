"""Work beside compute: transfers on lanes, and what a task does with them on each kind of device. Torch-free.

On the CPU device one thread computes, copies and updates; only the disk and the network work beside it. On CUDA copies run in
order on a stream of their own, and the host, the disk and the network beside that.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from optimizer.base.categories import Lane

BESIDE: Final[Mapping[str, Mapping[Lane, int]]] = {
    "cpu": {"disk": 1, "network": 2},
    "cuda": {"copy_out": 1, "copy_in": 1, "host": 2, "disk": 3, "network": 4},
}
"""Lanes that do not hold compute up, by device, with the queue each works off; CUDA's copies share one."""
NUM_QUEUES: Final = 5

Legs = tuple[tuple[Lane, float], ...]
"""Lanes one after the other with milliseconds on each; a leg begins when the one before it does, and ends no sooner."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Something under way beside compute, known by its key to who waits for it."""

    key: Hashable
    legs: Legs
    after_block: int | None = None
    """Block after whose backward the transfer could begin; None when it is begun."""
    holds_up_cpu: bool = False
    """True on the CPU device, where compute's own thread does all of it, reading from the disk included
    (``Tiers.load``)."""


# What a task does on the clock, read from it once: every plan that is priced runs through it.


class Sent(NamedTuple):
    """Legs, apart: what compute's own thread does of them, and what is queued beside it as (queue, milliseconds, lane)."""

    own: Legs
    queued: tuple[tuple[int, float, Lane], ...]


class Begun(NamedTuple):
    """A transfer, with its legs as ``Sent`` has them."""

    key: Hashable
    after_block: int | None
    own: Legs
    queued: tuple[tuple[int, float, Lane], ...]


class Event(NamedTuple):
    """The acts of a task beside computing, in this order."""

    waits_for: tuple[Hashable, ...]
    arrives: tuple[Begun, ...]
    begins: tuple[Begun, ...]
    leaves: tuple[Sent, ...]
    drains: bool
    acts: bool
    """True where it does more than wait."""


def make_event(
    *,
    waits_for: tuple[Hashable, ...],
    arrives: tuple[Transfer, ...],
    begins: tuple[Transfer, ...],
    leaves: tuple[Legs, ...],
    drains: bool,
    device_kind: str,
) -> Event | None:
    """The event of a task with these transfers; None where it only computes."""
    acts = bool(arrives or begins or leaves or drains)
    if not acts and not waits_for:
        return None
    return Event(
        waits_for=waits_for,
        arrives=tuple([_split_transfer(transfer, device_kind) for transfer in arrives]),
        begins=tuple([_split_transfer(transfer, device_kind) for transfer in begins]),
        leaves=tuple([_split_legs(legs, device_kind) for legs in leaves]),
        drains=drains,
        acts=acts,
    )


def _split_transfer(transfer: Transfer, device_kind: str) -> Begun:
    if transfer.holds_up_cpu and device_kind == "cpu":
        return Begun(transfer.key, transfer.after_block, transfer.legs, ())
    return Begun(transfer.key, transfer.after_block, *_split_legs(transfer.legs, device_kind))


@lru_cache(maxsize=1024)
def _split_legs(legs: Legs, device_kind: str) -> Sent:
    """Blocks that are alike send alike."""
    beside = BESIDE[device_kind]
    return Sent(
        own=tuple(leg for leg in legs if leg[0] not in beside),
        queued=tuple((beside[lane], lane_ms, lane) for lane, lane_ms in legs if lane in beside),
    )
