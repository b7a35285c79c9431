"""Keys and values are made again where that pays, of as many tokens as balance link and compute, and nowhere else."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.bounds.kv_prefix_floor import list_prefix_lengths
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.search.generation.levers import list_families
from optimizer.search.generation.one_device import GenerationSearchResult, generation_problem
from optimizer.search.generation.search import search_generation_plans
from optimizer.search.generation.solve import ROUGH, largest_of
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

LARGE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
WORKLOAD = GenerationWorkload(prompt_length=512, num_new_tokens=32, num_sequences=256)
GOAL = GenerationGoal(device_budget_bytes=8 * 2**30, allow_lossy=True, forbid=("quantize_kv", "quantize_frozen"))


def large_profile(num_groups: int) -> GenerationProfile:
    return profile_generation(read_model_spec({**LARGE, "num_key_value_heads": num_groups}), representations=("fp32", "bf16"))


@pytest.fixture(scope="module")
def large() -> GenerationProfile:
    """A model with as many heads of keys as of queries."""
    return large_profile(32)


def find(profile: GenerationProfile, machine: Machine, **goal: Any) -> GenerationSearchResult:
    return search_generation_plans(profile, workload=WORKLOAD, goal=replace(GOAL, **goal), machine=machine)


@pytest.fixture(scope="module")
def card() -> Machine:
    return replace(table_machine("RTX 4090"), host_memory_bytes=256 * 2**30)


def test_where_keys_and_values_cross_a_slow_link_it_wins_and_link_and_compute_balance(
    large: GenerationProfile, card: Machine
) -> None:
    kept = find(large, card, forbid=(*GOAL.forbid, "rebuild_kv"))
    found = find(large, card)
    cache = found.chosen.plan.kv_cache
    assert cache.place == "host"
    assert 0 < cache.prefix_tokens < WORKLOAD.prompt_length
    assert found.chosen.prediction.total_s < 0.9 * kept.chosen.prediction.total_s
    exposed = [each.chosen.prediction.exposed_ms["copy_in"] for each in (found, kept)]
    assert exposed[0] < 0.1 * exposed[1]
    assert any("tokens again moves" in sentence and "less time" in sentence for sentence in found.explanation)
    assert any("hidden states are kept and copied instead" in sentence for sentence in found.explanation)


def test_neither_fewer_nor_more_tokens_take_less_time(large: GenerationProfile, card: Machine) -> None:
    plan = find(large, card).chosen.plan
    problem = generation_problem(large, workload=WORKLOAD, goal=GOAL, machine=card)
    prices = {
        length: problem.price(replace(plan, kv_cache=replace(plan.kv_cache, prefix_tokens=length))).total_s
        for length in (0, *list_prefix_lengths(WORKLOAD.prompt_length))
    }
    assert prices[plan.kv_cache.prefix_tokens] <= 1.01 * min(prices.values())


def test_with_grouped_queries_it_is_never_a_choice(card: Machine) -> None:
    profile = large_profile(8)
    problem = generation_problem(profile, workload=WORKLOAD, goal=GOAL, machine=card)
    assert problem.longest_prefix == 0
    assert not any(family.plan.kv_cache.prefix_tokens for family in list_families(problem))
    assert any("would not pay anywhere" in sentence for sentence in find(profile, card).explanation)


def test_where_the_link_is_fast_all_are_kept_and_it_says_what_it_would_cost(
    large: GenerationProfile, card: Machine
) -> None:
    rates = replace(card.rates, host_to_device_bytes_per_s=1e12, device_to_host_bytes_per_s=1e12)
    found = find(large, replace(card, rates=rates))
    assert (found.chosen.plan.kv_cache.place, found.chosen.plan.kv_cache.prefix_tokens) == ("host", 0)
    assert any("none made again: of 256 tokens that would cost" in sentence for sentence in found.explanation)


@pytest.fixture(scope="module")
def small() -> GenerationProfile:
    return profile_generation(
        read_model_spec({**SMALL_CONFIGS["qwen3"], "num_key_value_heads": 4}), representations=("fp32",)
    )


@pytest.mark.parametrize("gpu", [None, "RTX 4090"])
@pytest.mark.parametrize(
    "workload",
    [
        GenerationWorkload(prompt_length=20, num_new_tokens=8, num_sequences=5),
        GenerationWorkload.of_prompts((20, 9, 11, 12, 4, 17), num_new_tokens=6),
    ],
    ids=["even", "mixed"],
)
def test_no_number_of_tokens_takes_less_than_the_floor_of_all(
    small: GenerationProfile, gpu: str | None, workload: GenerationWorkload
) -> None:
    machine = table_machine(gpu) if gpu else make_cpu_machine()
    rates = replace(machine.rates, host_to_device_bytes_per_s=2e6)
    problem = generation_problem(
        small, workload=workload, goal=GenerationGoal(device_budget_bytes=2**33), machine=replace(machine, rates=rates)
    )
    families = [family for family in list_families(problem) if family.plan.kv_cache.prefix_tokens]
    assert families
    chosen = set()
    for family in families[::4]:
        sizes = range(1, workload.num_sequences + 1)
        floors: Any = problem.floors(family.plan, sizes, family.micro_batches)
        for row, number in enumerate(family.micro_batches):
            plan = replace(family.plan, num_micro_batches=number)
            for column, size in enumerate(range(1, largest_of(plan, workload.num_sequences) + 1)):
                best = int(floors.prefix_tokens[row, column])
                chosen.add(best)
                for prefix in {0, 2, 7, 20, best}:
                    cache = replace(plan.kv_cache, prefix_tokens=prefix)
                    price = problem.price(replace(plan, batch_size=size, kv_cache=cache))
                    if prefix in (0, *list_prefix_lengths(problem.longest_prefix)):
                        assert price.total_s >= floors.total_s[row, column] * (1 - ROUGH)
                    if prefix == best:
                        assert price.host_peak_bytes >= floors.host_bytes[row, column]
                        assert price.device_peak_high_bytes >= floors.device_bytes[row, column]
                        assert price.prefill_ms >= floors.prefill_ms[row, column] * (1 - ROUGH)
    assert max(chosen) > 0


def test_lengths_are_even_parts_of_the_longest() -> None:
    assert list_prefix_lengths(512) == tuple(range(32, 513, 32))
    assert list_prefix_lengths(5) == (2, 3, 4, 5)
    assert list_prefix_lengths(1) == ()


def test_a_goal_may_forbid_it(small: GenerationProfile) -> None:
    goal = GenerationGoal(device_budget_bytes=2**33, forbid=("rebuild_kv",))
    workload = GenerationWorkload(prompt_length=20, num_new_tokens=8, num_sequences=5)
    problem = generation_problem(small, workload=workload, goal=goal, machine=table_machine("RTX 4090"))
    assert not any(family.plan.kv_cache.prefix_tokens for family in list_families(problem))
    assert problem.permits(replace(list_families(problem)[0].plan, kv_cache=KvCachePlan(place="host")))
