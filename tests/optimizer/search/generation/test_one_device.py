"""Chosen plans hold on the real runtime, and what the solver relies on holds of the estimator."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidWorkload, NoFeasiblePlan
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.search.generation.levers import list_families
from optimizer.search.generation.one_device import GenerationSearchResult, generation_problem
from optimizer.search.generation.reasons import explain_choice
from optimizer.search.generation.search import search_generation_plans
from optimizer.search.generation.solve import ROUGH, Book, find_largest_batch, largest_of
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

SPEC = read_model_spec(SMALL_CONFIGS["gemma2"])
WORKLOAD = GenerationWorkload(prompt_length=12, num_new_tokens=8, num_sequences=6)


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(SPEC, representations=("fp32", "bf16", "fp32/int8"))


@pytest.fixture(scope="module")
def disk_machine() -> Machine:
    machine = make_cpu_machine()
    rates = replace(
        machine.rates, disk_write_bytes_per_s=1e8, disk_read_bytes_per_s=2e8, disk_cached_read_bytes_per_s=5e8
    )
    return replace(machine, rates=rates, disk_free_bytes=2**30)


def find(profile: GenerationProfile, machine: Machine, budget_bytes: int, **goal: Any) -> GenerationSearchResult | None:
    return search_generation_plans(
        profile,
        workload=WORKLOAD,
        goal=GenerationGoal(device_budget_bytes=budget_bytes, **goal),
        machine=machine,
    )


@pytest.fixture(scope="module")
def smallest(profile: GenerationProfile, disk_machine: Machine) -> int:
    with pytest.raises(NoFeasiblePlan) as caught:
        find(profile, disk_machine, 1000)
    return caught.value.fields["smallest_feasible_bytes"]


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("more_bytes", "goal", "place"),
    [
        (0, {}, "host"),
        (4_000, {"forbid": ("disk",)}, "host"),
        (40_000, {"allow_lossy": True, "forbid": ("stream_weights",)}, "device"),
        (40_000, {"objective": "largest_batch"}, None),
        (200_000, {"objective": "first_token"}, "device"),
    ],
)
def test_a_chosen_plan_is_carried_out_under_its_budget_to_the_byte(
    profile: GenerationProfile,
    disk_machine: Machine,
    smallest: int,
    tmp_path: Path,
    more_bytes: int,
    goal: dict[str, Any],
    place: str | None,
) -> None:
    budget_bytes = smallest + more_bytes
    try:
        chosen = find(profile, disk_machine, budget_bytes, **goal).chosen
    except NoFeasiblePlan as error:
        budget_bytes = error.fields["smallest_feasible_bytes"]
        chosen = find(profile, disk_machine, budget_bytes, **goal).chosen
    assert place in (None, chosen.plan.weights.place)
    measured = measure_generation(
        SPEC, plan=chosen.plan, workload=WORKLOAD, cap_bytes=budget_bytes, scratch=tmp_path
    )
    assert measured.device_peak_bytes == chosen.prediction.device_peak_bytes
    assert measured.host_peak_bytes == chosen.prediction.host_peak_bytes
    assert measured.disk_peak_bytes == chosen.prediction.disk_peak_bytes


def test_it_is_never_behind_a_baseline_that_fits(
    profile: GenerationProfile, disk_machine: Machine, smallest: int
) -> None:
    for budget_bytes in range(smallest, smallest + 200_000, 25_000):
        result = find(profile, disk_machine, budget_bytes)
        fitting = [each.prediction.total_s for each in result.baselines.values() if each.verdict == "fits"]
        assert result.chosen.verdict == "fits"
        assert all(result.chosen.prediction.total_s <= total_s for total_s in fitting)
        assert result.gap == 0


def test_where_the_link_is_slow_micro_batches_share_each_pass_over_the_weights(
    profile: GenerationProfile, disk_machine: Machine, smallest: int, tmp_path: Path
) -> None:
    """A batch needs room for its activations, a further micro-batch only for its keys and values and hidden states."""
    slow = replace(disk_machine, rates=replace(disk_machine.rates, host_to_device_bytes_per_s=1e6))
    budget_bytes = smallest + 42_000
    found = find(profile, slow, budget_bytes, forbid=("disk",))
    plan = found.chosen.plan
    assert (plan.weights.place, plan.num_micro_batches > 1) == ("host", True)
    assert any("passes shared by several micro-batches take" in sentence for sentence in found.explanation)
    single = [each for each in found.baselines.values() if each.verdict == "fits"]
    assert all(found.chosen.prediction.total_s < 0.7 * each.prediction.total_s for each in single)
    measured = measure_generation(SPEC, plan=plan, workload=WORKLOAD, cap_bytes=budget_bytes, scratch=tmp_path)
    assert measured.device_peak_bytes == found.chosen.prediction.device_peak_bytes
    assert measured.copied_bytes == found.chosen.prediction.copied_bytes


def test_a_plan_for_prompts_that_differ_and_draw_is_carried_out_to_the_byte(
    profile: GenerationProfile, disk_machine: Machine, smallest: int, tmp_path: Path
) -> None:
    workload = GenerationWorkload.of_prompts((12, 9, 11, 12, 4, 7, 10), num_new_tokens=6, draws=True)
    budget_bytes = smallest + 42_000
    found = search_generation_plans(
        profile, workload=workload, goal=GenerationGoal(device_budget_bytes=budget_bytes), machine=disk_machine
    )
    chosen = found.chosen
    measured = measure_generation(SPEC, plan=chosen.plan, workload=workload, cap_bytes=budget_bytes, scratch=tmp_path)
    assert measured.device_peak_bytes == chosen.prediction.device_peak_bytes
    assert measured.copied_bytes == chosen.prediction.copied_bytes
    assert any("prompts of 4 to 12 tokens, sorted by length" in sentence for sentence in found.explanation)


def test_many_lengths_are_searched_with_few_and_shown_with_their_own(
    profile: GenerationProfile, disk_machine: Machine, smallest: int
) -> None:
    workload = GenerationWorkload.of_prompts([5 + place % 9 for place in range(30)], num_new_tokens=6)
    goal = GenerationGoal(device_budget_bytes=smallest + 60_000)
    problem = generation_problem(profile, workload=workload, goal=goal, machine=disk_machine)
    plan = GenerationPlan(batch_size=2, num_micro_batches=2, weights=WeightsPlan(place="host"))
    coarse, shown = problem.price(plan), problem.priced("shown", plan).prediction
    exact = estimate_generation(profile, plan=plan, workload=workload, machine=disk_machine)
    assert (shown.device_peak_bytes, shown.total_s) == (exact.device_peak_bytes, exact.total_s)
    assert coarse.device_peak_bytes >= exact.device_peak_bytes
    assert coarse.total_s == pytest.approx(exact.total_s, rel=0.25)


def explain(profile: GenerationProfile, machine: Machine, plan: GenerationPlan) -> str:
    """Why a plan was chosen whose peak is all of the budget."""
    goal = GenerationGoal(device_budget_bytes=2**30)
    problem = generation_problem(profile, workload=WORKLOAD, goal=goal, machine=machine)
    tight = problem.with_budget(problem.price(plan).device_peak_high_bytes)
    return "\n".join(explain_choice(tight, tight.priced("chosen", plan), profile=profile, machine=machine))


def test_it_says_what_it_did_and_what_it_left_out(profile: GenerationProfile, disk_machine: Machine) -> None:
    text = explain(profile, disk_machine, GenerationPlan(weights=WeightsPlan(place="host")))
    assert "streaming the weights saves" in text
    assert "one sequence more at once could take" in text
    assert "keys and values stay on the device: from the host their" in text
    assert "a hidden state weighs 128 B, a token's keys and values 128 B a block" in text
    assert "would not pay anywhere" in text


def test_it_says_what_moving_keys_and_values_saves(profile: GenerationProfile, disk_machine: Machine) -> None:
    text = explain(profile, disk_machine, GenerationPlan(kv_cache=KvCachePlan(place="host")))
    assert "moving keys and values saves" in text
    assert "keys and values stay on the device" not in text


WORKLOADS = (
    WORKLOAD,
    GenerationWorkload.of_prompts((12, 9, 11, 12, 4, 7, 10), num_new_tokens=6, draws=True),
    GenerationWorkload.of_prompts((12, 9, 11, 12, 7), num_new_tokens=(20, 2, 9, 1, 5)),
)


def with_decoding(machine: Machine) -> Machine:
    """A machine whose tokens were measured by themselves."""
    rates = replace(
        machine.rates,
        cache_bytes=1,
        matmul_curves={"mm fp32": ((1.0, 1e10),), "rows nt fp32": ((0.5, 1e9),), "rows nt fp32 cold": ((0.5, 1e8),)},
        attention_curves={"forward fp32": ((4.0, 1e10),), "token fp32": ((10.0, 2e9), (1000.0, 8e9))},
        op_curves={"draw": ((1e3, 1e6),)},
        python_s={"keys and values": 1e-4, "stored keys and values": 3e-4},
    )
    return replace(machine, rates=rates)


def with_little_memory(machine: Machine) -> Machine:
    """A machine whose page cache holds what some batches keep on the disk."""
    return replace(machine, host_memory_bytes=60_000)


@pytest.mark.breadth
@pytest.mark.parametrize("workload", WORKLOADS, ids=["even", "mixed", "uneven"])
@pytest.mark.parametrize("gpu", [None, "decoding", "little memory", "RTX 4090"])
def test_the_estimator_is_as_the_solver_takes_it_to_be(
    profile: GenerationProfile, disk_machine: Machine, gpu: str | None, workload: GenerationWorkload
) -> None:
    known = {"decoding": with_decoding(disk_machine), "little memory": with_little_memory(disk_machine)}
    machine = disk_machine if gpu is None else known.get(gpu)
    machine = machine or replace(table_machine(gpu), disk_free_bytes=2**30)
    goal = GenerationGoal(device_budget_bytes=2**33, allow_lossy=True)
    problem = generation_problem(profile, workload=workload, goal=goal, machine=machine)
    sizes = range(1, workload.num_sequences + 1)
    for family in list_families(problem)[::7]:
        floors = problem.floors(family.plan, sizes, family.micro_batches)
        for row, number in enumerate(family.micro_batches):
            plan = replace(family.plan, num_micro_batches=number)
            tried = range(1, largest_of(plan, workload.num_sequences) + 1)
            found = [problem.price(replace(plan, batch_size=size)) for size in tried]
            for before, after in pairwise(found if workload.is_even else []):
                assert after.device_peak_high_bytes >= before.device_peak_high_bytes
                assert after.host_peak_bytes >= before.host_peak_bytes
                assert after.disk_peak_bytes >= before.disk_peak_bytes
                assert after.remote_peak_bytes >= before.remote_peak_bytes
            for column, price in enumerate(found):
                assert price.total_s >= floors.total_s[row, column] * (1 - ROUGH)
                assert price.prefill_ms >= floors.prefill_ms[row, column] * (1 - ROUGH)
                assert price.device_peak_high_bytes >= floors.device_bytes[row, column]
                assert price.host_peak_bytes >= floors.host_bytes[row, column]
                assert price.disk_peak_bytes >= floors.disk_bytes[row, column]
                assert price.remote_peak_bytes >= floors.remote_bytes[row, column]


def test_where_a_card_lacks_room_for_the_process_the_plan_is_smaller_than_its_tensors_allow(
    profile: GenerationProfile
) -> None:
    card = table_machine("RTX 4090")
    roomy = find(profile, card, card.device.memory_bytes).chosen
    tight = replace(card, device=replace(card.device, total_bytes=roomy.prediction.memory.process.high - 2**20))
    try:
        found = find(profile, tight, card.device.memory_bytes).chosen
    except NoFeasiblePlan:
        return
    assert found.verdict == "fits"
    assert found.prediction.memory.process.high <= tight.device.total_bytes


def test_a_workload_beyond_the_positions_is_refused(profile: GenerationProfile, disk_machine: Machine) -> None:
    long = replace(WORKLOAD, num_new_tokens=60)
    goal = GenerationGoal(device_budget_bytes=2**30)
    with pytest.raises(InvalidWorkload, match="this model has positions for 64"):
        search_generation_plans(profile, workload=long, goal=goal, machine=disk_machine)


def test_half_precision_of_both_kinds_is_found_where_it_has_a_rate(profile: GenerationProfile) -> None:
    card = table_machine("RTX 4090")
    goal = GenerationGoal(device_budget_bytes=2**33, allow_lossy=True)
    problem = generation_problem(profile, workload=WORKLOAD, goal=goal, machine=card)
    assert {"fp32", "bf16", "fp16", "fp32/int8"} == problem.representations
    assert problem.permits(GenerationPlan(weights=WeightsPlan(dtype="fp16")))


def test_where_prompts_differ_the_largest_batch_is_found_though_a_smaller_one_peaks_higher() -> None:
    """Seven at once run with a prompt of 28 tokens among six of 44, so that less of each runs at once."""
    lengths = [44] * 6 + [28] * 2 + [12] * 2 + [2] * 8
    workload = GenerationWorkload.of_prompts(lengths, num_new_tokens=[18] * len(lengths))
    profile = profile_generation(read_model_spec(SMALL_CONFIGS["llama"]), representations=("fp32",))
    goal = GenerationGoal(device_budget_bytes=2**30)
    problem = generation_problem(profile, workload=workload, goal=goal, machine=make_cpu_machine())
    peaks = {
        size: problem.price(GenerationPlan(batch_size=size)).device_peak_high_bytes for size in range(1, len(lengths) + 1)
    }
    assert peaks[7] < peaks[6]
    for budget_bytes in (*peaks.values(), min(peaks.values()) - 1):
        found = find_largest_batch(Book(problem=problem.with_budget(budget_bytes)), GenerationPlan())
        assert found == max((size for size, peak in peaks.items() if peak <= budget_bytes), default=0)


def test_where_the_link_is_slow_attention_is_computed_where_keys_and_values_are(
    profile: GenerationProfile, disk_machine: Machine, tmp_path: Path
) -> None:
    """Without room for them on the device, and with a host that reads them ten times as fast as they would come."""
    rates = replace(disk_machine.rates, host_to_device_bytes_per_s=1e8, host_optimizer_elements_per_s=1e8)
    slow = replace(disk_machine, rates=rates)
    workload = GenerationWorkload(prompt_length=12, num_new_tokens=40, num_sequences=6)
    brought = GenerationPlan(batch_size=6, kv_cache=KvCachePlan(place="host", prefetch=0))
    budget_bytes = estimate_generation(profile, plan=brought, workload=workload, machine=slow).device_peak_high_bytes
    goal = GenerationGoal(device_budget_bytes=budget_bytes, forbid=("stream_weights",))
    found = search_generation_plans(profile, workload=workload, goal=goal, machine=slow)
    plan = found.chosen.plan
    assert (plan.kv_cache.place, plan.kv_cache.attention, plan.batch_size) == ("host", "host", 6)
    told = "\n".join(found.explanation)
    assert "on the host and stay there, where attention is computed: each token's key, value and query are copied" in told
    assert "attention on the host saves" in told
    measured = measure_generation(SPEC, plan=plan, workload=workload, cap_bytes=budget_bytes, scratch=tmp_path)
    assert measured.device_peak_bytes == found.chosen.prediction.device_peak_bytes
    assert measured.host_peak_bytes == found.chosen.prediction.host_peak_bytes
    assert measured.copied_bytes == found.chosen.prediction.copied_bytes
    without = search_generation_plans(
        profile, workload=workload, goal=replace(goal, forbid=("stream_weights", "host_attention")), machine=slow
    )
    assert without.chosen.plan.kv_cache.attention == "device"
    assert without.chosen.prediction.total_s > found.chosen.prediction.total_s


def test_a_model_that_attends_in_code_of_its_own_is_searched_without_attention_on_the_host(
    profile: GenerationProfile, disk_machine: Machine
) -> None:
    problem = generation_problem(
        replace(profile, on_host=None),
        workload=WORKLOAD,
        goal=GenerationGoal(device_budget_bytes=2**30),
        machine=disk_machine,
    )
    plan = GenerationPlan(kv_cache=KvCachePlan(place="host", attention="host"))
    assert not any(family.plan.kv_cache.attention == "host" for family in list_families(problem))
    assert str(problem.find_conflict(plan)).startswith("plan.kv_cache.attention is host; this model attends in code of its own")
