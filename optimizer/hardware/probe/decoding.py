"""Curves of what decoding runs on the CPU device: products of few rows with weights, and attention of one token over a cache.

A step's products are timed with operands that are in a cache, as a step has just made one of them. A token's are not like that:
of a model larger than the processor's caches each matrix comes from memory for a handful of rows, once a step, which takes up to
twice as long. What is copied to where it is used just before (streamed weights) is in a cache again. So both are timed.

Cards have no such curves: the shapes of ``products.py`` are larger than their caches.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path

import torch

from optimizer.hardware.machine import Curve
from optimizer.hardware.probe.clock import Share, as_curve, quartile_s, random_tensor
from optimizer.hardware.probe.products import Point
from optimizer.units import KIB, MIB

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_ROWS = (16, 1, 64, 4)
"""In the order in which they are worth their time."""
_FEATURES = 512
_NUM_AT_ONCE = 8
"""Calls that are timed together, each of other operands."""
_RING_BYTES = {"": 8 * MIB, " cold": 64 * MIB}
"""Of weights in turn: more than an own cache of a core holds, and more than any that cores share."""
_CACHE_RING_BYTES = 48 * MIB
_LENGTHS = (64, 16, 256, 4, 1024)
_HEADS, _HEAD_SIZE, _MOST_SEQUENCES = 8, 64, 8


def find_cache_bytes() -> int | None:
    """The largest cache of the first processor; None where the system does not tell. The C library's answer is no good: it adds
    up all caches of the whole machine.
    """
    texts = [file.read_text().strip() for file in _CACHES.glob("index*/size")]
    return max((int(text.removesuffix("K")) * KIB for text in texts if text.endswith("K")), default=None)


def probe_rows(device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float) -> dict[str, Curve]:
    """By FLOPs for each byte, under ``rows nt fp32`` and ``rows nt fp32 cold``."""
    share = Share(max_s)
    curves: dict[str, Curve] = {}
    if device.type != "cpu":
        return curves
    sorts = [(name, suffix) for name in dtypes for suffix in _RING_BYTES]
    for done, (name, suffix) in enumerate(sorts):
        own = Share(share.of(len(sorts) - done))
        points: list[Point] = []
        for index, rows in enumerate(_ROWS):
            if index and not own.left_s:
                break
            points.append(_time_rows(rows, dtypes[name], _RING_BYTES[suffix], max_s=own.of(len(_ROWS) - index)))
        curves[f"rows nt {name}{suffix}"] = as_curve(points)
    return curves


def probe_token_attention(device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float) -> dict[str, Curve]:
    """Bytes per second by bytes moved for each byte that is written, which is the length of the cache, twice; under
    ``token fp32``. The caches are half full, as tensors that are made for a whole generation are on average, and in no cache
    of the processor's.
    """
    share = Share(max_s)
    curves: dict[str, Curve] = {}
    if device.type != "cpu":
        return curves
    for done, (name, dtype) in enumerate(dtypes.items()):
        own = Share(share.of(len(dtypes) - done))
        points: list[Point] = []
        for index, length in enumerate(_LENGTHS):
            if index and not own.left_s:
                break
            points.append(_time_token(length, dtype, max_s=own.of(len(_LENGTHS) - index)))
        curves[f"token {name}"] = as_curve(points)
    return curves


def _time_rows(rows: int, dtype: torch.dtype, ring_bytes: int, *, max_s: float) -> Point:
    device = torch.device("cpu")
    one = random_tensor((_FEATURES, _FEATURES), device, dtype)
    ring = cycle([one.clone() for _ in range(ring_bytes // one.nbytes)])
    x = random_tensor((rows, _FEATURES), device, dtype)

    def run() -> None:
        for _ in range(_NUM_AT_ONCE):
            x @ next(ring).t()

    flops = 2.0 * rows * _FEATURES * _FEATURES
    return flops / (one.nbytes + 2 * x.nbytes), flops / (quartile_s(run, device, max_s=max_s) / _NUM_AT_ONCE)


def _time_token(length: int, dtype: torch.dtype, *, max_s: float) -> Point:
    device = torch.device("cpu")
    sequences = max(1, min(_MOST_SEQUENCES, 2048 // length))
    query = random_tensor((sequences, _HEADS, 1, _HEAD_SIZE), device, dtype)
    whole = random_tensor((sequences, _HEADS, 2 * length, _HEAD_SIZE), device, dtype)
    ring = cycle(list(_pairs(whole, length)))

    def run() -> None:
        for _ in range(_NUM_AT_ONCE):
            torch.nn.functional.scaled_dot_product_attention(query, *next(ring))

    moved_bytes = 2.0 * query.nbytes + whole.nbytes
    return moved_bytes / query.nbytes, moved_bytes / (quartile_s(run, device, max_s=max_s) / _NUM_AT_ONCE)


def _pairs(whole: torch.Tensor, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(max(1, _CACHE_RING_BYTES // (2 * whole.nbytes))):
        yield whole.clone()[:, :, :length], whole.clone()[:, :, :length]
