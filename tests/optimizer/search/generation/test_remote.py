"""Keys and values go to a remote store where no other tier has room for them, and where there is one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.formats.transfer_sizes import STAGING_BYTES
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.search.generation.compare import reprice_generation
from optimizer.search.generation.frontier import generation_label
from optimizer.search.generation.knobs import list_generation_knobs
from optimizer.search.generation.levers import list_families
from optimizer.search.generation.one_device import generation_problem
from optimizer.search.generation.search import search_generation_plans
from optimizer.search.generation.solve import ROUGH, largest_of
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.valkey import Valkey

SPEC = read_model_spec(
    {
        **SMALL_CONFIGS["qwen3"],
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
)
WORKLOAD = GenerationWorkload(prompt_length=250, num_new_tokens=12, num_sequences=6)
"""Keys and values of all weigh more than what is staged through on the host."""
AWAY = GenerationPlan(batch_size=6, kv_cache=KvCachePlan(place="remote", prefetch=0))


def with_store(machine: Machine, *, free_bytes: int = 2**30, rate: float = 1e9) -> Machine:
    rates = replace(
        machine.rates, remote_write_bytes_per_s=rate, remote_read_bytes_per_s=rate, remote_round_trip_s=1e-4
    )
    return replace(machine, rates=rates, remote_free_bytes=free_bytes)


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(SPEC, representations=("fp32",))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return with_store(make_cpu_machine())


@pytest.fixture(scope="module")
def away(profile: GenerationProfile, machine: Machine) -> GenerationPrediction:
    """The answer for six sequences at once, whose keys and values are in the store."""
    return estimate_generation(profile, plan=AWAY, workload=WORKLOAD, machine=machine)


@pytest.fixture(scope="module")
def goal(away: GenerationPrediction) -> GenerationGoal:
    """Room on the device for what is left there, on the host for the staging alone, none on the disk."""
    return GenerationGoal(
        device_budget_bytes=away.device_peak_high_bytes,
        host_budget_bytes=STAGING_BYTES,
        disk_budget_bytes=0,
        objective="largest_batch",
        forbid=("stream_weights",),
    )


def test_where_no_other_tier_has_room_the_store_is_chosen_and_carried_out_to_the_byte(
    profile: GenerationProfile, machine: Machine, goal: GenerationGoal, tmp_path: Path, remote: Valkey
) -> None:
    found = search_generation_plans(profile, workload=WORKLOAD, goal=goal, machine=machine)
    chosen = found.chosen
    assert (chosen.plan.kv_cache.place, chosen.plan.batch_size) == ("remote", 6)
    told = "\n".join(found.explanation)
    assert "in the remote store; each block's are copied to the device for every token" in told
    assert "MiB in the remote store" in told
    assert "from the remote store and" in told
    measured = measure_generation(
        SPEC,
        plan=chosen.plan,
        workload=WORKLOAD,
        cap_bytes=goal.device_budget_bytes,
        host_cap_bytes=goal.host_budget_bytes,
        scratch=tmp_path,
    )
    assert measured.device_peak_bytes == chosen.prediction.device_peak_bytes
    assert measured.remote_peak_bytes == chosen.prediction.remote_peak_bytes
    assert measured.copied_bytes == chosen.prediction.copied_bytes
    assert remote.list_keys() == []


def test_where_it_is_forbidden_or_there_is_none_fewer_run_at_once(
    profile: GenerationProfile, machine: Machine, goal: GenerationGoal
) -> None:
    without = (
        (machine, replace(goal, forbid=(*goal.forbid, "remote"))),
        (machine, replace(goal, forbid=(*goal.forbid, "offload_kv"))),
        (make_cpu_machine(), goal),
        (replace(machine, remote_free_bytes=0), goal),
    )
    for on, asked in without:
        plan = search_generation_plans(profile, workload=WORKLOAD, goal=asked, machine=on).chosen.plan
        assert plan.kv_cache.place != "remote"
        assert plan.batch_size < 6


def test_the_stores_room_binds(
    profile: GenerationProfile, machine: Machine, goal: GenerationGoal, away: GenerationPrediction
) -> None:
    for free_bytes, batch_size in ((away.remote_peak_bytes, 6), (away.remote_peak_bytes - 1, 5)):
        less = replace(machine, remote_free_bytes=free_bytes)
        chosen = search_generation_plans(profile, workload=WORKLOAD, goal=goal, machine=less).chosen
        assert chosen.plan.batch_size == batch_size
        assert chosen.prediction.remote_peak_bytes <= free_bytes
    problem = generation_problem(profile, workload=WORKLOAD, goal=goal, machine=less)
    assert problem.verdict(problem.price(AWAY)) == "does_not_fit"


def test_a_machine_without_a_store_says_so_of_a_plan_that_needs_one(profile: GenerationProfile) -> None:
    goal = GenerationGoal(device_budget_bytes=2**30)
    problem = generation_problem(profile, workload=WORKLOAD, goal=goal, machine=make_cpu_machine())
    with pytest.raises(InvalidPlan, match="needs 'anything in a remote store', which is not to be had on this machine"):
        problem.check(AWAY)


def test_a_knob_and_an_edit_show_what_the_store_would_hold(
    profile: GenerationProfile, machine: Machine, away: GenerationPrediction
) -> None:
    problem = generation_problem(
        profile, workload=WORKLOAD, goal=GenerationGoal(device_budget_bytes=2**30), machine=machine
    )
    knobs = {knob.change: knob for knob in list_generation_knobs(problem, GenerationPlan(batch_size=6))}
    assert knobs["keys and values in the remote store"].remote_change_bytes == away.remote_peak_bytes
    edited = reprice_generation(problem, AWAY, change={"kv_cache": {"place": "host"}})
    assert edited.remote_change_bytes == -away.remote_peak_bytes
    assert edited.host_change_bytes == away.remote_peak_bytes - STAGING_BYTES


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({}, "6 at once"),
        ({"dtype": "int4"}, "6 at once, keys and values in int4"),
        ({"dtype": "int8", "place": "remote"}, "6 at once, keys and values in int8 from the remote store"),
        ({"place": "host", "attention": "host"}, "6 at once, keys and values from host, attended to there"),
        ({"place": "disk", "prefix_tokens": 40}, "6 at once, keys and values from disk, of 40 tokens made again"),
    ],
)
def test_a_few_words_say_where_keys_and_values_are(choices: dict[str, Any], words: str) -> None:
    assert generation_label(GenerationPlan(batch_size=6, kv_cache=KvCachePlan(**choices))) == words


WORKLOADS = (WORKLOAD, GenerationWorkload.of_prompts((12, 9, 11, 12, 7), num_new_tokens=(20, 2, 9, 1, 5)))


@pytest.mark.breadth
@pytest.mark.parametrize("workload", WORKLOADS, ids=["even", "uneven"])
@pytest.mark.parametrize("gpu", [None, "RTX 4090"])
def test_no_plan_takes_less_than_its_floor(
    profile: GenerationProfile, gpu: str | None, workload: GenerationWorkload
) -> None:
    machine = with_store(make_cpu_machine() if gpu is None else table_machine(gpu), rate=1e7)
    problem = generation_problem(
        profile, workload=workload, goal=GenerationGoal(device_budget_bytes=2**33, allow_lossy=True), machine=machine
    )
    families = [family for family in list_families(problem) if family.plan.kv_cache.place == "remote"]
    assert {family.plan.kv_cache.dtype for family in families} == {"same", "int8", "int4"}
    assert any(family.plan.kv_cache.prefix_tokens for family in families)
    sizes = range(1, workload.num_sequences + 1)
    for family in [*families[::9], *(each for each in families if each.plan.kv_cache.prefix_tokens)][:24]:
        floors: Any = problem.floors(family.plan, sizes, family.micro_batches)
        for row, number in enumerate(family.micro_batches):
            plan = replace(family.plan, num_micro_batches=number)
            for size in range(1, largest_of(plan, workload.num_sequences) + 1):
                tokens = int(floors.prefix_tokens[row, size - 1]) if plan.kv_cache.prefix_tokens else 0
                price = problem.price(
                    replace(plan, batch_size=size, kv_cache=replace(plan.kv_cache, prefix_tokens=tokens))
                )
                column = size - 1
                assert price.total_s >= floors.total_s[row, column] * (1 - ROUGH)
                assert price.prefill_ms >= floors.prefill_ms[row, column] * (1 - ROUGH)
                assert price.device_peak_high_bytes >= floors.device_bytes[row, column]
                assert price.host_peak_bytes >= floors.host_bytes[row, column]
                assert price.remote_peak_bytes >= floors.remote_bytes[row, column] > 0 or plan.kv_cache.dtype != "same"


def test_a_slow_link_makes_keys_and_values_again_of_hidden_states(profile: GenerationProfile) -> None:
    """The machine is a card, where compute has nothing else to do meanwhile."""
    card = with_store(table_machine("RTX 4090"), rate=1e6)
    goal = GenerationGoal(device_budget_bytes=2**33)
    problem = generation_problem(profile, workload=WORKLOAD, goal=goal, machine=card)
    kept, again = (
        problem.price(replace(AWAY, kv_cache=replace(AWAY.kv_cache, prefix_tokens=tokens))) for tokens in (0, 40)
    )
    assert again.total_s < 0.9 * kept.total_s
    assert again.exposed_ms["network"] < kept.exposed_ms["network"]
    assert again.remote_peak_bytes < kept.remote_peak_bytes
