"""Runs one case of ``benchmarks.accuracy``: prices its plan, carries it out, and puts both in one row.

Bytes are counted twice at the same time, by the runtime's meter and by torch's profiler (``meter.py``), in a second
training step or a second pass of generation. Verdicts are asked for at budgets around what was measured, and for some cases
carried out: under the predicted bound the case must finish, one byte under its measured peak it must end in OutOfDeviceMemory.
"""

import functools
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.meter import AllocationProfile, HostMarkingMeter, ProfiledPeak
from benchmarks.accuracy.techniques import REMOTE
from benchmarks.common.record import Row
from benchmarks.common.yardstick import get_yardstick
from optimizer.base.errors import OutOfDeviceMemory
from optimizer.data.batches import IGNORED_LABEL
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.calibration import TimedRun
from optimizer.hardware.machine import Machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import Profile
from optimizer.profile.trace.generation import profile_generation
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.generation.generator import Generator, build_for_generation
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.job.measure_generation import make_prompts, measure_generation
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.meter import Meter, Peak
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.runtime.tiers.remote import URL_VARIABLE
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.workload import GenerationWorkload, TrainingWorkload

CPU = torch.device("cpu")
EXACT = ("weights", "gradients", "optimizer_state", "kv_cache")
"""Categories whose bytes follow from shapes alone."""
BUDGETS = {"-1 %": 0.99, "-0.1 %": 0.999, "-1 B": 1.0, "+0.5 %": 1.005, "+2 %": 1.02}
"""Around the measured peak; the third is one byte under it."""


class Bench:
    """Machine and profiles that cases share; each profile is traced once."""

    def __init__(self, machine: Machine, cases: Iterable[Case] = ()) -> None:
        self.machine = machine
        self._extents: dict[str, Extent] = {}
        self._representations: dict[str, set[str]] = {}
        self._profiles: dict[str, Profile | GenerationProfile] = {}
        for case in cases:
            self._note(case)

    def _note(self, case: Case) -> None:
        key = _key_of(case)
        if isinstance(case.plan, GenerationPlan):
            self._representations.setdefault(key, set()).add(case.plan.weights.representation)
        elif isinstance(case.workload, TrainingWorkload):
            extent = extent_of_plans([case.plan], workload=case.workload)
            known = self._extents.get(key)
            self._extents[key] = extent if known is None else known.union(extent)

    def profile_of(self, case: Case) -> Profile | GenerationProfile:
        """Trace a model's profile once for all that its noted cases need."""
        key = _key_of(case)
        if key not in self._profiles:
            if key not in self._extents and key not in self._representations:
                self._note(case)
            if isinstance(case.plan, GenerationPlan):
                names = sorted(self._representations[key])
                self._profiles[key] = profile_generation(case.spec, representations=names)
            elif case.module is not None:
                self._profiles[key] = case.module.profile()
            else:
                self._profiles[key] = profile_model(
                    case.spec, adapter=case.adapter, is_padded=case.is_padded, extent=self._extents[key]
                )
        return self._profiles[key]

    def predict(self, case: Case, *, calibration: Any = None) -> Prediction | GenerationPrediction:
        profile, plan, workload = self.profile_of(case), case.plan, case.workload
        if isinstance(profile, GenerationProfile):
            assert isinstance(plan, GenerationPlan)
            assert isinstance(workload, GenerationWorkload)
            return estimate_generation(
                profile, plan=plan, workload=workload, machine=self.machine, calibration=calibration
            )
        assert isinstance(plan, Plan)
        assert isinstance(workload, TrainingWorkload)
        return estimate_training(profile, plan=plan, workload=workload, machine=self.machine, calibration=calibration)


def _key_of(case: Case) -> str:
    kind = type(case.workload).__name__
    return json.dumps([kind, dict(case.config) or case.model, repr(case.adapter), case.is_padded], sort_keys=True)


def predicted_ms(prediction: Prediction | GenerationPrediction, case: Case) -> float:
    """Milliseconds of the unit that is timed: a training step, or a pass of generation."""
    if isinstance(prediction, Prediction):
        return prediction.step_ms
    assert isinstance(case.workload, GenerationWorkload)
    return prediction.prefill_ms + prediction.decode_ms * (case.workload.num_new_tokens - 1)


def timed_run(prediction: Prediction | GenerationPrediction, *, measured_ms: float) -> TimedRun:
    """One measured run for the calibration; the prediction has no calibration in it."""
    if isinstance(prediction, Prediction):
        return TimedRun.from_prediction(prediction, measured_ms=measured_ms)
    kinds = dict(prediction.prefill_by_kind_ms)
    for kind, kind_ms in prediction.decode_by_kind_ms.items():
        kinds[kind] = kinds.get(kind, 0.0) + kind_ms
    return TimedRun(predicted_ms=kinds, measured_ms=measured_ms)


def why_left_out(case: Case) -> str | None:
    """Why this machine cannot run the case; None where it can."""
    if REMOTE.intersection(case.techniques) and not os.environ.get(URL_VARIABLE):
        return f"no remote store: {URL_VARIABLE} is not set"
    return None


def measure_memory(bench: Bench, case: Case) -> Row:
    """Predicted bytes beside what two meters counted."""
    bench.profile_of(case)
    started_s = time.perf_counter()
    prediction = bench.predict(case)
    estimate_ms = (time.perf_counter() - started_s) * 1000
    counted = count(case)
    metered, profiled = counted.metered, counted.profiled
    measured_bytes = max(metered.device_bytes, profiled.device_bytes)
    return {
        "what": "memory",
        **head_of(case),
        "predicted_bytes": prediction.device_peak_bytes,
        "predicted_unmetered_bytes": prediction.unmetered_bytes,
        "predicted_high_bytes": prediction.device_peak_high_bytes,
        "metered_bytes": metered.device_bytes,
        "profiled_bytes": profiled.device_bytes,
        "error": (prediction.device_peak_bytes + prediction.unmetered_bytes) / measured_bytes - 1,
        "error_to_meter_bytes": prediction.device_peak_bytes - metered.device_bytes,
        "unseen_by_meter_bytes": profiled.device_bytes - metered.device_bytes,
        "host_error_bytes": prediction.host_peak_bytes - metered.host_bytes,
        "disk_error_bytes": prediction.disk_peak_bytes - counted.disk_bytes,
        "stage_error_bytes": stage_errors(prediction, counted),
        "host_bytes": metered.host_bytes,
        "wrong_categories": wrong_categories(prediction, metered),
        "predicted_moment": prediction.peak_moment,
        "measured_moment": metered.moment,
        "verdicts": verdicts_around(prediction, counted.device_bytes),
        "estimate_ms": round(estimate_ms, 3),
        "num_allocation_events": profiled.num_events,
    }


def head_of(case: Case) -> Row:
    return {
        "case": case.name,
        "model": case.model,
        "shape": case.shape,
        "techniques": list(case.techniques),
        "held_back": case.is_held_back,
    }


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes of one case by two meters."""

    metered: Peak
    """Peak of the second step or pass, as is ``profiled``."""
    profiled: ProfiledPeak
    disk_bytes: int
    stages: dict[str, int]
    """Peaks of training by the runtime's meter: of the first step, and of an evaluation."""

    @property
    def device_bytes(self) -> int:
        """The most by either, at any time."""
        return max(self.metered.device_bytes, self.profiled.device_bytes, *self.stages.values())


def count(case: Case) -> Counted:
    """One step or pass to begin with, and another that counts; then an evaluation."""
    gc.collect()
    meter = HostMarkingMeter(device=CPU)
    stages: dict[str, int] = {}
    with AllocationProfile() as profiled, ready(case, meter) as subject:
        subject.repeat()
        if subject.evaluate is not None:
            stages["first_step"] = meter.peak().device_bytes
        subject.tiers.reset_peak()
        meter.reset_peak()
        with profiled.steady_step():
            subject.repeat()
        metered, disk_bytes = meter.peak(), subject.tiers.disk_peak_bytes
        if subject.evaluate is not None:
            meter.reset_peak()
            subject.evaluate()
            stages["evaluation"] = meter.peak().device_bytes
        del subject
    return Counted(metered=metered, profiled=profiled.peak, disk_bytes=disk_bytes, stages=stages)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model under its plan."""

    repeat: Callable[[], None]
    """Takes one step or makes one pass."""
    evaluate: Callable[[], None] | None = None
    tiers: Tiers
    """Tiers in which a plan keeps bytes."""


@contextmanager
def ready(case: Case, meter: Meter | None) -> Iterator[Subject]:
    """Built and in its place, and gone afterwards."""
    if isinstance(case.plan, GenerationPlan):
        generator = _make_generator(case, meter)
        try:
            yield Subject(repeat=functools.partial(_generate, generator, case), tiers=generator.tiers)
        finally:
            generator.close(keep_weights=False)
        return
    trainer = _make_trainer(case, meter)
    try:
        yield Subject(
            repeat=functools.partial(_step, trainer, case),
            evaluate=functools.partial(_evaluate, trainer, case),
            tiers=trainer.tiers,
        )
    finally:
        trainer.close(keep_weights=False)


def _make_trainer(case: Case, meter: Meter | None) -> Trainer:
    assert isinstance(case.plan, Plan)
    assert isinstance(case.workload, TrainingWorkload)
    if case.module is not None:
        model = case.module.make().to(torch_dtype(case.plan.weights))
        anatomy = case.module.anatomy(model)
        return Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=meter, anatomy=anatomy)
    model = build_prepared(case.spec, weights=case.plan.weights, workload=case.workload, device=CPU)
    return Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=meter)


def _make_batches(trainer: Trainer, case: Case) -> list[MicroBatch]:
    if case.module is not None:
        sizes = [trainer.plan.batch.micro_batch_size] * trainer.plan.batch.accumulation_steps
        return [case.module.make_batch(size) for size in sizes]
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    return [_padded(*batch) for batch in batches] if case.is_padded else batches


def _padded(ids: torch.Tensor, labels: torch.Tensor) -> MicroBatch:
    """The last sequence two thirds as long as the others."""
    end = 2 * ids.shape[1] // 3
    mask = torch.ones_like(ids)
    mask[-1, end:] = 0
    labels[-1, end - 1 :] = IGNORED_LABEL
    return ids, labels, mask


def _step(trainer: Trainer, case: Case) -> None:
    batches = _make_batches(trainer, case)
    trainer.step(batches, learning_rate=trainer.workload.learning_rate)
    trainer.join()


def _evaluate(trainer: Trainer, case: Case) -> None:
    trainer.evaluate(_make_batches(trainer, case))


def _make_generator(case: Case, meter: Meter | None) -> Generator:
    assert isinstance(case.plan, GenerationPlan)
    model = build_for_generation(case.spec, weights=case.plan.weights, device=CPU, seed=case.workload.seed)
    return Generator(model, plan=case.plan, device=CPU, meter=meter)


def _generate(generator: Generator, case: Case) -> None:
    assert isinstance(case.workload, GenerationWorkload)
    prompts = make_prompts(case.spec.vocab_size, replace(case.workload, num_sequences=generator.plan.batch_size))
    for _ in generator.run_passes([prompts], num_new_tokens=case.workload.num_new_tokens):
        pass


def wrong_categories(prediction: Prediction | GenerationPrediction, metered: Peak) -> dict[str, int]:
    """Predicted less measured bytes at the peak, of the categories that are exact by construction and are off."""
    predicted, measured = prediction.device_bytes_by_category, metered.device_bytes_by_category
    return {name: predicted[name] - measured[name] for name in EXACT if predicted[name] != measured[name]}


def stage_errors(prediction: Prediction | GenerationPrediction, counted: Counted) -> dict[str, int]:
    """Predicted less metered bytes of the first step and of an evaluation."""
    peaks = prediction.peaks if isinstance(prediction, Prediction) else ()
    return {
        peak.stage: peak.device_peak_bytes - counted.stages[peak.stage]
        for peak in peaks
        if peak.stage in counted.stages
    }


def verdicts_around(prediction: Prediction | GenerationPrediction, measured_bytes: int) -> dict[str, str]:
    """Verdicts by budget, which is named by its distance from the measured peak."""
    verdicts: dict[str, str] = {}
    for name, share in BUDGETS.items():
        budget_bytes = measured_bytes - 1 if name == "-1 B" else round(measured_bytes * share)
        verdicts[name] = prediction.verdict(budget_bytes)
    return verdicts


def carry_out(bench: Bench, case: Case) -> Row:
    """The plan under the predicted bound, and under one byte less than what it took there."""
    high_bytes = bench.predict(case).device_peak_high_bytes
    measured_bytes = _peak_under(case, high_bytes)
    refusal = _refusal_at(case, measured_bytes - 1)
    return {
        "what": "carried out",
        **head_of(case),
        "cap_bytes": high_bytes,
        "measured_bytes": measured_bytes,
        "finished": measured_bytes <= high_bytes,
        "refused_below": refusal is not None,
        "refusal": refusal,
    }


def _peak_under(case: Case, cap_bytes: int) -> int:
    plan, workload = case.plan, case.workload
    if isinstance(plan, GenerationPlan) and isinstance(workload, GenerationWorkload):
        return measure_generation(case.spec, plan=plan, workload=workload, cap_bytes=cap_bytes).device_peak_bytes
    assert isinstance(plan, Plan)
    assert isinstance(workload, TrainingWorkload)
    if case.module is None and not case.is_padded:
        return measure_step(case.spec, plan=plan, workload=workload, cap_bytes=cap_bytes).device_peak_bytes
    meter = Meter(device=CPU, cap_bytes=cap_bytes)
    with ready(case, meter) as subject:
        subject.repeat()
        subject.repeat()
        return meter.peak().device_bytes


def _refusal_at(case: Case, cap_bytes: int) -> str | None:
    try:
        _peak_under(case, cap_bytes)
    except OutOfDeviceMemory as error:
        return str(error)
    return None


def time_steps(case: Case, *, num_steps: int) -> Row:
    """Milliseconds of steps or passes after a first one, uncounted as most of a job's are; those of a yardstick before the first
    of these, between them and after the last; and how busy the machine was.
    """
    gc.collect()
    load = os.getloadavg()[0]
    yardstick = get_yardstick()
    times: list[float] = []
    beside: list[float] = []
    with ready(case, None) as subject:
        for _ in range(num_steps + 1):
            started_s = time.perf_counter()
            subject.repeat()
            times.append((time.perf_counter() - started_s) * 1000)
            beside.append(yardstick.measure_ms())
        del subject
    return {
        "first_ms": round(times[0], 3),
        "step_ms": [round(value, 3) for value in times[1:]],
        "yardstick_ms": [round(value, 3) for value in beside],
        "load": round(load, 2),
    }
