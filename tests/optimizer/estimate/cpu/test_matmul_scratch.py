"""Predicted scratch of oneDNN's products in bf16 and fp32 equals what torch's profiler saw on a processor with AVX-512.

Needs no such processor; ``test_cpu_scratch.py`` asks the profiler itself, where there is one.
"""

import pytest

from optimizer.estimate.cpu.matmul_scratch import LEAST_WORK, hold_grouped_product, hold_product

SEEN = [
    ((1, 867, 37, 256), "nn", 1, 22_272),
    ((3, 45, 201, 3), "nt", 3, 89_940),
    ((1, 256, 513, 2000), "tn", 1, 1_393_792),
    ((1, 700, 2048, 16), "tn", 2, 603_264),
    ((1, 100, 800, 320), "tn", 4, 636_416),
    ((8, 148, 1024, 8), "tt", 16, 2_385_408),
    ((1, 64, 7, 16), "nn", 8, 46_464),
    ((1, 1, 1390, 5), "nt", 2, 132_776),
    ((1, 1435, 117, 1), "nt", 1, 17_664),
    ((1, 128, 2048, 1553), "tn", 8, 1_660_416),
    ((1, 1024, 4096, 64), "nn", 1, 738_432),
    ((3, 1024, 4096, 64), "nn", 2, 1_476_352),
    ((1, 1, 2048, 100), "nt", 3, 200_112),
]
SEEN_IN_FP32 = {
    "nothing is laid out": ((1, 512, 192, 768), "nn", 2, 1_408),
    "the second behind a transpose": ((1, 512, 192, 768), "nt", 2, 99_840),
    "the first behind a transpose": ((1, 512, 192, 768), "tn", 2, 394_752),
    "the second's rows meet": ((1, 40, 384, 512), "nn", 2, 198_144),
    "too few rows for that": ((1, 40, 384, 512), "nn", 16, 10_368),
    "just enough": ((1, 41, 384, 512), "nn", 16, 1_583_360),
    "the first's rows do not matter": ((1, 1024, 4096, 64), "nn", 1, 768),
    "twice the rows": ((1, 768, 128, 300), "tn", 1, 197_504),
    "too many for that": ((1, 769, 128, 300), "tn", 1, 79_744),
    "several products": ((2, 768, 64, 300), "tn", 1, 66_432),
    "threads divide any depth": ((1, 100, 3000, 320), "tn", 8, 1_451_904),
    "of one row": ((1, 1, 3000, 100), "nn", 4, 4_416),
    "a huge depth": ((1, 300, 24_000, 100), "nn", 8, 965_376),
    "many columns": ((1, 512, 100, 20_480), "tn", 1, 115_584),
    "one column": ((1, 640, 64, 1), "nn", 1, 17_280),
}
SEEN_ADDED = [
    ((1, 512, 192, 768), "nn", "fp32", 2, 132_608),
    ((1, 300, 24_000, 100), "nt", "fp32", 16, 6_124_928),
    ((6, 300, 1, 64), "tt", "fp32", 4, 156_416),
    ((6, 300, 1, 64), "tt", "bf16", 4, 172_928),
    ((1, 512, 192, 768), "nn", "bf16", 2, 181_888),
]


@pytest.mark.parametrize(("sides", "form", "num_threads", "num_bytes"), SEEN)
def test_a_product_holds_what_was_seen(sides: tuple[int, ...], form: str, num_threads: int, num_bytes: int) -> None:
    assert hold_product(sides, form=form, dtype="bf16", num_threads=num_threads) == num_bytes


@pytest.mark.parametrize("name", SEEN_IN_FP32)
def test_a_product_in_fp32_holds_what_was_seen(name: str) -> None:
    sides, form, num_threads, num_bytes = SEEN_IN_FP32[name]
    assert hold_product(sides, form=form, dtype="fp32", num_threads=num_threads) == num_bytes


@pytest.mark.parametrize(("sides", "form", "dtype", "num_threads", "num_bytes"), SEEN_ADDED)
def test_a_product_that_is_added_holds_sums_in_either_dtype(
    sides: tuple[int, ...], form: str, dtype: str, num_threads: int, num_bytes: int
) -> None:
    assert hold_product(sides, form=form, dtype=dtype, num_threads=num_threads, is_added=True) == num_bytes
    alone = hold_product(sides, form=form, dtype=dtype, num_threads=num_threads)
    assert (alone == num_bytes) == (dtype == "bf16" or sides[2] >= 20_000), "threads that divide the depth have sums anyway"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_small_products_are_torchs_own_and_hold_nothing(dtype: str) -> None:
    held = [hold_product((1, 16, depth, 16), form="nn", dtype=dtype, num_threads=4) for depth in (16, 17)]
    assert held[0] == 0 < held[1]
    for form in ("nt", "tn"):
        assert hold_grouped_product((1, 16, 16, 16), form=form, dtype=dtype, num_threads=4) == 0
    assert LEAST_WORK == 16**3


GROUPED = [(1, 40, 64, 96), (1, 700, 600, 130), (1, 2500, 64, 300), (1, 900, 2100, 1), (1, 1100, 4096, 24), (1, 600, 2048, 512)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("sides", GROUPED)
def test_no_group_holds_more_than_is_said_of_all(sides: tuple[int, ...], dtype: str, num_threads: int) -> None:
    """Forward groups divide the rows, in the weights' gradient the depth."""
    count, rows, depth, columns = sides
    for form, largest, grouped in (
        ("nn", rows, lambda size: (count, size, depth, columns)),
        ("nt", rows, lambda size: (count, size, depth, columns)),
        ("tn", rows, lambda size: (count, depth, size, columns)),
    ):
        held = hold_grouped_product(grouped(largest), form=form, dtype=dtype, num_threads=num_threads)
        sizes = {*range(1, largest + 1, 7), min(40, largest), min(41, largest), largest}
        assert held >= max(hold_product(grouped(size), form=form, dtype=dtype, num_threads=num_threads) for size in sizes)
