"""Runs one case of ``benchmarks.accuracy``: prices its plan, takes real steps of it, and tells both in one row.

Bytes are counted twice in the same step, by the runtime's meter and by torch's profiler (``accuracy_meter.py``). Verdicts are
asked for at budgets around what was measured, and for some cases carried out: under the predicted bound the steps must finish,
one byte under the measured peak they must end in OutOfDeviceMemory.
"""

import gc
import json
import os
import time
from typing import Any

import torch

from benchmarks.accuracy_cases import REMOTE, Case
from benchmarks.accuracy_meter import AllocationProfile, HostMarkingMeter, ProfiledPeak
from benchmarks.record import Row
from optimizer.errors import OutOfDeviceMemory
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.profile.profile import Profile
from optimizer.profile.trace import profile_model
from optimizer.runtime.measure import make_synthetic_batches, measure_step
from optimizer.runtime.meter import Meter, Peak
from optimizer.runtime.prepare import build_prepared
from optimizer.runtime.step import Trainer
from optimizer.runtime.store_remote import URL_VARIABLE

CPU = torch.device("cpu")
EXACT = ("weights", "gradients", "optimizer_state")
"""Categories whose bytes follow from shapes alone."""
BUDGETS = {"-1 %": 0.99, "-0.1 %": 0.999, "-1 B": 1.0, "+0.5 %": 1.005, "+2 %": 1.02}
"""Around the measured peak; the third is one byte under it."""


class Bench:
    """What all cases share: the machine's rates and each model's profile, traced once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.profile_s: dict[str, float] = {}
        self._profiles: dict[str, Profile] = {}

    def profile_of(self, case: Case) -> Profile:
        key = json.dumps([dict(case.config), repr(case.workload.adapter)], sort_keys=True)
        if key not in self._profiles:
            started_s = time.perf_counter()
            self._profiles[key] = profile_model(case.spec, adapter=case.workload.adapter)
            self.profile_s[key] = time.perf_counter() - started_s
        return self._profiles[key]

    def predict(self, case: Case, *, calibration: Any = None) -> Prediction:
        return estimate_training(
            self.profile_of(case), plan=case.plan, workload=case.workload, machine=self.machine, calibration=calibration
        )


def why_left_out(case: Case) -> str | None:
    """Why this machine cannot run the case; None where it can."""
    if REMOTE.intersection(case.techniques) and not os.environ.get(URL_VARIABLE):
        return f"no remote store: {URL_VARIABLE} is not set"
    return None


def measure_memory(bench: Bench, case: Case) -> Row:
    """Predicted bytes beside what two meters counted in one steady step."""
    bench.profile_of(case)
    started_s = time.perf_counter()
    prediction = bench.predict(case)
    estimate_ms = (time.perf_counter() - started_s) * 1000
    metered, profiled, disk_bytes = count_step(case)
    measured_bytes = max(metered.device_bytes, profiled.device_bytes)
    return {
        "what": "memory",
        **head_of(case),
        "predicted_bytes": prediction.device_peak_bytes,
        "predicted_high_bytes": prediction.device_peak_high_bytes,
        "metered_bytes": metered.device_bytes,
        "profiled_bytes": profiled.device_bytes,
        "error": prediction.device_peak_bytes / measured_bytes - 1,
        "error_to_meter_bytes": prediction.device_peak_bytes - metered.device_bytes,
        "unseen_by_meter_bytes": profiled.device_bytes - metered.device_bytes,
        "host_error_bytes": prediction.host_peak_bytes - metered.host_bytes,
        "disk_error_bytes": prediction.disk_peak_bytes - disk_bytes,
        "host_bytes": metered.host_bytes,
        "wrong_categories": wrong_categories(prediction, metered),
        "predicted_moment": prediction.peak_moment,
        "measured_moment": metered.moment,
        "verdicts": verdicts_around(prediction, measured_bytes),
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


def count_step(case: Case) -> tuple[Peak, ProfiledPeak, int]:
    """A steady step by both meters, and the most in use on the disk."""
    gc.collect()
    meter = HostMarkingMeter(device=CPU)
    with AllocationProfile() as profiled:
        trainer = _make_trainer(case, meter)
        try:
            batches = make_synthetic_batches(trainer.model, plan=case.plan, workload=case.workload)
            trainer.step(batches, learning_rate=case.workload.learning_rate)
            trainer.join()
            trainer.tiers.reset_peak()
            with profiled.steady_step():
                trainer.step(batches, learning_rate=case.workload.learning_rate)
                trainer.join()
            metered, disk_bytes = meter.peak(), trainer.tiers.disk_peak_bytes
        finally:
            trainer.close()
    return metered, profiled.peak, disk_bytes


def wrong_categories(prediction: Prediction, metered: Peak) -> dict[str, int]:
    """Of those that are exact by construction, predicted less measured bytes at the peak where that is not 0."""
    predicted, measured = prediction.device_bytes_by_category, metered.device_bytes_by_category
    return {name: predicted[name] - measured[name] for name in EXACT if predicted[name] != measured[name]}


def verdicts_around(prediction: Prediction, measured_bytes: int) -> dict[str, str]:
    """By budget, named by how far it is from the measured peak."""
    verdicts: dict[str, str] = {}
    for name, share in BUDGETS.items():
        budget_bytes = measured_bytes - 1 if name == "-1 B" else round(measured_bytes * share)
        verdicts[name] = prediction.verdict(budget_bytes)
    return verdicts


def carry_out(bench: Bench, case: Case) -> Row:
    """The plan under the predicted bound, and under one byte less than what it took there."""
    high_bytes = bench.predict(case).device_peak_high_bytes
    measured = measure_step(case.spec, plan=case.plan, workload=case.workload, cap_bytes=high_bytes)
    refusal = _refusal_at(case, measured.device_peak_bytes - 1)
    return {
        "what": "carried out",
        **head_of(case),
        "cap_bytes": high_bytes,
        "measured_bytes": measured.device_peak_bytes,
        "finished": measured.device_peak_bytes <= high_bytes,
        "refused_below": refusal is not None,
        "refusal": refusal,
    }


def _refusal_at(case: Case, cap_bytes: int) -> str | None:
    try:
        measure_step(case.spec, plan=case.plan, workload=case.workload, cap_bytes=cap_bytes)
    except OutOfDeviceMemory as error:
        return str(error)
    return None


def time_steps(case: Case, *, num_steps: int) -> Row:
    """Milliseconds of steady steps, counted as in a real job, with how busy the machine was."""
    gc.collect()
    load = os.getloadavg()[0]
    meter = Meter(device=CPU)
    trainer = _make_trainer(case, meter)
    times: list[float] = []
    try:
        batches = make_synthetic_batches(trainer.model, plan=case.plan, workload=case.workload)
        for _ in range(num_steps + 1):
            started_s = time.perf_counter()
            trainer.step(batches, learning_rate=case.workload.learning_rate)
            trainer.join()
            times.append((time.perf_counter() - started_s) * 1000)
    finally:
        trainer.close()
    return {"first_ms": round(times[0], 3), "step_ms": [round(value, 3) for value in times[1:]], "load": round(load, 2)}


def _make_trainer(case: Case, meter: Meter) -> Trainer:
    model = build_prepared(case.spec, weights=case.plan.weights, workload=case.workload, device=CPU)
    return Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=meter)
