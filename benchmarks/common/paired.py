"""Peaks of counted runs and times of uncounted ones, taken in turn: A B C, C B A, ... Ratios are medians of pairs."""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.common.alternatives import Contender, Factory, gradients_in_favour_bytes
from benchmarks.common.record import Row, clear
from optimizer.runtime.meter.meter import Meter
from optimizer.workload import TrainingWorkload


def measure_peak(make: Factory, device: torch.device, *, num_steps: int = 2, cap_bytes: int | None = None) -> Row:
    """Measure the peak of a steady step; the contender is gone afterwards."""
    meter = Meter(device=device, cap_bytes=cap_bytes)
    with meter.translating():
        contender = make(meter)
    try:
        losses = [contender.step() for _ in range(num_steps)]
        peak = meter.peak()
        in_favour_bytes = gradients_in_favour_bytes(contender, device)
        tiers = getattr(getattr(contender, "trainer", None), "tiers", None)
        return {
            "peak_bytes": peak.device_bytes - in_favour_bytes,
            "host_peak_bytes": peak.host_bytes,
            "moment": peak.moment,
            "by_category": peak.device_bytes_by_category,
            "disk_peak_bytes": getattr(tiers, "disk_peak_bytes", 0),
            "losses": losses,
        }
    finally:
        contender.close()
        del contender
        clear()


def race(contenders: Mapping[str, Factory], *, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender's steps, taken in turn, in reverse order every second round; the first step is left out."""
    built: dict[str, Contender] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for name, make in contenders.items():
            built[name] = make(None)
            built[name].step()
        for index in range(num_rounds):
            order = list(built) if index % 2 == 0 else list(reversed(built))
            for name in order:
                start_s = time.perf_counter()
                built[name].step()
                times[name].append((time.perf_counter() - start_s) * 1000)
    finally:
        for contender in built.values():
            contender.close()
        built.clear()
        clear()
    return times


def paired_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), 4)


def tokens_per_s(times_ms: Sequence[float], workload: TrainingWorkload) -> float:
    return round(workload.tokens_per_step / statistics.median(times_ms) * 1000, 1)
