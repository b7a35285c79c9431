"""The part of ``benchmarks.accuracy`` for a CUDA machine: real models under the caps of cards of 4 to 24 GB, in under 8 minutes.

A cap is what torch's allocator may reserve (``set_per_process_memory_fraction``): the card less the CUDA context. Before a cap is
believed, one tensor larger than it must be refused and one a little smaller allowed. Predicted bytes are held against torch's
own counters (allocated, reserved, retries) and against what the driver says the device holds; step times against a
calibration fitted to the cases that are not held back.

Minutes on a card are scarce: models are filled quickly, each step is measured few times, no case is begun after a deadline,
and an error in one row is reported in it. On the CPU device the same code runs on small shapes, with the runtime's meter as
the cap.
"""

import functools
import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.accuracy.card_cases import CardCase, Cards, cuda_cards, list_small_cards
from benchmarks.common.alternatives import Job
from benchmarks.common.journal import Journal
from benchmarks.common.packages import NEEDS_PACKAGE, missing_package
from benchmarks.common.record import Row, clear
from benchmarks.training.plans import describe
from optimizer.base.errors import HeadroomError, OutOfDeviceMemory
from optimizer.base.units import MIB
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.calibration import TimedRun, fit_calibration
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.profile.extent import Extent
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.device import prepared_device, reserve_workspaces
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer

NUM_STEPS = 3
"""Steps that count, after the first."""
TIGHT_BYTES = 64 * MIB


class Bench:
    """One device, its rates, and profiles of what the cases need, as they are needed."""

    def __init__(self, device: torch.device, machine: Machine, cases: Sequence[CardCase]) -> None:
        self.device = device
        self.machine = machine
        self._extents: dict[str, Extent] = {}
        for case in cases:
            extent = extent_of_plans([case.plan], workload=case.workload)
            known = self._extents.get(_key_of(case))
            self._extents[_key_of(case)] = extent if known is None else known.union(extent)
        self.baseline_bytes = 0
        """Bytes that the device held before this process took any: other processes, the driver."""
        self._profiles: dict[str, Profile] = {}

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def profile_of(self, case: CardCase) -> Profile:
        key = _key_of(case)
        if key not in self._profiles:
            self._profiles[key] = profile_model(case.spec, adapter=case.workload.adapter, extent=self._extents[key])
        return self._profiles[key]

    def predict(self, case: CardCase, *, calibration: Any = None) -> Prediction:
        return estimate_training(
            self.profile_of(case),
            plan=case.plan,
            workload=case.workload,
            machine=self.machine,
            calibration=calibration,
        )

    def predict_card(self, case: CardCase) -> Prediction:
        """Predict all that the process takes on a card of the case's size that is otherwise this one."""
        machine = self.machine
        if self.is_cuda:
            machine = replace(machine, device=replace(machine.device, total_bytes=case.card_bytes))
        return add_memory(
            self.predict(case), self.profile_of(case), plan=case.plan, workload=case.workload, machine=machine
        )

    def used_bytes(self) -> int:
        """Bytes that the device holds for this process by the driver's count, context included; 0 on the CPU device."""
        if not self.is_cuda:
            return 0
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return total_bytes - free_bytes - self.baseline_bytes


def _key_of(case: CardCase) -> str:
    return f"{case.spec.fingerprint} {case.workload.adapter!r}"


def measure_cards(journal: Journal, device: torch.device, *, quick: bool, cards: Cards | None = None) -> None:
    """All cases, each row as it comes, then the predicted times. quick: the first group of cases alone."""
    cards = cards or (cuda_cards() if device.type == "cuda" else list_small_cards())
    cases = []
    for case in cards.cases[:9] if quick else cards.cases:
        if (package := missing_package(case.plan)) is None:
            cases.append(case)
        else:
            journal.do(dict, what=NEEDS_PACKAGE, case=case.name, package=package)
    baseline_bytes = bytes_of_others(device)
    with prepared_device(device):
        machine = probe_machine(device=str(device), max_s=cards.probe_s)
        bench = Bench(device, machine, cases)
        bench.baseline_bytes = baseline_bytes
        journal.machine |= {"rates": machine.to_json()["rates"], "facts": machine.facts}
        journal.machine["bytes_of_others"] = baseline_bytes
        journal.machine["context_bytes"] = context_bytes(bench)
        for card_bytes in sorted({case.card_bytes for case in cases}):
            journal.do(functools.partial(prove_cap, bench, card_bytes), what="cap", card_bytes=card_bytes)
        for case in cases:
            if time.monotonic() - journal.started_s > cards.deadline_s:
                journal.do(dict, what="left out", case=case.name, why_not="out of time")
                continue
            journal.do(functools.partial(measure_case, bench, case), what="card", case=case.name)
        journal.rows += predicted_times(bench, cases, journal.rows)


def bytes_of_others(device: torch.device) -> int:
    """Bytes that processes hold on the device before CUDA is begun, by the vendor's library; 0 where that is not installed.

    Assumed: the total that CUDA reports, of which ``Bench.used_bytes`` is a part, leaves out what the driver keeps for itself,
    half a GiB of a large card. The library's total has it in, and its first call counts it as used; the second one names it.
    """
    if device.type != "cuda":
        return 0
    try:
        import pynvml

        from worker.gpu import visible_card

        pynvml.nvmlInit()
        card = visible_card(device.index or 0, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        opens = pynvml.nvmlDeviceGetHandleByUUID if isinstance(card, str) else pynvml.nvmlDeviceGetHandleByIndex
        memory = pynvml.nvmlDeviceGetMemoryInfo(opens(card), version=pynvml.nvmlMemory_v2)
        return max(0, int(memory.total - memory.free - memory.reserved))
    except Exception:
        # Not installed, no permission, a virtual card: the figure is then the device's, which nobody else uses.
        return 0


def context_bytes(bench: Bench) -> int:
    """Bytes of CUDA and of the libraries' code, with nothing reserved but their workspaces."""
    clear()
    return bench.used_bytes() - torch.cuda.memory_reserved(bench.device) if bench.is_cuda else 0


def allowed_bytes(bench: Bench, card_bytes: int) -> int:
    """Bytes that the allocator may reserve on a card of that size."""
    return card_bytes - context_bytes(bench)


def limit(bench: Bench, card_bytes: int) -> int:
    """Have the allocator stop where a card of so many bytes would; returns what it may reserve."""
    clear()
    total_bytes = torch.cuda.get_device_properties(bench.device).total_memory
    num_bytes = allowed_bytes(bench, card_bytes)
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total_bytes), bench.device)
    return num_bytes


def prove_cap(bench: Bench, card_bytes: int) -> Row:
    """One tensor over the cap is refused, one a little under it is not."""
    if not bench.is_cuda:
        return {"bites": _is_refused(bench, card_bytes + 1, card_bytes), "allows": True, "allowed_bytes": card_bytes}
    num_bytes = limit(bench, card_bytes)
    room_bytes = num_bytes - torch.cuda.memory_reserved(bench.device)
    return {
        "bites": _is_refused(bench, room_bytes + TIGHT_BYTES, card_bytes),
        "allows": not _is_refused(bench, room_bytes - TIGHT_BYTES, card_bytes),
        "allowed_bytes": num_bytes,
    }


def _is_refused(bench: Bench, num_bytes: int, card_bytes: int) -> bool:
    meter = Meter(device=bench.device, cap_bytes=None if bench.is_cuda else card_bytes)
    try:
        with meter:
            torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    except (OutOfDeviceMemory, torch.OutOfMemoryError):
        return True
    finally:
        clear()
    return False


def measure_case(bench: Bench, case: CardCase) -> Row:
    """Predicted beside measured: bytes, verdict and outcome under the cap, and raw step times."""
    prediction = bench.predict_card(case)
    memory = prediction.memory
    assert memory is not None
    row: Row = {
        "card_bytes": case.card_bytes,
        "techniques": list(case.techniques),
        "held_back": case.is_held_back,
        "plan": describe(case.plan),
        "predicted_tensor_bytes": prediction.device_peak_bytes,
        "predicted_allocated_bytes": memory.allocated.value,
        "predicted_reserved_bytes": memory.reserved.value,
        "predicted_process_bytes": memory.process.value,
        "predicted_process_low_bytes": memory.process.low,
        "predicted_process_high_bytes": memory.process.high,
        "not_modelled": list(memory.not_modelled),
        "predicted_by_category": prediction.device_bytes_by_category,
        "predicted_moment": prediction.peak_moment,
        "verdict": prediction.verdict(case.card_bytes),
    }
    try:
        return {**row, "finished": True, **_take_steps(bench, case)}
    except HeadroomError as error:
        return {**row, "finished": False, "why_not": str(error)}
    finally:
        gc.collect()


def _take_steps(bench: Bench, case: CardCase) -> Row:
    device = bench.device
    if bench.is_cuda:
        limit(bench, case.card_bytes)
        workspace_bytes = reserve_workspaces(device)
    meter = Meter(device=device, cap_bytes=None if bench.is_cuda else case.card_bytes)
    with meter.translating():
        job = Job(spec=case.spec, workload=case.workload, device=device, draws_quickly=True)
        trainer = Trainer(
            job.build(case.plan.weights), plan=case.plan, workload=case.workload, device=device, meter=meter
        )
        try:
            batches = make_synthetic_batches(trainer.model, plan=case.plan, workload=case.workload)
            times = [_timed_step(trainer, batches) for _ in range(1 + NUM_STEPS)]
            peak = meter.peak()
            measured = {
                "allocated_bytes": peak.device_bytes,
                "by_category": peak.device_bytes_by_category,
                "measured_moment": peak.moment,
                "host_bytes": peak.host_bytes,
                "first_ms": round(times[0], 3),
                "step_ms": [round(value, 3) for value in times[1:]],
            }
            counters = (
                _read_counters(bench, workspace_bytes) if bench.is_cuda else {"reserved_bytes": peak.device_bytes}
            )
            return measured | counters
        finally:
            trainer.close(keep_weights=False)
            del trainer
            clear()


def _timed_step(trainer: Trainer, batches: Any) -> float:
    started_s = time.perf_counter()
    trainer.step(batches, learning_rate=trainer.workload.learning_rate)
    trainer.join()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return (time.perf_counter() - started_s) * 1000


def _read_counters(bench: Bench, workspace_bytes: int) -> Row:
    """torch's own, of the last step, and the driver's."""
    stats = torch.cuda.memory_stats(bench.device)
    return {
        "torch_allocated_bytes": stats["allocated_bytes.all.peak"],
        "torch_requested_bytes": stats["requested_bytes.all.peak"],
        "torch_reserved_bytes": stats["reserved_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"] - workspace_bytes,
        "num_segments": stats["segment.all.current"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "workspace_bytes": workspace_bytes,
        "process_bytes": bench.used_bytes(),
    }


def predicted_times(bench: Bench, cases: Sequence[CardCase], rows: Sequence[Row]) -> list[Row]:
    """One row of what ``time`` for each case that ran; the calibration comes from those that are not held back."""
    measured = {
        row["case"]: statistics.median(row["step_ms"]) for row in rows if row["what"] == "card" and row["finished"]
    }
    timed = [case for case in cases if case.name in measured]
    calibration = fit_calibration(
        TimedRun.from_prediction(bench.predict(case), measured_ms=measured[case.name]) for case in timed if not case.is_held_back
    )
    found = []
    for case in timed:
        predicted_ms, measured_ms = bench.predict(case, calibration=calibration).step_ms, measured[case.name]
        found.append(
            {
                "what": "time",
                "case": case.name,
                "held_back": case.is_held_back,
                "techniques": list(case.techniques),
                "predicted_ms": round(predicted_ms, 3),
                "measured_ms": round(measured_ms, 3),
                "error": predicted_ms / measured_ms - 1,
            }
        )
    return found
