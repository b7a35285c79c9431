"""Rates of copies between device and host, each way alone and under load, and of memory touched for the first time.

On CUDA between pinned and device memory: alone, beside products on the main stream, and both ways at once. An idle link
sleeps and reads low, and a step copies beside compute, so what counts is the rate beside compute. On the CPU device the
thread that computes copies, into memory taken afresh, as its offloader does: there is no other load.
"""

import mmap
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from optimizer.base.units import MIB
from optimizer.hardware.probe.clock import MAX_REPEATS, TimeShare, quartile_s, random_tensor

_COPY_BYTES = {"cpu": 2 * MIB, "cuda": 256 * MIB}
_NUM_COPIES = 16
"""Copies on the CPU, of memory that no cache holds any more, into more of the same."""
_LOAD_SIZE = 4096
_FRESH_BYTES = 48 * MIB
ALONE, LOADED, BOTH = "alone", "beside compute", "both ways"


def probe_links(device: torch.device, *, max_s: float) -> dict[str, float]:
    """Bytes per second under ``device_to_host alone`` and the like."""
    if device.type == "cpu":
        sources = torch.zeros(_NUM_COPIES, _COPY_BYTES["cpu"], dtype=torch.uint8).unbind()
        copies: deque[torch.Tensor] = deque(maxlen=_NUM_COPIES)

        def copy_all() -> None:
            for source in sources:
                copies.append(torch.empty_like(source).copy_(source))

        rate = _NUM_COPIES * _COPY_BYTES["cpu"] / quartile_s(copy_all, device, max_s=max_s)
        return {f"{way} {ALONE}": rate for way in ("device_to_host", "host_to_device")}
    return _probe_card(device, max_each_s=max_s / 6)


def rate_in_step(links: dict[str, float], way: str) -> float:
    """Rate that a step has of a link."""
    return links.get(f"{way} {LOADED}", links[f"{way} {ALONE}"])


def probe_fresh_memory(device: torch.device, *, max_s: float) -> float | None:
    """Bytes per second of the host's pages as the system hands them out; None on CUDA, whose memory is kept by its allocator."""
    if device.type != "cpu":
        return None
    kept = torch.zeros(_FRESH_BYTES, dtype=torch.uint8)

    def touch() -> None:
        with mmap.mmap(-1, _FRESH_BYTES) as pages:
            fresh = torch.frombuffer(pages, dtype=torch.uint8)
            fresh.fill_(1)
            del fresh

    again_s = quartile_s(lambda: kept.fill_(1), device, max_s=max_s / 2)
    fresh_s = quartile_s(touch, device, max_s=max_s / 2)
    return _FRESH_BYTES / max(fresh_s - again_s, fresh_s / 20)


def _probe_card(device: torch.device, *, max_each_s: float) -> dict[str, float]:
    num_bytes = _COPY_BYTES["cuda"]
    hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_device = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    stream: Any = torch.cuda.Stream
    streams = [stream(device) for _ in range(2)]
    matrix = random_tensor((_LOAD_SIZE, _LOAD_SIZE), device, torch.float32)
    copies: dict[str, Callable[[], object]] = {
        "device_to_host": lambda: hosts[0].copy_(on_device[0], non_blocking=True),
        "host_to_device": lambda: on_device[1].copy_(hosts[1], non_blocking=True),
    }
    rates: dict[str, float] = {}
    for index, (way, copy) in enumerate(copies.items()):
        other = list(copies.values())[1 - index]
        loads: dict[str, Callable[[], object]] = {
            ALONE: lambda: None,
            LOADED: lambda: [matrix @ matrix for _ in range(8)],
            BOTH: lambda other=other: _run_on_stream(streams[1], other),  # type: ignore[misc]
        }
        for name, load in loads.items():
            seconds = _copy_under_load(copy, load, streams[0], device, max_s=max_each_s)
            rates[f"{way} {name}"] = num_bytes / seconds
    return rates


def _copy_under_load(
    copy: Callable[[], object], load: Callable[[], object], stream: Any, device: torch.device, *, max_s: float
) -> float:
    """The load begins first; the copy is timed on its own stream."""
    event: Any = torch.cuda.Event
    durations: list[float] = []
    share = TimeShare(max_s)
    while len(durations) < 3 or (share.left_s and len(durations) < MAX_REPEATS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        load()
        with torch.cuda.stream(stream):
            begin.record()
            copy()
            end.record()
        torch.cuda.synchronize(device)
        durations.append(float(begin.elapsed_time(end)) / 1000)
    return max(sorted(durations[1:])[len(durations[1:]) // 4], 1e-9)


def _run_on_stream(stream: Any, run: Callable[[], object]) -> object:
    with torch.cuda.stream(stream):
        return run()
