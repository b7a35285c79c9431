"""Counts of records: those that are there, those that come and go, and the sums over many tokens."""

import pytest

from optimizer.formats.kv_packing import KvLayout, KvShape

SHAPE = KvShape(batch_size=2, num_heads=4, key_dim=128, value_dim=128, element_bytes=2)


def layout_of(dtype: str = "int4", *, capacity: int = 1000, window: int | None = None) -> KvLayout:
    return KvLayout(shape=SHAPE, dtype=dtype, capacity=capacity, window=window)


@pytest.mark.parametrize("dtype", ["same", "int8", "int4"])
@pytest.mark.parametrize("window", [None, 2, 63, 64, 65, 100, 300, 2000])
def test_sums_over_tokens_are_those_of_each(dtype: str, window: int | None) -> None:
    layout = layout_of(dtype, window=window)
    for low, high in ((1, 1), (1, 500), (63, 66), (90, 470), (400, 999)):
        each = range(low, high + 1)
        assert layout.total_brought(low, high) == sum(map(layout.num_brought, each))
        assert layout.total_sent(low, high) == sum(map(layout.num_sent, each))


@pytest.mark.parametrize("window", [2, 63, 64, 65, 66, 100, 128, 129, 300])
def test_there_is_room_for_all_that_a_window_sees_and_no_more(window: int) -> None:
    layout = layout_of(window=window)
    needed = [layout.num_packed(seen + 1) - layout.first_block(seen) for seen in range(1, 1000)]
    assert max(needed) == layout.num_records


def test_no_token_is_packed_before_another_comes_after_64() -> None:
    layout = layout_of()
    assert [layout.num_packed(seen) for seen in (0, 1, 64, 65, 128, 129)] == [0, 0, 0, 1, 1, 2]
    assert layout_of(capacity=64).num_records == 0
    assert layout_of(capacity=65).num_records == 1


def test_four_bits_and_their_steps_are_a_quarter_of_16() -> None:
    """Keys and values each have two numbers for 64 elements: 4.5 bits an element."""
    assert layout_of("int4").record_bytes * 8 == 4.5 * 64 * 2 * 4 * 256
    assert layout_of("int8").record_bytes * 8 == (8 + 16 / 128) * 64 * 2 * 4 * 256
