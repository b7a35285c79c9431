"""Contenders of one job side by side: each one's measured peak, and times of steps taken in turn."""

import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.alternatives import Contender, Factory, Job, Ours
from benchmarks.common.paired import measure_peak
from benchmarks.common.record import clear
from benchmarks.meter import allocation_deltas, highest_sum
from benchmarks.search.rivals.contenders import Baseline
from benchmarks.search.subjects import Setup, Subject
from benchmarks.step_times import make_plans
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.calibration import TimedRun, fit_calibration
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.keep.obtain import obtain_profile

CALIBRATION_PLANS = (
    "keep",
    "recompute",
    "selective",
    "offload",
    "offload, recompute, keep",
    "4 micro-batches of a quarter",
    "gradients on the host",
    "state on the host",
)
"""Plans of each model that a machine is calibrated with; no other job uses these models."""
LOSSLESS = Extent(representations=("fp32",))
"""Extent of a profile that suffices for plans that change no number."""
_CALIBRATION_ROUNDS = 7
_KEPT_SHARE = 0.5
"""Share of the device's memory that contenders may hold between their steps."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A machine as the product has it after some jobs."""

    machine: Machine
    calibration: dict[str, Any]


def calibrated_machine(setup: Setup, device: torch.device, *, file: Path | None) -> Calibrated:
    """Read from the file where it is there; else measured, and written to it."""
    if file is not None and file.exists():
        document = json.loads(file.read_text())
        return Calibrated(machine=Machine.from_json(document["machine"]), calibration=document["calibration"])
    found = calibrate_machine(setup, device)
    if file is not None:
        file.write_text(json.dumps({"machine": found.machine.to_json(), "calibration": found.calibration}))
    return found


def calibrate_machine(setup: Setup, device: torch.device) -> Calibrated:
    """Probed, then corrected by short runs."""
    machine = probe_machine(device=str(device), max_s=setup.probe_s)
    names = CALIBRATION_PLANS[: setup.num_calibration_plans]
    runs: list[TimedRun] = []
    for subject in setup.calibration_subjects:
        runs += _timed_runs(subject, names, machine, device, processor_time=setup.processor_time)
    return Calibrated(machine=machine, calibration=fit_calibration(runs))


def _timed_runs(
    subject: Subject, names: Sequence[str], machine: Machine, device: torch.device, *, processor_time: bool
) -> list[TimedRun]:
    """Raced as contenders are, in turn and without a meter: a slow moment of the machine falls on all of them."""
    spec = subject.spec
    profile_of = obtain_profile(spec, extent=LOSSLESS)
    plans = make_plans(spec.num_blocks, subject.batch_size, waits=False)
    predictions: dict[str, Prediction] = {}
    stage = Stage(max_kept=len(names), processor_time=processor_time)
    try:
        for name in names:
            plan = plans[name]
            workload = replace(subject.workload, global_batch_size=plan.batch.global_batch_size)
            predictions[name] = estimate_training(profile_of, plan=plan, workload=workload, machine=machine)
            job = Job(spec=spec, workload=workload, device=device)
            stage.add(name, partial(Ours, job, plan))
        times = stage.race(names, num_rounds=_CALIBRATION_ROUNDS)
    finally:
        stage.close()
    return [TimedRun.from_prediction(predictions[name], measured_ms=statistics.median(times[name])) for name in names]


def peak_of_plan(job: Job, plan: Plan, *, budget_bytes: int) -> dict[str, Any]:
    """Peaks and losses of a steady step. On CUDA torch's allocator is limited to the budget; on the CPU device nothing is."""
    is_cuda = job.device.type == "cuda"
    try:
        return measure_peak(
            lambda meter: Ours(job, plan, meter), job.device, cap_bytes=budget_bytes if is_cuda else None
        )
    finally:
        if is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0, job.device)


def peak_of_baseline(baseline: Baseline, job: Job) -> dict[str, Any]:
    """Measure a peak by the runtime's meter; of compiled graphs, which bypass it, by the allocator's own reports."""
    if not baseline.is_compiled:
        return measure_peak(baseline.make, job.device)
    contender: Any = baseline.make(None)
    try:
        losses = [contender.step() for _ in range(2)]
        peak_bytes = allocator_peak(contender, job.device)
        return {"peak_bytes": peak_bytes, "losses": losses}
    finally:
        contender.close()
        del contender
        clear()


def allocator_peak(contender: Any, device: torch.device) -> int:
    """Peak of one more step: bytes that live between steps, and the most that torch's profiler (on CUDA its counters) adds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        contender.step()
        torch.cuda.synchronize(device)
        return resident_bytes(contender) + torch.cuda.max_memory_allocated(device) - before_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender.step()
    return resident_bytes(contender) + highest_sum(allocation_deltas(profiler))


def resident_bytes(contender: Any) -> int:
    """Weights, buffers, optimizer state and, where they are on the device already, inputs of a loop between its steps."""
    tensors = [*contender.model.parameters(), *contender.model.buffers()]
    inputs = [tensor for batch in contender.batches for tensor in batch]
    tensors += [tensor for tensor in inputs if tensor.device == tensors[0].device]
    for state in contender.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


class Stage:
    """Contenders that were built, ready to step. Where not all have room, those longest unused are closed and built again."""

    def __init__(self, *, max_kept: int, processor_time: bool = False) -> None:
        """processor_time: steps are timed by what the process takes of the processor, whoever else is on the machine."""
        self._now_s = time.process_time if processor_time else time.perf_counter
        self._factories: dict[str, Factory] = {}
        self.max_kept = max_kept
        self._built: OrderedDict[str, Contender] = OrderedDict()
        self.losses: dict[str, float] = {}
        """Bytes that each contender holds after its second step."""

    def add(self, name: str, factory: Factory) -> None:
        self._factories[name] = factory

    def race(self, names: Sequence[str], *, num_rounds: int) -> dict[str, list[float]]:
        """Milliseconds of each one's steps, taken in turn, in reverse order every second round."""
        contenders = {name: self.get(name) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for index in range(num_rounds):
            for name in names if index % 2 == 0 else reversed(names):
                times[name].append(self._timed_ms(contenders[name]))
        return times

    def close(self) -> None:
        while self._built:
            self._built.popitem()[1].close()
        clear()

    def _timed_ms(self, contender: Contender) -> float:
        start_s = self._now_s()
        contender.step()
        return (self._now_s() - start_s) * 1000

    def get(self, name: str) -> Contender:
        """Ready: its first steps are taken."""
        if name not in self._built:
            while len(self._built) >= self.max_kept:
                self._built.popitem(last=False)[1].close()
                clear()
            contender = self._factories[name](None)
            # The first step makes the optimizer's state, and of compiled ones the code.
            contender.step()
            self.losses[name] = contender.step()
            self._built[name] = contender
        self._built.move_to_end(name)
        return self._built[name]


def max_kept(job: Job, machine: Machine, *, at_once: int) -> int:
    """Number of contenders that may be built at a time; at least ``at_once``, which a race needs."""
    room_bytes = machine.device.memory_bytes if job.device.type == "cuda" else machine.host_memory_bytes
    return max(at_once, int(_KEPT_SHARE * room_bytes) // (16 * job.spec.num_parameters))
