"""Facts about the scratch of oneDNN's products in bf16 and fp32 on every processor.

Needs no processor with AVX-512; ``test_cpu_scratch.py`` compares the bytes with what torch's profiler sees, where there is one.
"""

import pytest

from optimizer.estimate.cpu.matmul_scratch import LEAST_WORK, hold_grouped_product, hold_product

PRODUCTS = [
    ((1, 512, 192, 768), "nn", 2),
    ((1, 300, 24_000, 100), "nt", 16),
    ((6, 300, 1, 64), "tt", 4),
    ((1, 40, 384, 512), "nn", 2),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("sides", "form", "num_threads"), PRODUCTS)
def test_a_product_that_is_added_holds_sums_where_the_product_alone_does_not(
    sides: tuple[int, ...], form: str, num_threads: int, dtype: str
) -> None:
    alone, added = (
        hold_product(sides, form=form, dtype=dtype, num_threads=num_threads, is_added=is_added) for is_added in (False, True)
    )
    assert added >= alone > 0
    assert (alone == added) == (dtype == "bf16" or sides[2] >= 20_000), "threads that divide the depth have sums anyway"


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
