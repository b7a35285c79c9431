"""Room for a whole process is found by trying smaller budgets for its tensors, few of them and none in vain."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from optimizer.base.intervals import ByteInterval
from optimizer.estimate.prediction import CardMemory, Verdict
from optimizer.search.check.card_fit import CardFit, Outpaced, find_room

CARD_BYTES = 10_000


@dataclass(frozen=True)
class Predicted:
    device_peak_high_bytes: int
    memory: CardMemory | None


@dataclass(frozen=True)
class Chosen:
    prediction: Predicted
    verdict: Verdict


def plan_of(tensor_bytes: int, process_bytes: int) -> CardFit:
    memory = CardMemory(
        allocated=whole(tensor_bytes),
        reserved=whole(process_bytes),
        process=whole(process_bytes),
        host_pinned=whole(0),
        host_pageable=whole(0),
        total_bytes=CARD_BYTES,
    )
    prediction = Predicted(device_peak_high_bytes=tensor_bytes, memory=memory)
    return CardFit(chosen=Chosen(prediction, "fits" if process_bytes <= CARD_BYTES else "tight"), source=tensor_bytes)


def whole(num_bytes: int) -> ByteInterval:
    return ByteInterval(low=num_bytes, value=num_bytes, high=num_bytes)


def look(process_of: Callable[..., Any], *, least_bytes: int = 0) -> tuple[CardFit | None, list[Any]]:
    """The plan found, whose tensors take all of a budget, and the budgets that were tried for it."""
    tried = []

    def within(budget_bytes: int) -> Any:
        tried.append(budget_bytes)
        return plan_of(budget_bytes, process_of(budget_bytes)) if budget_bytes >= least_bytes else None

    first = plan_of(CARD_BYTES, process_of(CARD_BYTES))
    return find_room(first, budget_bytes=CARD_BYTES, within=within), tried


def test_a_plan_that_has_room_is_taken_as_it_is() -> None:
    found, tried = look(lambda tensor_bytes: tensor_bytes)
    assert found.source == CARD_BYTES
    assert not tried


def test_gaps_that_grow_with_the_tensors_leave_the_largest_budget_but_for_two_hundredths() -> None:
    found, tried = look(lambda tensor_bytes: 500 + 2 * tensor_bytes)
    assert 4750 * 0.97 <= found.source <= 4750
    assert len(tried) <= 8


def test_a_process_that_comes_in_steps_is_found_room_for_too() -> None:
    found, _ = look(lambda tensor_bytes: 300 + -(-tensor_bytes // 2000) * 2500)
    assert 6000 * 0.97 <= found.source <= 6000


def test_where_no_smaller_plan_is_there_none_is_found() -> None:
    found, tried = look(lambda tensor_bytes: tensor_bytes + 5000, least_bytes=7000)
    assert found is None
    assert len(tried) == 1


def test_what_comes_with_the_tensors_and_fills_the_card_alone_leaves_room_for_none() -> None:
    found, tried = look(lambda tensor_bytes: tensor_bytes + CARD_BYTES)
    assert found is None
    assert len(tried) <= 8


def test_budgets_are_tried_only_while_something_can_be_won() -> None:
    """Each costs what its tensors leave undone; one that is nearly as good as what does not fit ends the search."""
    tried: list[int] = []

    def within(budget_bytes: int) -> Any:
        tried.append(budget_bytes)
        return plan_of(budget_bytes, budget_bytes + 500)

    first = plan_of(CARD_BYTES, CARD_BYTES + 500)
    found = find_room(first, budget_bytes=CARD_BYTES, within=within, cost=lambda _: 100.0)
    assert found is not None
    assert found.chosen.verdict == "fits"
    assert len(tried) == 1


def test_a_search_that_cannot_come_down_to_what_is_known_is_given_up() -> None:
    tried: list[int] = []

    def within(budget_bytes: int) -> Any:
        tried.append(budget_bytes)
        return plan_of(budget_bytes, 2 * budget_bytes)

    def cost(chosen: Any) -> float:
        return 1e6 / chosen.prediction.device_peak_high_bytes

    first = plan_of(CARD_BYTES, 3 * CARD_BYTES)
    with pytest.raises(Outpaced) as raised:
        find_room(first, budget_bytes=CARD_BYTES, within=within, cost=cost, most_cost=1e6 / 6000)
    assert raised.value.least > 1e6 / 6000
    assert raised.value.best.verdict == "tight"
    assert len(tried) == 3
