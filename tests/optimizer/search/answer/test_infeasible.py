"""The answer when nothing fits."""

import re
from dataclasses import replace

import pytest

from benchmarks.search.synthetic import MIB, synthetic_problem
from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import parse_bytes
from optimizer.goal import Goal
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem


def fail_to_search(problem: SearchProblem) -> NoFeasiblePlan:
    with pytest.raises(NoFeasiblePlan) as caught:
        search(problem)
    return caught.value


def test_the_smallest_feasible_budget_is_named_with_its_categories() -> None:
    error = fail_to_search(synthetic_problem(budget_mib=50, num_blocks=6, forbid=("offload_optimizer",)))
    assert error.fields["budget_bytes"] == 50 * MIB
    assert error.fields["smallest_feasible_bytes"] > 50 * MIB
    assert error.fields["bytes_by_category"]["weights"] == 60 * MIB
    assert "smallest feasible peak" in error.message


@pytest.mark.breadth
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 13, 32])
@pytest.mark.parametrize("forbid", [(), ("recompute",), ("offload",), ("recompute", "offload"), ("accumulate",)])
def test_exactly_the_named_budget_is_enough_and_a_byte_less_is_not(num_blocks: int, forbid: tuple[str, ...]) -> None:
    problem = synthetic_problem(budget_mib=1, num_blocks=num_blocks, global_batch_size=4, forbid=forbid)
    smallest_bytes = fail_to_search(problem).fields["smallest_feasible_bytes"]
    enough = replace(problem, goal=replace(problem.goal, device_budget_bytes=smallest_bytes))
    assert search(enough).chosen.prediction.device_peak_high_bytes == smallest_bytes
    fail_to_search(replace(problem, goal=replace(problem.goal, device_budget_bytes=smallest_bytes - 1)))


def test_the_hint_names_each_lever_that_would_help_by_itself_with_what_it_reaches() -> None:
    problem = synthetic_problem(budget_mib=40, forbid=("offload", "accumulate", "offload_optimizer", "disk"))
    hint = fail_to_search(problem).hint
    assert hint.startswith("Raise the budget to ")
    assert "shorten the sequence" in hint
    assert "permit 'offload activations' (smallest peak then " in hint
    assert "permit 'optimizer state on the host' (smallest peak then " in hint
    assert "disk" not in hint
    assert "allow lossy choices such as bf16 and 8-bit optimizer state (smallest peak then " in hint


def test_levers_that_help_only_together_are_offered_together() -> None:
    problem = synthetic_problem(
        budget_mib=40, forbid=("offload_gradients", "offload_optimizer", "stream_weights"), num_blocks=1, weight_mib=100
    )
    assert "permit what is forbidden (smallest peak then " in fail_to_search(problem).hint


def test_the_promised_peak_is_one_that_a_search_reaches() -> None:
    problem = synthetic_problem(budget_mib=40, forbid=("offload_optimizer",))
    promised = re.search(
        r"permit 'optimizer state on the host' \(smallest peak then (.*?)\)", fail_to_search(problem).hint
    )
    assert promised is not None
    budget_bytes = parse_bytes(promised.group(1)) + MIB
    permitted = replace(problem, goal=Goal(device_budget_bytes=budget_bytes))
    assert search(permitted).chosen.verdict == "fits"


def test_a_host_without_room_is_named_where_more_of_it_would_help() -> None:
    hint = fail_to_search(synthetic_problem(budget_mib=40, num_blocks=8, host_budget_mib=0)).hint
    assert "give it more host memory (smallest peak then " in hint


def test_the_hint_does_not_offer_what_is_already_allowed() -> None:
    hint = fail_to_search(synthetic_problem(budget_mib=10, allow_lossy=True)).hint
    assert "lossy" not in hint
    assert "permit" not in hint


def test_a_host_without_room_makes_offload_infeasible() -> None:
    problem = synthetic_problem(budget_mib=1, num_blocks=8, host_budget_mib=0)
    plan = fail_to_search(problem).fields["smallest_plan"]
    assert "offload" not in plan["activations"]["per_block"]
