"""Prices one batch generation on one machine: what a search over inference plans asks, and what a user sees. Torch-free.

A pass is a prefill and the decode of each further token, laid out block by block as ``runtime/inference.py`` runs them and run
through the simulator that prices training steps. Bytes are simulated storage for storage, so on the CPU device they equal what
the runtime's meter counts.

A decode grows with the cache. Its time and its peak are piecewise linear in the number of tokens: sums and maxima of what is
linear, within the ranges over which the ops are the same. So the ends of a range are priced, and its middle; where that is not
on the line between the ends, both halves are priced the same way. Time is then summed over every token, none of them sampled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.categories import CATEGORIES, Link
from optimizer.estimate.compiled import Arrival, Bytes, CompiledShape, compile_shape
from optimizer.estimate.inference_prediction import DecodePoint, InferencePrediction
from optimizer.estimate.kv_cache import list_kv_bytes
from optimizer.estimate.prediction import LANES, TimelinePoint
from optimizer.estimate.runs import Run, Schedule
from optimizer.estimate.simulate import Resident, Simulation, simulate
from optimizer.estimate.streaming import make_weights_task
from optimizer.estimate.tasks import Task, move_task, single
from optimizer.estimate.training import MEMORY_MARGIN, TIME_SPREAD
from optimizer.estimate.weights import list_forward_moves
from optimizer.hardware.calibration import Spread, calibrated_machine, read_spread
from optimizer.hardware.machine import Machine
from optimizer.packing import STAGING_BYTES
from optimizer.plan.inference import PREFILL, InferencePlan, decode_phase, head_of
from optimizer.profile.inference import EMBEDDING, HEAD, ForwardRegime, InferenceProfile, Phase, block_part
from optimizer.time_kinds import COMPUTE_KINDS
from optimizer.workload import InferenceWorkload

_ID_BYTES = 8
"""Of one token's id."""
_KINDS = (*COMPUTE_KINDS, "allocation")
_MAX_PREFILL_POINTS = 200
_MAX_DECODE_POINTS = 199
_STRAIGHT = 1e-6
"""What a middle may be off the line between its ends, as a share of the time."""


def estimate_inference(
    profile: InferenceProfile,
    *,
    plan: InferencePlan,
    workload: InferenceWorkload,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> InferencePrediction:
    """calibration: what finished runs taught of this machine's time (``hardware/calibration.py``).

    Raises InvalidPlan where the plan contradicts itself, the workload or the profile, InvalidWorkload beyond the positions.
    """
    plan.check(workload=workload, max_sequence_length=profile.max_sequence_length)
    machine = calibrated_machine(machine, calibration)
    full = _Pass(profile, plan, workload, machine, batch_size=plan.batch_size)
    num_full, rest = divmod(workload.num_sequences, plan.batch_size)
    passes = [(full, num_full)]
    if rest:
        passes.append((_Pass(profile, plan, workload, machine, batch_size=rest), 1))
    return _predict(full, passes, spread=read_spread(calibration))


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """Of all decoded tokens of a pass."""

    ms: NDArray[np.float64]
    """As ``_times`` has them."""
    num_tokens: int


class _Pass:
    """One pass of so many sequences."""

    def __init__(
        self,
        profile: InferenceProfile,
        plan: InferencePlan,
        workload: InferenceWorkload,
        machine: Machine,
        *,
        batch_size: int,
    ) -> None:
        self.profile, self.plan, self.workload, self.machine = profile, plan, workload, machine
        self.batch_size = batch_size
        self._rates_key = f"{machine.device.kind} {machine.rates!r}"
        self._kv_bytes = list_kv_bytes(profile, plan, batch_size=batch_size, num_tokens=workload.cache_length)
        self._steps: dict[int, Simulation] = {}
        held = profile.weight_bytes(plan.weights.representation)
        kinds = profile.block_kinds
        by_block = tuple(held.by_block[kind] for kind in kinds)
        self._tensors = tuple(held.tensors[kind] for kind in kinds)
        is_streaming = plan.weights.place != "device"
        self._streamed = by_block if is_streaming else ()
        self._moves = list_forward_moves(self._streamed, prefetch=plan.weights.prefetch)
        staying_bytes = sum(held.staying_by_block[kind] for kind in kinds)
        self.weight_bytes = held.outside + staying_bytes + (0 if is_streaming else sum(by_block))

    # Host and disk.

    @property
    def host_bytes(self) -> int:
        place = self.plan.weights.place
        return sum(self._streamed) if place == "host" else STAGING_BYTES if place == "disk" else 0

    @property
    def disk_bytes(self) -> int:
        return sum(self._streamed) if self.plan.weights.place == "disk" else 0

    @property
    def kv_cache_bytes(self) -> int:
        return sum(self._kv_bytes)

    # Prefill and decode.

    @cached_property
    def prefill(self) -> Simulation:
        """From the first allocation of a pass to its first token."""
        workload = self.workload
        tokens_bytes = _ID_BYTES * self.batch_size * workload.num_new_tokens
        prompts_bytes = _ID_BYTES * self.batch_size * workload.prompt_length
        tasks = (
            move_task(PREFILL, PREFILL, single("temporaries", tokens_bytes + prompts_bytes)),
            *self._forward(self.profile.prefill, PREFILL, workload.prompt_length, makes_cache=True),
            move_task(PREFILL, head_of(PREFILL), -single("temporaries", prompts_bytes)),
        )
        return self._simulate(tasks, single("weights", self.weight_bytes))

    def decode(self, num_tokens: int) -> Simulation:
        """Of the token that sees so many, itself included."""
        if num_tokens not in self._steps:
            phase = decode_phase(num_tokens - self.workload.prompt_length + 1)
            resident = single("weights", self.weight_bytes) + single("kv_cache", self.kv_cache_bytes)
            resident += single("temporaries", _ID_BYTES * self.batch_size * self.workload.num_new_tokens)
            tasks = tuple(self._forward(self.profile.decode, phase, num_tokens, makes_cache=False))
            self._steps[num_tokens] = self._simulate(tasks, resident)
        return self._steps[num_tokens]

    @cached_property
    def decode_sum(self) -> _Sum:
        low, high = self.workload.prompt_length + 1, self.workload.cache_length
        total = np.zeros(1 + 2 * len(LANES) + len(_KINDS))
        while low <= high:
            regime = self.profile.decode.regime(self.plan.weights.representation, (self.batch_size, low))
            end = min(high, regime.sequence_high)
            total += _sum_straight(lambda length: _times(self.decode(length)), low, end)
            low = end + 1
        return _Sum(ms=total, num_tokens=self.workload.num_new_tokens - 1)

    @property
    def decoded(self) -> list[tuple[int, Simulation]]:
        """What was priced for the sum, in order."""
        assert self.decode_sum is not None
        return sorted(self._steps.items())

    @property
    def total_ms(self) -> float:
        return self.prefill.step_ms + float(self.decode_sum.ms[0])

    @property
    def step_copies(self) -> dict[Link, int]:
        """Of a prefill, and of every decode as well: each brings all streamed weights once."""
        return {link: num_bytes for link, num_bytes in self.prefill.copied_bytes.items() if num_bytes}

    def _simulate(self, tasks: tuple[Task, ...], resident: Bytes) -> Simulation:
        schedule = Schedule(
            first=Run(tasks), later=Run(()), num_later=0, update=Run(()), carried=np.zeros_like(resident)
        )
        return simulate(
            schedule,
            resident=Resident(device=resident, host=self.host_bytes, disk=self.disk_bytes),
            device_kind=self.machine.device.kind,
            fresh_bytes_per_s=self.machine.rates.fresh_bytes_per_s,
        )

    def _forward(self, traced: Phase, phase: str, length: int, *, makes_cache: bool) -> Iterator[Task]:
        """Embedding, blocks and head; streamed weights before their blocks."""
        compiled = compile_shape(traced, self.plan.weights, (self.batch_size, length))
        regime = compiled.regime
        assert isinstance(regime, ForwardRegime)
        yield self._part(compiled, phase, EMBEDDING, name=phase)
        for block, template in enumerate(regime.block_templates):
            if self._streamed:
                yield self._weights_task(compiled, phase, block)
            kv_bytes = self._kv_bytes[block] if makes_cache else 0
            arrivals: tuple[Arrival, ...] = ((regime.kv_after[template], "kv_cache", kv_bytes),) if kv_bytes else ()
            yield self._part(compiled, phase, block_part(template), block=block, arrivals=arrivals)
        if self._streamed:
            # The last that are there go as the backbone ends, still told of as the last block.
            yield move_task(phase, phase, -single("weights", self._streamed[-1]))
        yield self._part(compiled, phase, HEAD, name=head_of(phase))

    def _part(
        self,
        compiled: CompiledShape,
        phase: str,
        part: str,
        *,
        block: int = -1,
        name: str = "",
        arrivals: tuple[Arrival, ...] = (),
    ) -> Task:
        return Task(
            phase=phase,
            block=block,
            name=name,
            bytes=compiled.part_bytes(part, arrivals=arrivals),
            time=compiled.part_time(part, self.machine, rates_key=self._rates_key),
            moves=partial(compiled.part_moves, part, arrivals=arrivals),
        )

    def _weights_task(self, compiled: CompiledShape, phase: str, block: int) -> Task:
        gone_bytes, coming = self._moves[block]
        return compiled.keep(
            ("weights", phase, block, self.plan.weights, self._rates_key),
            lambda: make_weights_task(
                phase,
                block,
                by_block=self._streamed,
                tensors=self._tensors,
                gone_bytes=gone_bytes,
                coming=coming,
                plan=self.plan.weights,
                rates=self.machine.rates,
            ),
        )


def _times(step: Simulation) -> NDArray[np.float64]:
    """The step's time, each lane's busy and each lane's exposed time, each kind's time."""
    lanes = [times.get(lane, 0.0) for times in (step.busy_ms, step.exposed_ms) for lane in LANES]
    return np.array([step.step_ms, *lanes, *(step.kinds_ms.get(kind, 0.0) for kind in _KINDS)])


def _sum_straight(price: Callable[[int], NDArray[np.float64]], low: int, high: int) -> NDArray[np.float64]:
    """The sum of ``price`` over every whole number from ``low`` to ``high``, which is piecewise linear."""
    first, last = price(low), price(high)
    count = high - low + 1
    if count <= 2:
        return first if count == 1 else first + last
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    expected = first + share * (last - first)
    if np.abs(price(middle) - expected).max() <= _STRAIGHT * first[0]:
        return count * (first + last) / 2
    return _sum_straight(price, low, middle) + _sum_straight(price, middle + 1, high)


# The prediction.


def _predict(full: _Pass, passes: list[tuple[_Pass, int]], *, spread: Spread | None) -> InferencePrediction:
    workload, machine = full.workload, full.machine
    highest = _highest(full)
    peak_bytes = int(highest.peak.sum())
    margin_bytes = int(np.ceil(peak_bytes * MEMORY_MARGIN[machine.device.kind]))
    width = spread.width if spread is not None else TIME_SPREAD[machine.rates.source]
    total_s = sum(count * each.total_ms for each, count in passes) / 1000
    num_forward = workload.num_new_tokens
    num_passes = sum(count for _, count in passes)
    decoded = full.decode_sum
    decode_ms = float(decoded.ms[0]) / decoded.num_tokens if decoded.num_tokens else 0.0
    prefill = _times(full.prefill)
    busy, exposed, _ = _split(prefill + decoded.ms)
    return InferencePrediction(
        device_peak_bytes=peak_bytes,
        device_peak_low_bytes=peak_bytes - margin_bytes,
        device_peak_high_bytes=peak_bytes + margin_bytes,
        device_bytes_by_category=_by_category(highest.peak),
        peak_moment=highest.peak_task.describe(full.profile.num_blocks),
        kv_cache_bytes=full.kv_cache_bytes,
        host_peak_bytes=full.host_bytes,
        disk_peak_bytes=full.disk_bytes,
        copied_bytes=_times_bytes(full.step_copies, num_forward * num_passes),
        copied_bytes_per_pass=_times_bytes(full.step_copies, num_forward),
        copied_bytes_per_token=_times_bytes(full.step_copies, 1 if decoded.num_tokens else 0),
        prefill_ms=full.prefill.step_ms,
        prefill_low_ms=full.prefill.step_ms * (1 - width),
        prefill_high_ms=full.prefill.step_ms * (1 + width),
        decode_ms=decode_ms,
        decode_low_ms=decode_ms * (1 - width),
        decode_high_ms=decode_ms * (1 + width),
        decode=tuple(
            DecodePoint(num_tokens=length, step_ms=step.step_ms, device_peak_bytes=int(step.peak.sum()))
            for length, step in full.decoded
        ),
        tokens_per_s=workload.num_sequences * workload.num_new_tokens / total_s,
        total_s=total_s,
        lane_busy_ms=busy,
        exposed_ms=exposed,
        prefill_by_kind_ms=_by_kind(prefill),
        decode_by_kind_ms=_by_kind(decoded.ms),
        timeline=tuple(_timeline(full)),
        time_source=machine.rates.source,
        num_time_runs=spread.num_runs if spread is not None else 0,
    )


def _split(times: NDArray[np.float64]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Of what ``_times`` gives: lanes busy, lanes waited for, kinds; those that cost nothing left out."""
    names = (LANES, LANES, _KINDS)
    rows = np.split(times[1:], [len(LANES), 2 * len(LANES)])
    busy, exposed, kinds = (
        {name: ms for name, ms in zip(each, row.tolist(), strict=True) if ms > 0}
        for each, row in zip(names, rows, strict=True)
    )
    return busy, exposed, kinds


def _by_kind(times: NDArray[np.float64]) -> dict[str, float]:
    _, exposed, kinds = _split(times)
    return {**kinds, **exposed}


def _highest(full: _Pass) -> Simulation:
    """The prefill or the decode with the highest peak, the earliest of equals.

    A decode's peak is the maximum of what is linear in the cache's length: it lies at an end of a range, and ends are priced.
    """
    return max([full.prefill, *(step for _, step in full.decoded)], key=lambda step: int(step.peak.sum()))


def _times_bytes(copied: Mapping[Link, int], times: int) -> dict[str, int]:
    return {link: times * num_bytes for link, num_bytes in copied.items() if times}


def _by_category(row: Bytes) -> dict[str, int]:
    return dict(zip(CATEGORIES, row.tolist(), strict=True))


def _timeline(full: _Pass) -> Iterator[TimelinePoint]:
    """The highest point of each stretch of the prefill, then of each token decoded that was priced, or of a share of them."""
    prefill = full.prefill
    row = prefill.rows[0]
    yield TimelinePoint(offset_ms=0.0, phase=PREFILL, bytes_by_category=_by_category(prefill.resident))
    edges = np.unique(np.linspace(0, len(row.tasks), _MAX_PREFILL_POINTS).astype(int))
    for start, end in pairwise(edges):
        index = int(start + row.levels[start:end].sum(axis=1).argmax())
        yield TimelinePoint(
            offset_ms=row.starts_ms[index], phase=PREFILL, bytes_by_category=_by_category(row.levels[index])
        )
    decoded = full.decoded
    if not decoded:
        return
    lengths = np.arange(decoded[0][0], decoded[-1][0] + 1)
    step_ms = np.interp(lengths, [length for length, _ in decoded], [step.step_ms for _, step in decoded])
    starts_ms = prefill.step_ms + np.concatenate(([0.0], step_ms.cumsum()[:-1]))
    for length, step in _thinned(decoded, keep=_highest(full)):
        yield TimelinePoint(
            offset_ms=float(starts_ms[length - lengths[0]]), phase="decode", bytes_by_category=_by_category(step.peak)
        )


def _thinned(decoded: list[tuple[int, Simulation]], *, keep: Simulation) -> list[tuple[int, Simulation]]:
    every = -(-len(decoded) // (_MAX_DECODE_POINTS - 2))
    last = len(decoded) - 1
    return [each for index, each in enumerate(decoded) if index % every == 0 or index == last or each[1] is keep]
