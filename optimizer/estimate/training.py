"""Prices one training plan on one machine: the callable that search asks hundreds of times. Torch-free.

Bytes are simulated storage for storage, so on the CPU device they equal what the runtime's meter counts. Time is a roofline per
op at the machine's attained rates; finished runs correct it through ``calibration``. What only a person wants to see of a
prediction is worked out when it is first read.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.weights import list_streamed_bytes
from optimizer.estimate.compiling import estimate_compile_s, widen_memory, widen_time
from optimizer.estimate.kernels.cpu_kernels import unmeasured_bytes
from optimizer.estimate.outer_rounds import Round, spread_over_round
from optimizer.estimate.prediction import MEMORY_MARGIN, Prediction, TimelinePoint
from optimizer.estimate.step.ranks import list_machines
from optimizer.estimate.step.setting import LaidOut, check_plan, highest_of, lay_out_ranks, lay_out_stages
from optimizer.estimate.step.simulate import Simulation, simulate
from optimizer.estimate.step.stages.peaks import StagePeaks
from optimizer.estimate.step.unmetered import estimate_allocated_peak
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.time_interval import time_interval
from optimizer.estimate.uneven import combine_ranks, combine_stages, list_cases
from optimizer.hardware.calibration import Spread, calibrated_machine, read_spread
from optimizer.hardware.machine import Machine
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.profile.time_kinds import TimeKind
from optimizer.workload import TrainingWorkload

MAX_TIMELINE_POINTS = 400
_ALWAYS = ("compute", "copy_out", "copy_in")
"""Lanes that a prediction lists even where they are idle."""


def estimate_training(
    profile: Profile,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> Prediction:
    """Price one training plan. calibration: what finished runs taught of this machine's time
    (``hardware/calibration.py``).

    Raises InvalidPlan where the plan does not match the model or workload, InvalidWorkload beyond the position table.
    """
    if plan.layout.ranks and plan.layout.is_cut:
        found = predict_stages(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)
        return combine_stages(found, list_cases(plan, workload, machine))
    if plan.layout.ranks:
        return _estimate_uneven(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)
    profile, machine = profile.of_layout(plan.layout), calibrated_machine(machine, calibration)
    ranks = lay_out_ranks(profile, plan=plan, workload=workload, machine=machine)
    here: dict[str, Any] = {"plan": plan, "workload": workload, "machine": machine, "spread": read_spread(calibration)}
    return _predict_rank(highest_of(ranks), profile, ranks=ranks, **here)


def predict_stages(
    profile: Profile,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> tuple[Prediction, ...]:
    """The prediction of each stage of a model that is cut over unequal devices, with what it waits for the others. Raises as
    ``estimate_training`` does.
    """
    machine, spread = calibrated_machine(machine, calibration), read_spread(calibration)
    stages = lay_out_stages(profile, plan=plan, workload=workload, machine=machine)
    here: dict[str, Any] = {"plan": plan, "workload": workload, "ranks": stages, "spread": spread}
    # Each stage has waited for the others, so no other decides how long it takes.
    return tuple(
        _predict_rank(laid, profile, waits_for=laid, machine=each, **here)
        for laid, each in zip(stages, list_machines(machine, plan.layout), strict=True)
    )


def _estimate_uneven(
    profile: Profile,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    calibration: Mapping[str, Any] | None,
) -> Prediction:
    """Price ranks that differ; those that do the same are priced once."""
    check_plan(profile, plan, workload)
    machine = calibrated_machine(machine, calibration)
    cases = list_cases(plan, workload, machine)
    priced: dict[RankShare, tuple[Prediction, dict[int, Simulation]]] = {}
    rounds: dict[RankShare, Round | None] = {}
    for case in cases:
        share = plan.layout.share_of(case.rank)
        if share not in priced:
            laid = lay_out_ranks(profile, plan=case.plan, workload=case.workload, machine=case.machine)
            steps = {each.rank: simulate_step(each) for each in laid}
            rounds[share] = simulate_round(laid[0], steps[laid[0].rank])
            alike = estimate_training(profile, plan=case.plan, workload=case.workload, machine=case.machine)
            priced[share] = alike, steps
    found = [priced[plan.layout.share_of(case.rank)] for case in cases]
    return combine_ranks(
        plan,
        workload=workload,
        cases=cases,
        found=[prediction for prediction, _ in found],
        simulations=[
            steps.get(plan.layout.place_of(case.rank), steps[min(steps)]) for case, (_, steps) in zip(cases, found, strict=True)
        ],
        rounds=[each for case in cases if (each := rounds[plan.layout.share_of(case.rank)]) is not None],
    )


def _predict_rank(
    laid: LaidOut,
    profile: Profile,
    *,
    ranks: Sequence[LaidOut],
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    spread: Spread | None,
    waits_for: LaidOut | None = None,
) -> Prediction:
    """The prediction of one rank's step. waits_for: the rank that decides how long the step is; unless given, the one that
    updates most and so has most state elsewhere, the first.
    """
    simulation = simulate_step(laid)
    peaks = laid.setting.stages.estimate(
        laid.schedule, laid.resident, simulation, choices=plan.activations.per_block
    )
    slowest = [ranks[0]] if waits_for is None else [waits_for]
    if plan.layout.is_cut and waits_for is None:
        # Each has waited for the others, but their own copies and updates differ.
        slowest = [*ranks]
    found = _predict(
        simulation,
        peaks,
        profile,
        others=[simulation if laid is each else simulate_step(each) for each in slowest],
        ranks=ranks,
        plan=plan,
        workload=workload,
        machine=machine,
        base_bytes=_base_bytes(profile, plan=plan, workload=workload),
        spread=spread,
        allocated_bytes=_allocated_bytes(laid, plan),
    )
    alone = simulate_round(laid, simulation)
    if alone is None or laid.setting.outer is None:
        return found
    factors = machine.rates.time_factors
    return spread_over_round(
        found,
        alone,
        sent_bytes=laid.setting.outer.sent_bytes,
        workload=workload,
        alone=_details(simulation, peaks, factors),
        synchronizing=_details(alone.synchronizing, peaks, factors),
    )


def simulate_round(laid: LaidOut, alone: Simulation) -> Round | None:
    """The round of a plan that is laid out; None where ranks share every step. alone: its step."""
    if laid.synchronizing is None or laid.setting.outer is None:
        return None
    last = simulate_step(replace(laid, schedule=laid.synchronizing))
    return Round(sync_every=laid.setting.outer.sync_every, alone=alone, synchronizing=last)


def simulate_step(laid: LaidOut) -> Simulation:
    """A steady step of a plan that is laid out; of ranks that take steps alone one of these."""
    return simulate(
        laid.schedule,
        resident=laid.resident,
        device_kind=laid.machine.device.kind,
        fresh_bytes_per_s=laid.machine.rates.fresh_bytes_per_s,
    )


def _allocated_bytes(laid: LaidOut, plan: Plan) -> int:
    """Most bytes that torch has; 0 on CUDA, where torch counts nothing that is not simulated but what
    ``card/on_cuda.py`` adds.
    """
    machine = laid.machine
    if machine.device.kind != "cpu":
        return 0
    processor = machine.processor_for(in_fp16=plan.weights.computes_in_fp16)
    return estimate_allocated_peak(laid.schedule, laid.resident.device, processor=processor)


def _predict(
    simulation: Simulation,
    peaks: StagePeaks,
    profile: Profile,
    *,
    others: Sequence[Simulation],
    ranks: Sequence[LaidOut],
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    base_bytes: int,
    spread: Spread | None,
    allocated_bytes: int,
) -> Prediction:
    """The prediction of a simulated step. allocated_bytes: what torch itself has at most. A stage that is higher than
    the steady step raises the interval's upper end by as much. ranks: the steps of all of them, or of one where all are alike;
    others: of the rank that updates most, which may be another than the one with the highest peak; of stages all.
    """
    all_steps = (simulation, *others)
    step_ms = max(each.step_ms for each in all_steps)
    peak_bytes = simulation.device_peak_bytes
    margin_bytes = math.ceil(
        peak_bytes * (MEMORY_MARGIN[machine.device.kind] + widen_memory(plan, device_kind=machine.device.kind))
    )
    low, high = widen_time(plan, time_interval(machine.rates, spread))
    num_devices = plan.layout.num_devices
    once_s = estimate_compile_s(profile, plan, device_kind=machine.device.kind)
    exposed_ms = simulation.exposed_ms
    no_copies = ("host",) if num_devices == 1 else ("host", "network")
    prediction = Prediction(
        device_peak_bytes=peak_bytes,
        device_peak_low_bytes=peak_bytes - margin_bytes,
        device_peak_high_bytes=margin_bytes
        + max(peak_bytes, peaks.highest_bytes, allocated_bytes, peaks.allocated_bytes)
        + unmeasured_bytes(max(0, allocated_bytes - peak_bytes), torch_version=profile.torch_version),
        unmetered_bytes=max(0, allocated_bytes - peak_bytes),
        host_peak_bytes=max(each.host_peak_bytes for each in all_steps),
        disk_peak_bytes=max(each.disk_peak_bytes for each in all_steps),
        remote_peak_bytes=max(each.remote_peak_bytes for each in all_steps),
        copied_bytes={link: num_bytes for link, num_bytes in simulation.copied_bytes.items() if num_bytes},
        peak_moment=simulation.peak_task.describe(profile.num_blocks),
        step_ms=step_ms,
        step_low_ms=step_ms * low,
        step_high_ms=step_ms * high,
        exposed_copy_ms=sum(lane_ms for lane, lane_ms in exposed_ms.items() if lane not in no_copies),
        exposed_ms=dict(exposed_ms.items()),
        tokens_per_s=workload.tokens_per_step / step_ms * 1000,
        total_s=step_ms * workload.num_steps / 1000 + once_s,
        once_s=once_s,
        is_model_held_to_measurement=profile.is_held_to_measurement,
        time_source=machine.rates.source,
        num_time_runs=spread.num_runs if spread is not None else 0,
        device_bytes_by_category={},
        lane_busy_ms={},
        timeline=(),
        rank_peak_bytes=_rank_peaks(ranks, num_devices),
        base_bytes=base_bytes,
        network_bytes=round(sum(ranks[0].setting.sent_bytes(plan)) / num_devices),
    )
    return prediction.detailed_later(_details(simulation, peaks, machine.rates.time_factors))


def _base_bytes(profile: Profile, *, plan: Plan, workload: TrainingWorkload) -> int:
    """Bytes of the homes that ``runtime/tiers/base_homes.py`` has in common with other jobs."""
    is_frozen = workload.adapter is not None and workload.mode == "finetune"
    if not is_frozen or plan.weights.place != "host" or plan.layout.num_devices > 1:
        return 0
    return sum(list_streamed_bytes(profile, plan.weights, trains_all=False))


def _rank_peaks(ranks: Sequence[LaidOut], num_devices: int) -> tuple[int, ...]:
    """The peak of each rank in order; empty on one device."""
    if num_devices == 1:
        return ()
    found = tuple(laid.highest.num_bytes for laid in sorted(ranks, key=lambda laid: laid.rank))
    return found * (num_devices // len(found))


def _details(
    simulation: Simulation, peaks: StagePeaks, time_factors: Mapping[TimeKind, float]
) -> dict[str, Callable[[], Any]]:
    return {
        "device_bytes_by_category": lambda: _by_category(simulation.peak),
        "lane_busy_ms": lambda: {
            lane: lane_ms for lane, lane_ms in simulation.busy_ms.items() if lane in _ALWAYS or lane_ms
        },
        "timeline": lambda: _timeline(simulation),
        "busy_by_kind_ms": lambda: _busy_by_kind(simulation),
        "exposed_by_kind_ms": lambda: _exposed_by_kind(simulation),
        "recomputed_ms": lambda: simulation.recomputed_ms,
        "attained_by_kind": lambda: _attained_by_kind(simulation),
        "time_factors": lambda: {str(kind): factor for kind, factor in time_factors.items()},
        "peaks": peaks.list,
    }


def _busy_by_kind(simulation: Simulation) -> dict[str, float]:
    lanes = {lane: lane_ms for lane, lane_ms in simulation.busy_ms.items() if lane != "compute"}
    return {kind: kind_ms for kind, kind_ms in (*simulation.kinds_ms.items(), *lanes.items()) if kind_ms}


def _exposed_by_kind(simulation: Simulation) -> dict[str, float]:
    placed = (*simulation.kinds_ms.items(), *simulation.exposed_ms.items())
    return {kind: kind_ms for kind, kind_ms in placed if kind_ms}


def _attained_by_kind(simulation: Simulation) -> dict[str, float]:
    work, kinds_ms = simulation.kinds_work, simulation.kinds_ms
    return {kind: work[kind] / kinds_ms[kind] * 1000 for kind in work if work[kind] and kinds_ms[kind]}


def _by_category(row: Bytes) -> dict[str, int]:
    return dict(zip(CATEGORIES, row.tolist(), strict=True))


def _timeline(simulation: Simulation) -> tuple[TimelinePoint, ...]:
    """The highest point of each task; where that is too many, the highest of each stretch, so the peak always stands."""
    starts = [start for row in simulation.rows for start in row.starts_ms]
    phases = [task.phase for row in simulation.rows for task in row.tasks]
    levels = np.concatenate([row.levels for row in simulation.rows])
    chosen = _highest_of_stretches(levels.sum(axis=1), MAX_TIMELINE_POINTS - 1)
    resident = _by_category(simulation.resident)
    points = [TimelinePoint(offset_ms=0.0, phase="forward", bytes_by_category=resident)]
    rows = levels[chosen].tolist()
    for index, row in zip(chosen, rows, strict=True):
        by_category = dict(zip(CATEGORIES, row, strict=True))
        points.append(TimelinePoint(offset_ms=starts[index], phase=phases[index], bytes_by_category=by_category))
    return tuple(points)


def _highest_of_stretches(totals: Bytes, num_stretches: int) -> list[int]:
    if len(totals) <= num_stretches:
        return list(range(len(totals)))
    edges = np.linspace(0, len(totals), num_stretches + 1).astype(int)
    return [int(start + totals[start:end].argmax()) for start, end in itertools.pairwise(edges)]
