"""The least bytes and time that keys and values take, for many batches at once. Bounds for a search, as
``generation_floor.py`` has them of the rest. Torch-free.

Batches that differ in nothing else lie on a line, or nearly so: few are worked out, the others lie between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from optimizer.estimate.bounds.evenly_spaced import evenly_spaced, sum_shares
from optimizer.estimate.categories.stores import STORE_LANES, read_ms
from optimizer.estimate.generation.kv.cache import KvCosts
from optimizer.estimate.generation.splits import Floats
from optimizer.estimate.ops.op_times import keys_and_values_python_s
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.passes.arrange import MicroBatchShape
from optimizer.plan.weights import WeightsDtype, WeightsPlan
from optimizer.profile.generation import GenerationProfile

_NUM_CACHE_STEPS, _NUM_CACHE_BATCHES, _CACHE_SHARE = 3, 4, 0.9
"""Steps and batches at which packing and moving keys and values is timed, and how much of the line between them counts."""
_ROOM_SHARE: Final = 0.9
"""Share that counts of the line between the room for attention on the host of two batches: its parts are rounded up,
and widen so much at once."""


class LaneTimes(NamedTuple):
    """Milliseconds by shape, or by number of micro-batches and by batch size."""

    compute_ms: Floats
    copy_ms: Floats
    disk_ms: Floats
    network_ms: Floats


@dataclass(frozen=True, kw_only=True)
class KvFloor:
    """Lower bounds for keys and values, by shape."""

    own: Floats
    """Device bytes of a block's own, as [distinct block, shape]."""
    shared: Floats
    """Device bytes that blocks share while a prompt runs."""
    slots: Floats
    """Bytes of each further block that comes ahead while tokens are decoded."""
    homes: Floats
    """Bytes of all blocks' keys and values off the device."""
    room: Floats
    """Bytes on the host that attention there works in."""
    prefill: LaneTimes
    decode: LaneTimes


class KvFloors:
    """Lower bounds for some shapes of micro-batches on a machine."""

    def __init__(self, profile: GenerationProfile, machine: Machine, shapes: Sequence[MicroBatchShape]) -> None:
        self._profile, self._machine, self._shapes = profile, machine, shapes
        self._of = cache(self._make)
        self._bytes = cache(self._make_bytes)
        self._moves = cache(self._make_moves)
        self._packing = cache(self._make_packing)

    def floor_of(self, dtype: WeightsDtype, plan: KvCachePlan) -> KvFloor:
        """The lower bounds of one placing. dtype: of the weights. plan: as if it came as it is needed and all of it
        were kept.
        """
        return self._of(dtype, replace(plan, prefetch=0, prefix_tokens=0))

    def _make(self, dtype: WeightsDtype, cache: KvCachePlan) -> KvFloor:
        # Off the device it takes as much room wherever it is.
        alike = replace(cache, place="device" if cache.place == "device" else "host")
        packing = self._packing(dtype, replace(alike, place="host" if cache.attention == "host" else "device"))
        sent, brought = self._moves(dtype, cache)
        python = self._moves_python(dtype, cache)
        held = self._bytes(dtype, alike)
        return KvFloor(
            **held,
            prefill=LaneTimes(packing[0] + python[0], sent, np.zeros_like(sent), np.zeros_like(sent)),
            decode=LaneTimes(packing[1] + python[1], *brought),
        )

    def _moves_python(self, dtype: WeightsDtype, cache: KvCachePlan) -> tuple[Floats, Floats]:
        """Time of the Python of coming and going, in every step of each block that has a home. That of attention on the
        host is counted with it.
        """
        if cache.place == "device" or cache.attention == "host":
            return np.zeros(len(self._shapes)), np.zeros(len(self._shapes))
        step_ms = keys_and_values_python_s(self._machine.rates, is_stored=cache.place in STORE_LANES) * 1000

        def time(few: Sequence[MicroBatchShape]) -> list[tuple[float, ...]]:
            return [
                (step_ms * sum(count for size, count in costs.homes if size),) for costs in self._costs(dtype, cache, few)
            ]

        (first_ms,) = self._along_batches(time, num_batches=2)
        return first_ms, first_ms * [shape.num_steps - 1 for shape in self._shapes]

    def _costs(
        self, dtype: WeightsDtype, cache: KvCachePlan, shapes: Sequence[MicroBatchShape]
    ) -> list[KvCosts]:
        plan = GenerationPlan(weights=WeightsPlan(dtype=dtype), kv_cache=cache)
        return [KvCosts(self._profile, plan, self._machine, shape=shape) for shape in shapes]

    def _make_bytes(self, dtype: WeightsDtype, cache: KvCachePlan) -> dict[str, Floats]:
        kinds = range(len(self._profile.kv))

        def measure(few: Sequence[MicroBatchShape]) -> list[tuple[float, ...]]:
            return [
                (
                    each.front_bytes + each.slot_bytes,
                    each.slot_bytes,
                    sum(size * count for size, count in each.homes),
                    each.room_bytes,
                    *(sum(each.block_bytes(kind)) for kind in kinds),
                )
                for each in self._costs(dtype, cache, few)
            ]

        # All of it grows in a straight line.
        shared, slots, homes, room, *own = self._along_batches(measure, num_batches=2)
        return {"shared": shared, "slots": slots, "homes": homes, "room": _ROOM_SHARE * room, "own": np.array(own)}

    def _make_moves(
        self, dtype: WeightsDtype, cache: KvCachePlan
    ) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
        """Milliseconds by shape: copies with the prompt, and of all decodes copies and reads of the disk and the remote store."""
        rates, lane = self._machine.rates, STORE_LANES.get(cache.place)

        def time(few: Sequence[MicroBatchShape]) -> list[tuple[float, ...]]:
            found: list[tuple[float, ...]] = []
            for costs in self._costs(dtype, cache, few):
                sent, later = costs.prefill_copied, costs.decode_copied
                come_bytes = later.get("host_to_device", 0)
                found.append(
                    (
                        sent.get("device_to_host", 0) / rates.device_to_host_bytes_per_s * 1000,
                        later.get("device_to_host", 0) / rates.device_to_host_bytes_per_s * 1000
                        + come_bytes / rates.host_to_device_bytes_per_s * 1000,
                        read_ms(come_bytes, rates, place=cache.place) if lane == "disk" else 0.0,
                        read_ms(come_bytes, rates, place=cache.place) if lane == "network" else 0.0,
                    )
                )
            return found

        if cache.place == "device":
            nothing = np.zeros(len(self._shapes))
            return nothing, (nothing, nothing, nothing)
        sent, copied, disk, network = self._along_batches(time, num_batches=2)
        # Of packed ones prices have what is moved on average.
        share = 1.0 if cache.dtype == "same" else _CACHE_SHARE
        return share * sent, (share * copied, share * disk, share * network)

    def _make_packing(self, dtype: WeightsDtype, cache: KvCachePlan) -> tuple[Floats, Floats]:
        """Milliseconds by shape of packing and unpacking, or of attention on the host, for which compute waits: with the prompt,
        and of all decodes.
        """
        if cache.is_plain:
            return np.zeros(len(self._shapes)), np.zeros(len(self._shapes))
        kinds = [(kind, self._profile.block_kinds.count(kind)) for kind in dict.fromkeys(self._profile.block_kinds)]

        def time(few: Sequence[MicroBatchShape]) -> list[tuple[float, ...]]:
            found: list[tuple[float, ...]] = []
            for costs, shape in zip(self._costs(dtype, cache, few), few, strict=True):
                first_ms = sum(count * costs.prefill_task(kind).time.compute_ms for kind, count in kinds)
                later_ms = 0.0
                for step, share in sum_shares(evenly_spaced(1, shape.num_steps - 1, _NUM_CACHE_STEPS)):
                    for kind, count in kinds:
                        time = costs.decode_task(kind, step=step, arrives=(), begins=(), was_begun=True).time
                        later_ms += share * count * (time.compute_ms + time.host_ms)
                found.append((first_ms, later_ms))
            return found

        first, later = self._along_batches(time, num_batches=_NUM_CACHE_BATCHES)
        return _CACHE_SHARE * first, _CACHE_SHARE * later

    def _along_batches(
        self, measure: Callable[[Sequence[MicroBatchShape]], list[tuple[float, ...]]], *, num_batches: int
    ) -> Floats:
        """Spread few measured shapes to all, as [what, shape]: of shapes that differ in their batch alone few are
        measured, and others lie between them.
        """
        shapes = self._shapes
        groups: dict[tuple[int, int], list[int]] = {}
        for index in sorted(range(len(shapes)), key=lambda index: shapes[index].batch_size):
            groups.setdefault((shapes[index].prompt_length, shapes[index].num_steps), []).append(index)
        found: dict[int, Floats] = {}
        for indices in groups.values():
            timed = [indices[place] for place in evenly_spaced(0, len(indices) - 1, num_batches)]
            rows = np.array(measure([shapes[index] for index in timed]))
            sizes = [shapes[index].batch_size for index in timed]
            for index in indices:
                size = shapes[index].batch_size
                found[index] = np.array([np.interp(size, sizes, column) for column in rows.T])
        return np.array([found[index] for index in range(len(shapes))]).T
