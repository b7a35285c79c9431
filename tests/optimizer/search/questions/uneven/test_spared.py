"""Room on hosts and devices of several kinds for what attempts were short of."""

import pytest

from optimizer.base.units import GIB, MIB
from optimizer.estimate.job.shortfalls import EVERY_STAGE, Shortfall
from optimizer.goal import Goal
from optimizer.search.questions.uneven.spared import spared_by_kind, with_less_elsewhere
from tests.optimizer.search.questions.uneven.test_answer import FAST, SLOW, three_cards

ON_HOST = Shortfall(stage=EVERY_STAGE, tier="host", num_bytes=GIB)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_host_leaves_as_much_free_as_the_ranks_of_the_attempt_were_short_of_together(num_ranks: int) -> None:
    goal = Goal(device_budget_bytes=8 * GIB, num_devices=3)
    less = with_less_elsewhere(goal, three_cards(), [(num_ranks, [ON_HOST])])
    assert less.host_budget_bytes == three_cards().host_memory_bytes - num_ranks * GIB


def test_the_largest_of_several_attempts_counts_and_none_leaves_the_goal_as_it_is() -> None:
    goal = Goal(device_budget_bytes=8 * GIB, host_budget_bytes=4 * GIB, num_devices=3)
    assert with_less_elsewhere(goal, three_cards(), [(1, [ON_HOST]), (2, [ON_HOST]), (3, [])]).host_budget_bytes == 2 * GIB
    assert with_less_elsewhere(goal, three_cards(), [(3, [])]) == goal


def test_a_kind_of_device_leaves_free_what_it_was_short_of_and_every_kind_what_any_was() -> None:
    on_slow = Shortfall(stage="steady_step", tier="device", num_bytes=3 * MIB, device=SLOW)
    on_any = Shortfall(stage="evaluation", tier="device", num_bytes=2 * MIB)
    assert spared_by_kind(three_cards(), [on_slow, ON_HOST]) == {SLOW: 3 * MIB}
    assert spared_by_kind(three_cards(), [on_slow, on_any]) == {SLOW: 3 * MIB, FAST: 2 * MIB}
