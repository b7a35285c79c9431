"""The least that generations can take, of many batches at once: bounds for a search, which then prices few plans. Torch-free.

Left out of what a price has: compute and copies that wait for each other, memory that is touched anew, and what kernels hold
beside what the meter sees. So no plan is priced faster or smaller than it is here, but for the roughness of prices.

All batches of one representation go through the profile's polynomials together (``phase_grid.py``). What depends on places is
added for all batches, and all numbers of micro-batches to a pass, of an arrangement together.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import TIERS
from optimizer.estimate.bounds.evenly_spaced import evenly_spaced, sum_shares
from optimizer.estimate.bounds.kv_floor import KvFloor, KvFloors, LaneTimes
from optimizer.estimate.bounds.kv_prefix_floor import PrefixFloors, list_prefix_lengths
from optimizer.estimate.bounds.lower_bounds import Floors
from optimizer.estimate.bounds.phase_grid import ManyShapes
from optimizer.estimate.categories.stores import STORE_LANES, read_ms
from optimizer.estimate.generation.cold_weights import are_weights_cold, reading_weights
from optimizer.estimate.generation.page_cache import is_disk_in_memory, reading_disk
from optimizer.estimate.generation.sampling import draw_bytes, draw_time
from optimizer.estimate.generation.splits import Floats, Splits, Way
from optimizer.estimate.prediction import MEMORY_MARGIN
from optimizer.estimate.step.streaming import streaming_python_ms
from optimizer.formats.transfer_sizes import STAGING_BYTES
from optimizer.hardware.machine import Machine
from optimizer.hardware.rates import Rates
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import AttentionPlace
from optimizer.plan.passes.arrange import MicroBatchShape
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile, Phase
from optimizer.profile.sizes import Shape
from optimizer.workload import GenerationWorkload

_NUM_LENGTHS: Final = 9
"""Lengths of the cache at which a range of decodes is timed: between them time is nearly a straight line."""


class GenerationFloors:
    """Lower bounds of all plans of a workload on a machine."""

    def __init__(
        self,
        profile: GenerationProfile,
        workload: GenerationWorkload,
        machine: Machine,
        *,
        sizes: Sequence[int],
        micro_batches: Sequence[int],
        prefix_tokens: int | None = None,
    ) -> None:
        """sizes, micro_batches: those that the floors are for, ascending. prefix_tokens: of a plan that makes keys and
        values again, not of any length up to its own but of this one.
        """
        self._held_prefix = prefix_tokens
        self._profile, self._workload, self._machine = profile, workload, machine
        self._sizes, self._micro_batches = tuple(sizes), tuple(micro_batches)
        self._split_of = cache(self._make_split)
        self._prefill = cache(self._make_prefill)
        self._decode = cache(self._make_decode)
        self._kept = cache(self._make_kept)
        self._prefix = cache(self._make_prefix)

    def floors_of(self, plan: GenerationPlan) -> Floors:
        """Lower bounds of a plan. plan: its batch size and number of micro-batches are not looked at."""
        weights = WeightsPlan(dtype=plan.weights.dtype, frozen=plan.weights.frozen)
        way = Way(plan.prefill_tokens, plan.drops_ended)
        are_cold = are_weights_cold(self._profile, plan.weights, self._machine)
        split = self._split_of(way)
        prefill = self._prefill(weights, way, are_cold)
        model = _Model(prefill, self._decode(weights, way, plan.kv_cache.attention, are_cold))
        is_in_memory = is_disk_in_memory(self._profile, plan, self._machine)
        kept = self._kept(way, is_in_memory).floor_of(weights.dtype, plan.kv_cache)
        streamed = self._streamed(plan, reading_disk(self._machine, is_in_memory=is_in_memory).rates)
        at_first, later = (
            LaneTimes(
                split.counts @ (phase.compute_ms + kv.compute_ms) + runs * streamed.compute_ms,
                split.counts @ kv.copy_ms + runs * streamed.copy_ms,
                split.counts @ kv.disk_ms + runs * streamed.disk_ms,
                split.counts @ kv.network_ms,
            )
            for phase, kv, runs in (
                (model.prefill, kept.prefill, split.num_passes),
                (model.decode, kept.decode, split.num_steps - split.num_passes),
            )
        )
        total_s = (self._together(*at_first) + self._together(*later)) / 1000
        first_ms = self._first_token_ms(split, model, kept, streamed)
        device_bytes = self._device_bytes(plan, split, model, kept)
        elsewhere = self._elsewhere(plan, split, kept)
        saved_s = split.saved_between(model.prefill.compute_ms + model.decode.compute_ms) / 1000
        floors = Floors(total_s, total_s - saved_s, first_ms, device_bytes, *elsewhere)
        if not plan.kv_cache.prefix_tokens:
            return floors
        return self._with_prefix(plan, floors, split, prefill=at_first, decode=later)

    def _with_prefix(
        self, plan: GenerationPlan, floors: Floors, split: Splits, *, prefill: LaneTimes, decode: LaneTimes
    ) -> Floors:
        """The bounds with a prefix of the best length. floors, prefill, decode: as if all keys and values were kept."""
        cache, weights = plan.kv_cache, WeightsPlan(dtype=plan.weights.dtype, frozen=plan.weights.frozen)
        are_cold = are_weights_cold(self._profile, plan.weights, self._machine)
        way = Way(plan.prefill_tokens, plan.drops_ended)
        is_in_memory = is_disk_in_memory(self._profile, plan, self._machine)
        prefix = self._prefix(weights, way, cache.prefix_tokens, are_cold, is_in_memory)
        best = prefix.best(prefill, decode, without_s=floors.total_s, place=cache.place, together=self._together)
        return floors._replace(
            total_s=best.total_s,
            between_s=best.total_s - (floors.total_s - floors.between_s) - best.saved_between_s,
            prefill_ms=floors.prefill_ms - best.sent_less_ms,
            host_bytes=floors.host_bytes - (best.home_less_bytes if cache.place == "host" else 0),
            disk_bytes=floors.disk_bytes - (best.home_less_bytes if cache.place == "disk" else 0),
            remote_bytes=floors.remote_bytes - (best.home_less_bytes if cache.place == "remote" else 0),
            prefix_tokens=best.num_tokens,
        )

    def _make_prefix(
        self, weights: WeightsPlan, way: Way, longest: int, are_cold: bool, is_in_memory: bool  # noqa: FBT001
    ) -> PrefixFloors:
        is_held = self._held_prefix is not None
        lengths = (longest,) if is_held else (0, *list_prefix_lengths(longest))
        machine = reading_disk(reading_weights(self._machine, are_cold=are_cold), is_in_memory=is_in_memory)
        return PrefixFloors(self._profile, weights, machine, self._split_of(way), lengths=lengths)

    # Time.

    def _first_token_ms(self, split: Splits, model: "_Model", kept: KvFloor, streamed: "_Lanes") -> Floats:
        """Time of the first pass; where prompts differ, of the micro-batch that is through first."""
        lanes = kept.prefill._replace(compute_ms=model.prefill.compute_ms + kept.prefill.compute_ms)
        if split.is_even:
            return self._together(*(split.count_first(lane) + step for lane, step in zip(lanes, streamed, strict=True)))
        alone = self._together(*(lane + step for lane, step in zip(lanes, streamed, strict=True)))
        soonest: Floats = np.where(split.counts > 0, alone, np.inf).min(axis=-1)
        return soonest

    def _together(self, compute_ms: Floats, copy_ms: Floats, disk_ms: Floats, network_ms: Floats) -> Floats:
        """The CPU device does one after the other; on CUDA lanes work beside each other."""
        if self._machine.device.kind == "cpu":
            return compute_ms + copy_ms + disk_ms + network_ms
        return np.maximum(np.maximum(compute_ms, copy_ms), np.maximum(disk_ms, network_ms))

    def _streamed(self, plan: GenerationPlan, rates: Rates) -> "_Lanes":
        """Time that weights take to come in one step."""
        if plan.weights.place == "device":
            return _Lanes(0.0, 0.0, 0.0, 0.0)
        held = self._profile.weight_bytes(plan.weights.representation)
        tensors = [size for kind in self._profile.block_kinds for size in held.tensors[kind]]
        stored_ms = read_ms(sum(tensors), rates, place=plan.weights.place)
        return _Lanes(
            streaming_python_ms(tensors, plan.weights, rates, generates=True),
            sum(tensors) / rates.host_to_device_bytes_per_s * 1000,
            stored_ms if plan.weights.place == "disk" else 0.0,
            stored_ms if plan.weights.place == "remote" else 0.0,
        )

    # What a batch is split into, what its micro-batches take, and what their keys and values do.

    def _make_split(self, way: Way) -> Splits:
        return Splits.count(self._workload, self._sizes, self._micro_batches, way)

    def _make_kept(self, way: Way, is_in_memory: bool) -> KvFloors:  # noqa: FBT001
        machine = reading_disk(self._machine, is_in_memory=is_in_memory)
        return KvFloors(self._profile, machine, self._split_of(way).shapes)

    def _make_prefill(self, weights: WeightsPlan, way: Way, are_cold: bool) -> "_Phase":  # noqa: FBT001
        machine = reading_weights(self._machine, are_cold=are_cold)
        shapes = self._split_of(way).shapes
        prefill = ManyShapes(self._profile.prefill, weights, [(s.batch_size, s.prompt_length) for s in shapes], machine)
        rise = self._with_draws(prefill.rise, shapes, weights)
        return _Phase(prefill.compute_ms + self._drawn_ms(shapes), prefill.before, rise)

    def _make_decode(
        self, weights: WeightsPlan, way: Way, attention: AttentionPlace, are_cold: bool  # noqa: FBT001
    ) -> "_Phase":
        shapes, phase = self._split_of(way).shapes, self._profile.decode_with(attention)
        # What is left on the device of attention on the host is the same at any length.
        num_lengths = _NUM_LENGTHS if attention == "device" else 2
        lengths = [_list_lengths(phase, weights, shape, num_lengths=num_lengths) for shape in shapes]
        flat = [place for each in lengths for place, _ in each]
        decode_ms = np.zeros(len(shapes))
        if not flat:
            nothing = np.zeros((self._profile.num_blocks + 1, len(shapes)), dtype=np.int64)
            return _Phase(decode_ms, nothing, nothing)
        decode = ManyShapes(phase, weights, flat, reading_weights(self._machine, are_cold=are_cold))
        drawn_ms = self._drawn_ms(shapes)
        last = np.zeros(len(shapes), dtype=np.int64)
        place = 0
        for index, (shape, each) in enumerate(zip(shapes, lengths, strict=True)):
            if each:
                times = decode.compute_ms[place : place + len(each)]
                decode_ms[index] = times @ np.array([share for _, share in each])
                place += len(each)
                last[index] = place - 1
                fewest = shape.num_running(shape.num_steps - 1) / shape.batch_size
                decode_ms[index] += (shape.num_steps - 1) * drawn_ms[index] * fewest
        return _Phase(decode_ms, decode.before[:, last], self._with_draws(decode.rise[:, last], shapes, weights))

    def _drawn_ms(self, shapes: Sequence[MicroBatchShape]) -> Floats:
        """Time of drawing tokens in one step."""
        if not self._workload.draws:
            return np.zeros(len(shapes))
        vocab_size, rates = self._profile.vocab_size, self._machine.rates
        return np.array([draw_time(vocab_size, num_sequences=s.batch_size, rates=rates).compute_ms for s in shapes])

    def _with_draws(
        self, rise: NDArray[np.int64], shapes: Sequence[MicroBatchShape], weights: WeightsPlan
    ) -> NDArray[np.int64]:
        if not self._workload.draws:
            return rise
        profile = self._profile
        row_bytes = (profile.hidden_size + profile.vocab_size) * weights.bytes_per_element
        drawn = [shape.batch_size * row_bytes + draw_bytes(profile.vocab_size) for shape in shapes]
        return np.concatenate([rise[:-1], np.maximum(rise[-1:], drawn)])

    # Bytes.

    def _device_bytes(self, plan: GenerationPlan, split: Splits, model: "_Model", kept: KvFloor) -> Floats:
        """Device bytes at the blocks where a step mostly is highest: the last with all weights ahead, the last of all,
        and the head.
        """
        profile = self._profile
        held = profile.weight_bytes(plan.weights.representation)
        kinds, num_blocks = profile.block_kinds, profile.num_blocks
        by_block = [held.by_block[kind] for kind in kinds]
        is_streaming = plan.weights.place != "device"
        weights_bytes = held.outside + sum(held.staying_by_block[kind] for kind in kinds)
        weights_bytes += 0 if is_streaming else sum(by_block)
        ahead = plan.weights.prefetch
        places = {max(0, num_blocks - 1 - ahead), num_blocks - 1, num_blocks}
        ids = split.count_first(split.ids)
        shared = split.of_first(kept.shared)
        peak = np.zeros_like(split.num_passes)
        for place in places:
            coming = sum(by_block[place : place + ahead + 1]) if is_streaming else 0
            counts = [kinds[:place].count(kind) for kind in range(len(profile.kv))]
            before = split.count_first(model.prefill.before[place] + counts @ kept.own)
            level = before + split.of_first(model.prefill.rise[place]) + ids + (shared if place else 0)
            peak = np.maximum(peak, weights_bytes + coming + level)
            if split.is_even and any(shape.num_steps > 1 for shape in split.shapes):
                all_counts = [kinds.count(kind) for kind in range(len(profile.kv))]
                later = split.count_first(model.decode.before[place] + all_counts @ kept.own)
                slots = plan.kv_cache.num_ahead * split.of_first(kept.slots)
                level = later + split.of_first(model.decode.rise[place]) + split.count_first(split.new_ids) + shared + slots
                peak = np.maximum(peak, weights_bytes + coming + level)
        return peak + np.ceil(peak * MEMORY_MARGIN[self._machine.device.kind])

    def _elsewhere(self, plan: GenerationPlan, split: Splits, kept: KvFloor) -> tuple[Floats, Floats, Floats]:
        """Bytes on the host, on the disk and in the remote store."""
        found = {place: np.zeros_like(split.num_passes) for place in TIERS}
        held = self._profile.weight_bytes(plan.weights.representation)
        found[plan.weights.place] += sum(held.by_block[kind] for kind in self._profile.block_kinds)
        homes_bytes = split.count_first(kept.homes)
        found[plan.kv_cache.place] += homes_bytes
        found["host"] += split.of_first(kept.room)
        if plan.weights.place in STORE_LANES:
            found["host"] += STAGING_BYTES
        elif plan.kv_cache.place in STORE_LANES:
            found["host"] += np.where(homes_bytes > 0, STAGING_BYTES, 0)
        return found["host"], found["disk"], found["remote"]


class _Lanes(NamedTuple):
    """Milliseconds."""

    compute_ms: float
    copy_ms: float
    disk_ms: float
    network_ms: float


class _Phase(NamedTuple):
    """One phase as ``ManyShapes`` has it, with decodes all in time, and the last in bytes."""

    compute_ms: Floats
    before: NDArray[np.int64]
    rise: NDArray[np.int64]


class _Model(NamedTuple):
    prefill: _Phase
    decode: _Phase


def _list_lengths(
    decode: Phase, weights: WeightsPlan, shape: MicroBatchShape, *, num_lengths: int
) -> list[tuple[Shape, float]]:
    """Sequences and lengths of the cache at which its decodes are timed, and for how many steps each counts."""
    found: list[tuple[Shape, float]] = []
    step = 1
    while step < shape.num_steps:
        number, length = shape.num_running(step), shape.prompt_length + step
        regime = decode.regime(weights.representation, (number, length))
        high = min(shape.prompt_length + shape.last_step_alike(step), regime.sequence_high)
        found += [((number, place), share) for place, share in sum_shares(evenly_spaced(length, high, num_lengths))]
        step = high - shape.prompt_length + 1
    return found
