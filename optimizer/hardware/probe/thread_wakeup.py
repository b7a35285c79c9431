"""Cost of waking the threads of the CPU device, and a way to time what one of them does alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from optimizer.hardware.probe import clock
from optimizer.hardware.thread_wakeup import ASLEEP_S, GRAIN_SIZE

_PAUSE_S = 1.5 * ASLEEP_S
_MOST = 400


def probe_wake_s(device: torch.device, *, max_s: float) -> float:
    """Extra time of an op that threads share after so long a pause that the others sleep; 0 where nobody has to be woken.

    The difference of the medians: waking is no disturbance of the op here, but what is measured.
    """
    if device.type != "cpu" or torch.get_num_threads() == 1:
        return 0.0
    share = clock.TimeShare(max_s)
    x = torch.ones(2 * GRAIN_SIZE)
    run = partial(torch.mul, x, 2.0, out=torch.empty_like(x))
    clock.timed_s(run, device)
    awake: list[float] = []
    asleep: list[float] = []
    while len(awake) < _MOST and (share.left_s or not awake):
        for pause_s, timed in ((0.0, awake), (_PAUSE_S, asleep)):
            run()
            _pause(pause_s)
            timed.append(clock.timed_s(run, device))
    return max(0.0, median(asleep) - median(awake))


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """One thread: what ops cost beside their kernels has no waking in it then. Of the CPU device."""
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device.type == "cpu":
            torch.set_num_threads(num_threads)


def _pause(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass
