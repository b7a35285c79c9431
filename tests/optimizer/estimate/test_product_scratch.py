"""What products in bf16 hold where oneDNN makes them, against what torch's profiler saw on a processor with AVX-512.

Needs no such processor; ``test_cpu_scratch.py`` asks the profiler itself, where there is one.
"""

import pytest

from optimizer.estimate.product_scratch import LEAST_WORK, hold_grouped_product, hold_product

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
]


@pytest.mark.parametrize(("sides", "form", "num_threads", "num_bytes"), SEEN)
def test_a_product_holds_what_was_seen(sides, form, num_threads, num_bytes):
    assert hold_product(sides, form=form, num_threads=num_threads) == num_bytes


def test_small_products_are_torchs_own_and_hold_nothing():
    assert hold_product((1, 16, 16, 16), form="nn", num_threads=4) == 0 < hold_product((1, 16, 17, 16), form="nn", num_threads=4)
    assert hold_grouped_product((1, 16, 16, 16), form="nt", num_threads=4) == 0
    assert LEAST_WORK == 16**3


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("sides", [(1, 40, 64, 96), (1, 700, 600, 130), (1, 2500, 64, 300)])
def test_no_group_holds_more_than_is_said_of_all(sides, num_threads):
    """Forward groups divide the rows, in the weights' gradient the depth."""
    count, rows, depth, columns = sides
    for form, largest, grouped in (
        ("nn", rows, lambda size: (count, size, depth, columns)),
        ("tn", rows, lambda size: (count, depth, size, columns)),
    ):
        held = hold_grouped_product(grouped(largest), form=form, num_threads=num_threads)
        assert held >= max(hold_product(grouped(size), form=form, num_threads=num_threads) for size in range(1, largest + 1))
