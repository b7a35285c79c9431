"""What is said when nothing fits."""

from dataclasses import replace

import pytest

from optimizer.errors import NoFeasiblePlan
from optimizer.search.core import search
from tests.optimizer.search.synthetic import MIB, synthetic_problem


def fail_to_search(problem) -> NoFeasiblePlan:
    with pytest.raises(NoFeasiblePlan) as caught:
        search(problem)
    return caught.value


def test_the_smallest_feasible_budget_is_named_with_its_categories():
    error = fail_to_search(synthetic_problem(budget_mib=50, num_blocks=6))
    assert error.fields["budget_bytes"] == 50 * MIB
    assert error.fields["smallest_feasible_bytes"] > 50 * MIB
    assert error.fields["bytes_by_category"]["weights"] == 60 * MIB
    assert "smallest feasible peak" in error.message


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 13, 32])
@pytest.mark.parametrize("forbid", [(), ("recompute",), ("offload",), ("recompute", "offload"), ("accumulate",)])
def test_exactly_the_named_budget_is_enough_and_a_byte_less_is_not(num_blocks, forbid):
    problem = synthetic_problem(budget_mib=1, num_blocks=num_blocks, global_batch_size=4, forbid=forbid)
    smallest_bytes = fail_to_search(problem).fields["smallest_feasible_bytes"]
    enough = replace(problem, goal=replace(problem.goal, device_budget_bytes=smallest_bytes))
    assert search(enough).chosen.prediction.device_peak_high_bytes == smallest_bytes
    fail_to_search(replace(problem, goal=replace(problem.goal, device_budget_bytes=smallest_bytes - 1)))


def test_the_hint_names_the_levers_not_yet_allowed():
    hint = fail_to_search(synthetic_problem(budget_mib=50, forbid=("offload", "accumulate"))).hint
    assert hint.startswith("Raise the budget to ")
    assert "shorten the sequence" in hint
    assert "permit offload or accumulation" in hint
    assert "allow lossy choices, bf16 and 8-bit optimizer state (smallest peak then " in hint


def test_the_hint_does_not_offer_what_is_already_allowed():
    hint = fail_to_search(synthetic_problem(budget_mib=20, allow_lossy=True)).hint
    assert "lossy" not in hint
    assert "permit" not in hint


def test_a_host_without_room_makes_offload_infeasible():
    problem = synthetic_problem(budget_mib=1, num_blocks=8, host_budget_mib=0)
    plan = fail_to_search(problem).fields["smallest_plan"]
    assert "offload" not in plan["activations"]["per_block"]
