"""Curves of what decoding runs on the CPU device: products of few rows with weights, and attention of one token over a cache.

A step's products are timed with operands that are in a cache, as a step has just made one of them. A token's are not like that:
of a model larger than the processor's caches each matrix comes from memory for a handful of rows, once a step, which takes up to
twice as long. What is copied to where it is used just before (streamed weights) is in a cache again. So both are timed.

Cards have no such curves: the shapes of ``matmuls.py`` are larger than their caches.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path

import torch

from optimizer.base.units import KIB, MIB
from optimizer.formats.matmul_dispatch import uses_onednn
from optimizer.hardware.curves import Curve, MatmulSort, attention_curve_name, matmul_curve_name
from optimizer.hardware.probe.clock import TimeShare, as_curve, quartile_s, random_tensor
from optimizer.hardware.probe.rates.matmuls import Point, without_call_s
from optimizer.runtime.layers.matmul_dispatch import asking_library, asks_library

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SIZES = ((16, 512), (1, 512), (64, 512), (4, 512))
"""Rows and features, in the order in which they are worth their time."""
_LIBRARY_SIZES = ((16, 512), (4, 1024), (64, 512), (2, 1280))
_SMALL_SIZES = ((1, 512), (4, 512), (16, 256))
"""Rows and features where a library makes the large products: its own sizes, and those of the others."""
_NUM_AT_ONCE = 8
"""Calls that are timed together, each of other operands."""
_RING_BYTES = {False: 8 * MIB, True: 64 * MIB}
"""Weights that take turns, warm and cold: more than an own cache of a core holds, and more than any that cores share."""
_CACHE_RING_BYTES = 48 * MIB
_LENGTHS = (64, 16, 256, 4, 1024)
_HEADS, _HEAD_SIZE, _MOST_SEQUENCES = 8, 64, 8


def find_cache_bytes() -> int | None:
    """The largest cache of the first processor; None where the system does not report it. The C library's answer is no
    good: it adds up all caches of the whole machine.
    """
    texts = [file.read_text().strip() for file in _CACHES.glob("index*/size")]
    return max((int(text.removesuffix("K")) * KIB for text in texts if text.endswith("K")), default=None)


def probe_rows(
    device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float, library_call_s: float = 0.0
) -> dict[str, Curve]:
    """Rates of products of few rows by FLOPs for each byte, under ``rows nt fp32`` and ``rows nt fp32 cold``; as
    ``matmuls.probe_matmuls`` where a library is asked for the large ones, and then also under ``small rows nt fp32``.
    """
    share = TimeShare(max_s)
    curves: dict[str, Curve] = {}
    if device.type != "cpu":
        return curves
    sorts = [
        (name, is_cold, sort, sizes)
        for name, dtype in dtypes.items()
        for is_cold in _RING_BYTES
        for sort, sizes in _sizes_of(dtype).items()
    ]
    for done, (name, is_cold, sort, sizes) in enumerate(sorts):
        own = TimeShare(share.part_s(len(sorts) - done))
        points: list[Point] = []
        for index, size in enumerate(sizes):
            if index and not own.left_s:
                break
            max_each_s = own.part_s(len(sizes) - index)
            points.append(_time_rows(size, dtypes[name], _RING_BYTES[is_cold], max_s=max_each_s, library_call_s=library_call_s))
        curves[matmul_curve_name(sort, form="nt", dtype=name, is_cold=is_cold)] = as_curve(points)
    return curves


def _sizes_of(dtype: torch.dtype) -> dict[MatmulSort, tuple[tuple[int, int], ...]]:
    """Sizes by the sort of product that they measure."""
    asks = asks_library(torch.empty(0, dtype=dtype))
    return {"rows": _LIBRARY_SIZES, "small rows": _SMALL_SIZES} if asks else {"rows": _SIZES}


def probe_token_attention(device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float) -> dict[str, Curve]:
    """Bytes per second by bytes moved for each byte that is written, which is the length of the cache, twice; under
    ``token fp32``. The caches are half full, as tensors that are made for a whole generation are on average, and in no cache
    of the processor's.
    """
    share = TimeShare(max_s)
    curves: dict[str, Curve] = {}
    if device.type != "cpu":
        return curves
    for done, (name, dtype) in enumerate(dtypes.items()):
        own = TimeShare(share.part_s(len(dtypes) - done))
        points: list[Point] = []
        for index, length in enumerate(_LENGTHS):
            if index and not own.left_s:
                break
            points.append(_time_token(length, dtype, max_s=own.part_s(len(_LENGTHS) - index)))
        curves[attention_curve_name("token", dtype=name)] = as_curve(points)
    return curves


def _time_rows(
    size: tuple[int, int], dtype: torch.dtype, ring_bytes: int, *, max_s: float, library_call_s: float
) -> Point:
    device = torch.device("cpu")
    rows, features = size
    one = random_tensor((features, features), device, dtype)
    ring = cycle([one.clone() for _ in range(max(1, ring_bytes // one.nbytes))])
    x = random_tensor((rows, features), device, dtype)
    is_library = asks_library(x) and uses_onednn(rows, features, features)

    def run() -> None:
        for _ in range(_NUM_AT_ONCE):
            x @ next(ring).t()

    flops = 2.0 * rows * features * features
    seconds = quartile_s(asking_library()(run) if is_library else run, device, max_s=max_s) / _NUM_AT_ONCE
    return flops / (one.nbytes + 2 * x.nbytes), flops / without_call_s(library_call_s * is_library, seconds)


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
