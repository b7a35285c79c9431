"""Counts become positions."""

from typing import Any

import pytest

from optimizer.search.arrangements import PlanLine, arrange, arrange_offload_only, orders_by_kind, summarize


def test_offloaded_blocks_stand_first_and_kept_ones_last() -> None:
    rest = ("recompute", "recompute", "keep", "keep")
    assert arrange(rest, num_offload=1, arrangement="first") == ("offload", *rest)


def test_spread_offload_takes_turns_with_blocks_that_do_not_keep() -> None:
    assert arrange(("recompute", "selective", "keep"), num_offload=2, arrangement="spread") == (
        "offload",
        "recompute",
        "offload",
        "selective",
        "keep",
    )


def test_without_recompute_offload_takes_turns_with_keep() -> None:
    assert arrange_offload_only(4, num_keep=2, arrangement="spread") == ("offload", "keep", "offload", "keep")
    assert arrange_offload_only(4, num_keep=3, arrangement="first") == ("offload", "keep", "keep", "keep")


@pytest.mark.parametrize("arrangement", ["first", "spread"])
@pytest.mark.parametrize("steps", [("recompute", "keep"), ("recompute", "selective", "keep")])
@pytest.mark.parametrize("num_offload", [0, 1, 3, 5])
def test_each_plan_of_a_line_has_one_block_one_step_further(
    num_offload: int, steps: tuple[str, ...], arrangement: str
) -> None:
    line = PlanLine(num_blocks=5, num_offload=num_offload, steps=steps, arrangement=arrangement)
    levels = [
        sum(steps.index(choice) for choice in line.per_block(index) if choice in steps) for index in _indices(line)
    ]
    assert levels == list(_indices(line))
    assert all(line.per_block(index).count("offload") == num_offload for index in _indices(line))
    assert all(len(line.per_block(index)) == 5 for index in _indices(line))


def test_a_line_goes_from_all_of_the_first_step_to_all_of_the_last() -> None:
    line = PlanLine(num_blocks=4, num_offload=1, offload="offload_disk", steps=("recompute", "selective", "keep"))
    assert line.per_block(0) == ("offload_disk", "recompute", "recompute", "recompute")
    assert line.per_block(4) == ("offload_disk", "selective", "selective", "keep")
    assert line.per_block(line.length) == ("offload_disk", "keep", "keep", "keep")


def test_a_line_without_other_blocks_goes_from_offload_to_keep() -> None:
    line = PlanLine(num_blocks=3, num_offload=None, offload="offload_remote")
    assert line.per_block(0) == ("offload_remote",) * 3
    assert line.per_block(line.length) == ("keep",) * 3


def test_an_order_puts_a_row_on_other_blocks() -> None:
    line = PlanLine(num_blocks=4, order=(1, 3, 0, 2))
    assert line.per_block(1) == ("recompute", "recompute", "keep", "recompute")
    assert line.per_block(2) == ("keep", "recompute", "keep", "recompute")


def test_each_kind_of_block_comes_first_once() -> None:
    assert orders_by_kind((0, 1, 0, 1)) == [(0, 2, 1, 3), (1, 3, 0, 2)]


def test_kinds_with_most_blocks_come_first() -> None:
    kinds = (0, 1, 1, 2, 2, 3, 3)
    assert [order[0] for order in orders_by_kind(kinds)] == [1, 3, 5]


def test_blocks_all_alike_have_no_other_order() -> None:
    assert orders_by_kind((0, 0, 0)) == []


def test_a_summary_names_only_what_is_used() -> None:
    assert summarize(("recompute", "keep", "keep")) == "keep 2, recompute 1"
    assert summarize(("offload_disk", "selective", "offload")) == "selective 1, offload 1, offload to disk 1"


def _indices(line: Any) -> range:
    return range(line.length + 1)
