"""Notices other work on the machine while it is probed, and how many times too slow its prices may be for it.

Two signs, of which the worse counts. A yardstick, fixed work of torch's own on the probed device, is timed between the
probe's parts: alone on a machine its times agree. And the system's count of processor time says what others took of the
cores that this process may use (Linux; elsewhere, and where a quota limits the process, the yardstick alone decides).

Nothing is corrected by it: it widens the interval of times until finished runs correct it (``estimate/time_interval.py``),
and is said. *Not seen*: others that are as busy all the time without a core's being wanted twice, as on the memory's bus
alone.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from optimizer.hardware.probe.clock import now_s, random_tensor, timed_s

NOTABLE_SLOWDOWN = 1.25
"""Repeats of one piece of work lie that far apart on a machine that is left alone; below it nothing is said."""
_NUM_REPEATS = 6
_YARDSTICK = {"cpu": (256, 1 << 20), "cuda": (2048, 1 << 25)}
"""Rows of a square product, and elements that are added up: about 1 ms."""
_LEAST_FREE_SHARE = 0.1
"""Share of the cores that a probe is taken to have got at least."""
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Fields of a line of /proc/stat: user, nice, system, interrupts of two kinds, and what a hypervisor gave to others."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Other work that was seen during a probe."""

    pace: float
    """Pace of the yardstick: its time in a slow moment (third quartile of all) over that in its best."""
    others_cores: float
    """Cores that other processes kept busy, of those that this one may use; 0 where the system does not report it."""
    num_cores: int
    num_threads: int
    """Threads of the probe."""

    @property
    def slowdown(self) -> float:
        """Factor by which the machine may have been slower than by itself; exactly 1 where nothing is to be said."""
        free_cores = max(self.num_cores - self.others_cores, _LEAST_FREE_SHARE * self.num_cores)
        found = max(self.pace, min(self.num_threads, self.num_cores) / free_cores)
        return round(found, 2) if found >= NOTABLE_SLOWDOWN else 1.0

    def describe(self) -> str:
        """A sentence with what to do; empty where the machine was left alone."""
        if self.slowdown == 1.0:
            return ""
        return (
            f"the machine was busy: other programs kept {self.others_cores:.1f} of {self.num_cores} cores, and the same work "
            f"took up to {self.pace:.1f} times its least; times may be {self.slowdown:.1f} times too long, which intervals "
            "allow for. Probe again when nothing else runs; finished jobs correct it, too"
        )


class Watch:
    """Looks at the machine from its making on, each time that ``look`` is called."""

    def __init__(self, device: torch.device) -> None:
        size, num_elements = _YARDSTICK[device.type]
        self._device = device
        self._square = random_tensor((size, size), device, torch.float32)
        self._long = random_tensor((num_elements,), device, torch.float32)
        self._looks_s: list[float] = []
        self._work()
        self._processors = _Processors.now()

    def look(self) -> None:
        """Time the yardstick; some milliseconds."""
        self._looks_s.append(_first_quartile([timed_s(self._work, self._device) for _ in range(_NUM_REPEATS)]))

    def judge(self) -> Disturbance:
        """Judge what was seen until now, one look at least."""
        processors = _Processors.now()
        return Disturbance(
            pace=_pace(self._looks_s),
            others_cores=processors.others_since(self._processors),
            num_cores=processors.num_cores,
            num_threads=torch.get_num_threads() if self._device.type == "cpu" else 1,
        )

    def _work(self) -> None:
        torch.mm(self._square, self._square)
        torch.sum(self._long)


def _first_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _pace(looks_s: Sequence[float]) -> float:
    ordered = sorted(looks_s)
    return ordered[3 * len(ordered) // 4] / max(ordered[0], 1e-9)


@dataclass(frozen=True, kw_only=True)
class _Processors:
    """Processor seconds until now, on the cores that this process may use."""

    at_s: float
    all_s: float | None
    """Time that all processes kept processors busy; None where the system does not report it."""
    own_s: float
    num_cores: int

    @classmethod
    def now(cls) -> "_Processors":
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        return cls(at_s=now_s(), all_s=_busy_s(cores), own_s=time.process_time(), num_cores=len(cores))

    def others_since(self, before: "_Processors") -> float:
        """Number of cores that others kept busy meanwhile."""
        if self.all_s is None or before.all_s is None or self.at_s <= before.at_s:
            return 0.0
        others_s = self.all_s - before.all_s - (self.own_s - before.own_s)
        return min(max(others_s / (self.at_s - before.at_s), 0.0), float(self.num_cores))


def _busy_s(cores: set[int]) -> float | None:
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    by_core = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("cpu")}
    rows = [by_core[name] for name in (f"cpu{core}" for core in cores) if name in by_core]
    if len(rows) < len(cores):
        return None
    return sum(int(row[index]) for row in rows for index in _BUSY_FIELDS if index < len(row)) / ticks_per_s
