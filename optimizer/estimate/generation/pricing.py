"""Prices one batch generation on one machine: what a search over generation plans asks, and what a user sees. Torch-free.

Passes (``one_pass.py``) run through the simulator that prices training steps. Bytes are simulated storage for storage, so
on the CPU device they equal what the runtime's meter counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, LANES, Link
from optimizer.estimate.generation.cut import check_devices, list_stage_costs
from optimizer.estimate.generation.kv.cache import sum_homes
from optimizer.estimate.generation.kv.prefix import find_prefix_conflict
from optimizer.estimate.generation.load import estimate_generation_load
from optimizer.estimate.generation.one_pass import PASS_KINDS, GenerationPass, times_of
from optimizer.estimate.generation.page_cache import is_disk_in_memory, reading_disk
from optimizer.estimate.generation.prediction import DecodePoint, GenerationPrediction
from optimizer.estimate.generation.stages.staged_pass import StagedPass, predict_stages
from optimizer.estimate.kernels.cpu_kernels import unmeasured_bytes
from optimizer.estimate.prediction import MEMORY_MARGIN, TimelinePoint
from optimizer.estimate.step.simulate import Simulation
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.time_interval import time_interval
from optimizer.hardware.calibration import Spread, calibrated_machine, of_generations, read_spread
from optimizer.hardware.machine import Machine
from optimizer.hardware.peers import assumed_link
from optimizer.hardware.share import share_of
from optimizer.plan.generation import PREFILL, GenerationPlan
from optimizer.plan.passes.arrange import PassShape, covers, num_steps_of, passes_of
from optimizer.profile.generation import GenerationProfile
from optimizer.workload import GenerationWorkload

_MAX_PASSES = 5
"""Distinct passes that are priced where there are more, beside those that may have the highest peak."""
_MAX_PREFILL_POINTS = 200
_MAX_DECODE_POINTS = 199


def estimate_generation(
    profile: GenerationProfile,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
    in_detail: bool = True,
) -> GenerationPrediction:
    """Price one generation plan. calibration: what finished runs taught of this machine's time
    (``hardware/calibration.py``). in_detail: False leaves out the timeline and the moment of the peak, of which a
    search makes no use, and has times to within a thousandth.

    Raises InvalidPlan where the plan contradicts itself, the workload or the profile, InvalidWorkload beyond the positions.
    """
    plan.check(workload=workload, max_sequence_length=profile.max_sequence_length)
    calibration = of_generations(calibration)
    conflict = find_prefix_conflict(profile, plan)
    if conflict is not None:
        raise conflict
    passes = passes_of(plan, workload)
    machine = calibrated_machine(machine, calibration)
    check_devices(machine, plan.layout)
    if plan.layout.is_cut:
        return _estimate_stages(
            profile, plan, workload, machine, passes, spread=read_spread(calibration), in_detail=in_detail
        )
    machine = share_of(machine, num_ranks=plan.layout.num_replicas)
    machine = _as_it_reads(machine, profile, plan, [shape for shape, _ in passes])
    priced: dict[int, GenerationPass] = {}
    for index in _choose_passes([shape for shape, _ in passes]):
        like = next(iter(priced.values()), None)
        priced[index] = GenerationPass(
            profile, plan, workload, machine, micro_batches=passes[index][0], like=like, is_rough=not in_detail
        )
    return _predict(priced, passes, spread=read_spread(calibration), in_detail=in_detail)


def _as_it_reads(machine: Machine, profile: GenerationProfile, plan: GenerationPlan, passes: Sequence[PassShape]) -> Machine:
    """The machine with its rate of the disk as the plan reads it, if it does."""
    if "disk" not in (plan.weights.place, plan.kv_cache.place):
        return machine
    return reading_disk(machine, is_in_memory=is_disk_in_memory(profile, plan, machine, passes=passes))


# Several passes.


def _choose_passes(shapes: Sequence[PassShape]) -> list[int]:
    """Choose the passes to price, in order: all where there are few; else every one that may have the highest peak, and
    a spread of others, between which time is a straight line.
    """
    last = len(shapes) - 1
    if last < _MAX_PASSES:
        return list(range(len(shapes)))
    chosen = {last * place // (_MAX_PASSES - 1) for place in range(_MAX_PASSES)}
    highest: list[int] = []
    for index, shape in enumerate(shapes):
        if not any(covers(shapes[other], shape) for other in highest):
            highest.append(index)
    return sorted(chosen.union(highest))


class _Timed(Protocol):
    """A pass that was priced."""

    @property
    def total_ms(self) -> float: ...
    @property
    def num_steps(self) -> int: ...


def _total_ms(priced: Mapping[int, _Timed], passes: Sequence[tuple[PassShape, int]]) -> float:
    """Time of all passes: those that were not priced take for a step what lies between their neighbours."""
    known = sorted(priced)
    step_ms = np.interp(
        np.arange(len(passes)), known, [priced[index].total_ms / priced[index].num_steps for index in known]
    )
    return sum(
        count * (priced[index].total_ms if index in priced else num_steps_of(shape) * float(step_ms[index]))
        for index, (shape, count) in enumerate(passes)
    )


# The prediction.


def _predict(
    priced: Mapping[int, GenerationPass],
    passes: Sequence[tuple[PassShape, int]],
    *,
    spread: Spread | None,
    in_detail: bool,
) -> GenerationPrediction:
    """The prediction of one device, whose figures of a pass are those of the pass with the highest peak, the first of equals."""
    full = max(priced.values(), key=lambda each: each.highest[1].device_peak_bytes)
    workload, machine = full.workload, full.machine
    highest = full.highest[1]
    peak_bytes = highest.device_peak_bytes
    margin_bytes = _margin(peak_bytes, machine)
    unmetered_bytes = max(0, max(each.allocated_bytes for each in priced.values()) - peak_bytes)
    unmeasured = unmeasured_bytes(unmetered_bytes, torch_version=full.profile.torch_version)
    load = estimate_generation_load(full.profile, plan=full.plan, machine=machine)
    load_high_bytes = 0 if load is None else load.device_peak_bytes + _margin(load.device_peak_bytes, machine)
    low, high = time_interval(machine.rates, spread)
    total_s = _total_ms(priced, passes) / 1000
    every = [priced.get(index) or full.other(shape) for index, (shape, _) in enumerate(passes)]
    away_bytes = sum_homes([each.kv_homes for each in every]) + max(each.room_bytes for each in every)
    decoded = full.decode_sum
    decode_ms = float(decoded.ms[0]) / decoded.num_tokens if decoded.num_tokens else 0.0
    prefill = times_of(full.prefill)
    busy, exposed, _ = _split(prefill + decoded.ms)
    return GenerationPrediction(
        device_peak_bytes=peak_bytes,
        device_peak_low_bytes=peak_bytes - margin_bytes,
        device_peak_high_bytes=max(peak_bytes + margin_bytes + unmetered_bytes + unmeasured, load_high_bytes),
        unmetered_bytes=unmetered_bytes,
        device_bytes_by_category=_by_category(highest.peak),
        peak_moment=full.peak_moment if in_detail else "",
        kv_cache_bytes=full.kv_cache_bytes,
        host_peak_bytes=max(each.host_bytes for each in every) + (away_bytes if full.plan.kv_cache.place == "host" else 0),
        disk_peak_bytes=full.disk_bytes + (away_bytes if full.plan.kv_cache.place == "disk" else 0),
        remote_peak_bytes=full.remote_bytes + (away_bytes if full.plan.kv_cache.place == "remote" else 0),
        copied_bytes=_sum_bytes(
            (each.copied_bytes, count) for each, (_, count) in zip(every, passes, strict=True)
        ),
        copied_bytes_per_pass=_sum_bytes([(full.copied_bytes, 1)]),
        copied_bytes_per_token={
            link: num_bytes // decoded.num_tokens for link, num_bytes in full.decode_copied_bytes.items()
        },
        prefill_ms=full.prefill.step_ms,
        prefill_low_ms=full.prefill.step_ms * low,
        prefill_high_ms=full.prefill.step_ms * high,
        decode_ms=decode_ms,
        decode_low_ms=decode_ms * low,
        decode_high_ms=decode_ms * high,
        decode=tuple(
            DecodePoint(
                num_tokens=full.micro_batches[0].prompt_length + index,
                step_ms=step.step_ms,
                device_peak_bytes=step.device_peak_bytes,
            )
            for index, step in full.decoded
        ),
        tokens_per_s=workload.total_new_tokens / total_s,
        total_s=total_s,
        num_replicas=full.plan.layout.num_replicas,
        lane_busy_ms=busy,
        exposed_ms=exposed,
        prefill_by_kind_ms=by_kind(prefill),
        decode_by_kind_ms=by_kind(decoded.ms),
        timeline=tuple(_timeline(full)) if in_detail else (),
        time_source=machine.rates.source,
        num_time_runs=spread.num_runs if spread is not None else 0,
        load=load,
    )


def _margin(peak_bytes: int, machine: Machine) -> int:
    return int(np.ceil(peak_bytes * MEMORY_MARGIN[machine.device.kind]))


# A model that is cut.


def _estimate_stages(
    profile: GenerationProfile,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    machine: Machine,
    passes: Sequence[tuple[PassShape, int]],
    *,
    spread: Spread | None,
    in_detail: bool,
) -> GenerationPrediction:
    """Price all stages; figures of one device are of the fullest one, time is that of all together."""
    costs = list_stage_costs(profile, plan.layout)
    own, link = share_of(machine, num_ranks=plan.layout.num_devices), assumed_link(machine)
    here: dict[str, Any] = {"plan": plan, "workload": workload, "is_rough": not in_detail}
    priced = {
        index: StagedPass(costs, own, link, micro_batches=passes[index][0], **here)
        for index in _choose_passes([shape for shape, _ in passes])
    }
    margin = MEMORY_MARGIN[machine.device.kind]
    stages = predict_stages(
        priced, margin=margin, unmeasured_bytes=unmeasured_bytes(0, torch_version=profile.torch_version)
    )
    peaks = [stage.device_peak_bytes for stage in stages]
    fullest = peaks.index(max(peaks))
    of_fullest = {index: each.stages[fullest] for index, each in priced.items()}
    one = _predict(of_fullest, passes, spread=spread, in_detail=in_detail)
    full = max(priced.values(), key=lambda each: each.stages[fullest].highest[1].device_peak_bytes)
    one, total_s = replace(one, stages=stages), _total_ms(priced, passes) / 1000
    return _of_all_stages(one, full, total_s=total_s, workload=workload, machine=machine, spread=spread)


def _of_all_stages(
    one: GenerationPrediction,
    full: StagedPass,
    *,
    total_s: float,
    workload: GenerationWorkload,
    machine: Machine,
    spread: Spread | None,
) -> GenerationPrediction:
    """With the time of all stages of a pass in place of one stage's."""
    low, high = time_interval(machine.rates, spread)
    prefill, decode = full.kinds_of(full.busiest)
    prefill_ms, later_ms = full.ran.prefill_ms, full.ran.total_ms - full.ran.prefill_ms
    num_later = full.num_steps - 1
    decode_ms = later_ms / num_later if num_later else 0.0
    busy, _, _ = _split(prefill + decode)
    waits_ms = full.ran.total_ms - full.ran.busy_ms[full.busiest]
    slower = decode_ms / one.decode_ms if one.decode_ms else 1.0
    return replace(
        one,
        kv_cache_bytes=sum(stage.kv_cache_bytes for stage in full.stages),
        prefill_ms=prefill_ms,
        prefill_low_ms=prefill_ms * low,
        prefill_high_ms=prefill_ms * high,
        decode_ms=decode_ms,
        decode_low_ms=decode_ms * low,
        decode_high_ms=decode_ms * high,
        decode=tuple(replace(point, step_ms=point.step_ms * slower) for point in one.decode),
        tokens_per_s=workload.total_new_tokens / total_s,
        total_s=total_s,
        lane_busy_ms={**busy, "network": full.ran.handing_ms[full.busiest]},
        exposed_ms={"network": waits_ms},
        prefill_by_kind_ms=_with_waits(prefill, prefill_ms),
        decode_by_kind_ms=_with_waits(decode, later_ms),
    )


def _with_waits(times: NDArray[np.float64], total_ms: float) -> dict[str, float]:
    """Kinds of time of one stage, and as the network's the rest of what all together take."""
    found = by_kind(times)
    return {**found, "network": max(0.0, total_ms - sum(found.values()))} if total_ms else found


def _split(times: NDArray[np.float64]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Split what ``times_of`` returns: lanes busy, lanes waited for, kinds; those that cost nothing left out."""
    names = (LANES, LANES, PASS_KINDS)
    rows = np.split(times[1:], [len(LANES), 2 * len(LANES)])
    busy, exposed, kinds = (
        {name: ms for name, ms in zip(each, row.tolist(), strict=True) if ms > 0}
        for each, row in zip(names, rows, strict=True)
    )
    return busy, exposed, kinds


def by_kind(times: NDArray[np.float64]) -> dict[str, float]:
    """Times of ``times_of`` by kind: each kind of work, and each lane that compute waits for; they sum up to the time."""
    _, exposed, kinds = _split(times)
    return {**kinds, **exposed}


def _sum_bytes(copied: Iterable[tuple[Mapping[Link, int], int]]) -> dict[str, int]:
    """Bytes by link, of each so many times."""
    total: dict[str, int] = {}
    for each, times in copied:
        for link, num_bytes in each.items():
            total[link] = total.get(link, 0) + times * num_bytes
    return total


def _by_category(row: Bytes) -> dict[str, int]:
    return dict(zip(CATEGORIES, row.tolist(), strict=True))


def _timeline(full: GenerationPass) -> Iterator[TimelinePoint]:
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
    indices = np.arange(decoded[0][0], decoded[-1][0] + 1)
    step_ms = np.interp(indices, [index for index, _ in decoded], [step.step_ms for _, step in decoded])
    starts_ms = prefill.step_ms + np.concatenate(([0.0], step_ms.cumsum()[:-1]))
    for index, step in _thinned(decoded, keep=full.highest[1]):
        yield TimelinePoint(
            offset_ms=float(starts_ms[index - indices[0]]), phase="decode", bytes_by_category=_by_category(step.peak)
        )


def _thinned(decoded: list[tuple[int, Simulation]], *, keep: Simulation) -> list[tuple[int, Simulation]]:
    every = -(-len(decoded) // (_MAX_DECODE_POINTS - 2))
    last = len(decoded) - 1
    return [each for index, each in enumerate(decoded) if index % every == 0 or index == last or each[1] is keep]
