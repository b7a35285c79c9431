"""Times something again and again within its share of the probe's time; the first quartile counts.

What disturbs a run only makes it longer, so a low quantile is nearer to what the machine can do than a median; the least of all
would be the luck of one run. Finished runs say how much is disturbed in practice (``hardware/calibration.py``).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, harmonic_mean
from typing import Any

import torch

from optimizer.hardware.curves import Curve

MAX_REPEATS = 15
_MAX_DRAWN = 1 << 17
_NEAR = 1.15
"""Sizes nearer than this are one point of a curve."""
now_s: Callable[[], float] = time.perf_counter
"""Clock of the CPU; by its module, so that a benchmark on a busy machine can count its own thread's time alone."""


def quartile_s(run: Callable[[], object], device: torch.device, *, max_s: float) -> float:
    """Time of one run, after one to warm up: at least one more, then as many as the time allows."""
    started = time.perf_counter()
    timed_s(run, device)
    durations = [timed_s(run, device)]
    while len(durations) < MAX_REPEATS and time.perf_counter() - started + durations[-1] < max_s:
        durations.append(timed_s(run, device))
    return max(sorted(durations)[len(durations) // 4], 1e-9)


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = now_s()
        run()
        return now_s() - started
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with torch.cuda.device(device):
        begin.record()
        run()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class TimeShare:
    """A stretch of the probe's time."""

    def __init__(self, max_s: float) -> None:
        self._end_s = time.perf_counter() + max_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.perf_counter())

    def part_s(self, count: int) -> float:
        """Seconds for each of so many that are still to come."""
        return self.left_s / max(count, 1)


def random_tensor(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A random tensor from its own generator, so that the process's random state stays as it was. Large ones repeat:
    drawing would take longer than what is timed.
    """
    generator = torch.Generator(device).manual_seed(0)
    num_elements = math.prod(shape)
    drawn = torch.randn(min(num_elements, _MAX_DRAWN), generator=generator, device=device).to(dtype)
    return drawn.repeat(-(-num_elements // _MAX_DRAWN))[:num_elements].view(shape)


def better_of(visits: Iterable[Mapping[str, Curve]]) -> dict[str, Curve]:
    """The better rate of each point of curves that were measured more than once: what disturbs a machine lasts longer than the
    repeats of one size.
    """
    points: dict[str, dict[float, float]] = {}
    for visit in visits:
        for name, curve in visit.items():
            known = points.setdefault(name, {})
            known.update({size: max(rate, known.get(size, 0.0)) for size, rate in curve})
    return {name: tuple(sorted(known.items())) for name, known in points.items()}


def as_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Sorted by size; of sizes next to each other the rate of their mean time."""
    merged: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if merged and point[0] < merged[-1][0][0] * _NEAR:
            merged[-1].append(point)
        else:
            merged.append([point])
    return tuple((fmean(size for size, _ in group), harmonic_mean([rate for _, rate in group])) for group in merged)
