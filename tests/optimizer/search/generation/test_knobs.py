"""A knob of a generation's plan is one change, priced as the plan with that change is; comparisons and edits price alike."""

from typing import Any

import pytest

from optimizer.api.plan_generation import (
    compare_generations_profiled,
    rank_cards_to_generate,
    reprice_generation_profiled,
)
from optimizer.base.errors import InvalidInput, InvalidPlan, NoFeasiblePlan
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.search.generation.compare import reprice_generation
from optimizer.search.generation.knobs import list_generation_knobs
from optimizer.search.generation.one_device import find_best_generation, generation_problem, search_generation
from optimizer.search.generation.problem import GenerationProblem
from optimizer.search.generation.reasons import time_words
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

CARD = table_machine("RTX 4090", disk_bytes=0)
WORKLOAD = GenerationWorkload(prompt_length=12, num_new_tokens=8, num_sequences=6)
GOAL = GenerationGoal(device_budget_bytes=CARD.device.memory_bytes)
STREAMED = GenerationPlan(batch_size=2, weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(place="host"))
PLANS: dict[str, Any] = {"plain": GenerationPlan(), "several": GenerationPlan(batch_size=3), "streamed": STREAMED}


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(read_model_spec(SMALL_CONFIGS["llama"]), representations=("fp32", "bf16", "fp32/int8"))


def pose(
    profile: GenerationProfile,
    *,
    goal: GenerationGoal = GOAL,
    machine: Machine = CARD,
    workload: GenerationWorkload = WORKLOAD,
) -> GenerationProblem:
    return generation_problem(profile, workload=workload, goal=goal, machine=machine)


@pytest.fixture(scope="module")
def problem(profile: GenerationProfile) -> GenerationProblem:
    return pose(profile)


@pytest.mark.parametrize("name", PLANS)
def test_each_knob_is_the_difference_of_two_prices(problem: GenerationProblem, name: str) -> None:
    plan = PLANS[name]
    here = problem.price(plan)
    knobs = list_generation_knobs(problem, plan)
    assert len(knobs) > 5
    for knob in knobs:
        there = problem.price(knob.plan)
        assert knob.device_peak_bytes == there.device_peak_high_bytes
        assert knob.device_change_bytes == there.device_peak_high_bytes - here.device_peak_high_bytes
        assert knob.host_change_bytes == there.host_peak_bytes - here.host_peak_bytes
        assert knob.total_change_s == there.total_s - here.total_s
        assert problem.find_conflict(knob.plan) is None


def test_the_largest_saving_comes_first_and_no_plan_twice(problem: GenerationProblem) -> None:
    knobs = list_generation_knobs(problem, STREAMED)
    changes = [knob.device_change_bytes for knob in knobs]
    assert changes == sorted(changes)
    plans = [knob.plan for knob in knobs]
    assert len(set(plans)) == len(plans)
    assert STREAMED not in plans


def test_every_decision_has_a_neighbour(problem: GenerationProblem) -> None:
    offered = {knob.knob for knob in list_generation_knobs(problem, STREAMED)}
    assert offered >= {"batch_size", "prefill_tokens", "weights.dtype", "weights.place", "weights.prefetch", "weights.frozen"}
    assert offered >= {"num_micro_batches", "kv_cache.dtype", "kv_cache.place", "kv_cache.prefetch"}


def test_what_the_goal_forbids_is_left_out_and_what_changes_the_numbers_is_marked(profile: GenerationProfile) -> None:
    goal = GenerationGoal(device_budget_bytes=GOAL.device_budget_bytes, forbid=("quantize_kv", "stream_weights"))
    knobs = list_generation_knobs(pose(profile, goal=goal), GenerationPlan())
    used = {name for knob in knobs for name in knob.plan.techniques}
    assert not used & {"quantize_kv", "stream_weights"}
    assert {knob.is_lossless for knob in knobs if knob.knob == "weights.dtype"} == {False}


def test_words_of_a_change_say_what_is_then_so(problem: GenerationProblem) -> None:
    words = {knob.change for knob in list_generation_knobs(problem, GenerationPlan(batch_size=2))}
    assert words >= {
        "4 sequences at once instead of 2",
        "6 sequences at once instead of 2",
        "weights on the host",
        "8 tokens of a prompt at once",
    }


def test_an_edit_is_priced_against_what_the_plan_was(problem: GenerationProblem) -> None:
    found = reprice_generation(problem, GenerationPlan(batch_size=2), change={"kv_cache": {"place": "host"}})
    before, after = (problem.price(plan) for plan in (GenerationPlan(batch_size=2), found.priced.plan))
    assert found.device_change_bytes == after.device_peak_high_bytes - before.device_peak_high_bytes
    assert found.total_change_s == after.total_s - before.total_s
    assert [(each.path, each.a, each.b) for each in found.differences] == [("kv_cache.place", "device", "host")]
    assert found.is_lossless
    assert found.priced.prediction.memory is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 7}, "is more than the sequences to generate"),
        ({"weights": {"frozen": "nf4"}}, "plan.weights is fp32/nf4; known of this model on this machine"),
        ({"weights": {"place": "disk"}}, "not to be had on this machine"),
    ],
)
def test_an_edit_that_cannot_be_carried_out_says_why(
    problem: GenerationProblem, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidPlan, match=words):
        reprice_generation(problem, GenerationPlan(), change=change)


def test_an_edit_may_be_written_as_people_write_knobs(profile: GenerationProfile) -> None:
    found = reprice_generation_profiled(
        profile, GenerationPlan(), change=["batch_size=2"], machine=CARD, workload=WORKLOAD, goal=GOAL
    )
    assert found.priced.plan.batch_size == 2


def test_plans_side_by_side_show_only_what_differs(profile: GenerationProfile, problem: GenerationProblem) -> None:
    found = compare_generations_profiled(
        profile,
        {"best": "best", "one": "one_at_a_time", "mine": STREAMED},
        machine=CARD,
        workload=WORKLOAD,
        goal=GOAL,
    )
    assert [priced.label for priced in found.plans] == ["best", "one", "mine"]
    assert found.plans[0].plan == find_best_generation(problem).plan
    assert {decision.knob for decision in found.decisions} >= {"batch_size", "weights.place", "kv_cache.place"}
    assert all(len(set(decision.values)) > 1 for decision in found.decisions)
    weights = next(row for row in found.bytes_at_peak if row.category == "weights")
    assert weights.values == tuple(priced.prediction.device_bytes_by_category["weights"] for priced in found.plans)


@pytest.mark.parametrize("plans", [{"a": "best"}, {"a": "best", "b": "keep_all"}])
def test_a_comparison_of_one_plan_or_of_no_plan_at_all_is_refused(
    profile: GenerationProfile, plans: dict[str, str]
) -> None:
    with pytest.raises(InvalidInput):
        compare_generations_profiled(profile, plans, machine=CARD, workload=WORKLOAD, goal=GOAL)


def test_the_best_plan_alone_is_that_of_the_whole_search(
    problem: GenerationProblem, profile: GenerationProfile
) -> None:
    assert find_best_generation(problem) == search_generation(problem, profile=profile, machine=CARD).chosen


def test_where_nothing_fits_the_best_plan_alone_says_what_would(profile: GenerationProfile) -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        find_best_generation(pose(profile, goal=GenerationGoal(device_budget_bytes=1000)))
    assert caught.value.fields["smallest_feasible_bytes"] > 1000


def test_cards_are_ranked_by_speed_each_with_its_best_plan(profile: GenerationProfile) -> None:
    lengths = (12, 12, 5, 5, 5, 5)
    workload = GenerationWorkload.of_prompts(lengths, num_new_tokens=8)
    found = rank_cards_to_generate(profile, ["T4", "RTX 4090"], workload=workload, goal=GOAL)
    assert [answer.card for answer in found] == ["RTX 4090", "T4"]
    best = found[0]
    exact = pose(profile, workload=workload).priced("chosen", best.chosen.plan)
    assert best.chosen.prediction == exact.prediction
    assert best.tokens_per_s == exact.prediction.tokens_per_s


def test_a_card_on_which_nothing_fits_says_what_is_needed(profile: GenerationProfile) -> None:
    (found,) = rank_cards_to_generate(
        profile, ["T4"], workload=WORKLOAD, goal=GenerationGoal(device_budget_bytes=1000)
    )
    assert (found.chosen, found.tokens_per_s) == (None, None)
    assert found.what.startswith("needs ")


def test_what_would_change_nothing_is_left_out(problem: GenerationProblem) -> None:
    """A cache of so few tokens is never packed."""
    for name in ("int8", "int4"):
        packed = GenerationPlan(kv_cache=KvCachePlan(dtype=name))
        assert problem.price(packed).device_peak_bytes == problem.price(GenerationPlan()).device_peak_bytes
    offered = list_generation_knobs(problem, GenerationPlan())
    assert "kv_cache.dtype" not in {knob.knob for knob in offered}
    assert all(knob.device_change_bytes or knob.host_change_bytes or knob.total_change_s for knob in offered)


def test_making_keys_and_values_again_is_a_knob_where_the_model_can(problem: GenerationProblem) -> None:
    path = "kv_cache.prefix_tokens"
    assert not any(knob.knob == path for knob in list_generation_knobs(problem, STREAMED))
    again = GenerationPlan(kv_cache=KvCachePlan(place="host", prefix_tokens=4))
    with pytest.raises(InvalidPlan, match="a hidden state of this model weighs 128 B"):
        problem.check(again)
    able = profile_generation(
        read_model_spec({**SMALL_CONFIGS["llama"], "num_key_value_heads": 4}), representations=("fp32", "bf16")
    )
    changes = {knob.change for knob in list_generation_knobs(pose(able), STREAMED) if knob.knob == path}
    assert changes == {f"keys and values of {number} tokens of a prompt made again" for number in (6, 12)}
    changes = {knob.change for knob in list_generation_knobs(pose(able), again) if knob.knob == path}
    assert "no keys and values made again" in changes


@pytest.mark.parametrize(("percent", "words"), [(3.14, "3.1 % longer"), (0.0, "0.0 % longer"), (-0.5, "0.5 % less time")])
def test_what_a_technique_costs_or_saves_in_time_is_said_as_time(percent: float, words: str) -> None:
    assert time_words(percent) == words
