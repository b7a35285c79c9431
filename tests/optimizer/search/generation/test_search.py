"""Several devices for a generation: copies where the model fits on one, a cut where it does not, and words for each."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.plan_generation import compare_generations_profiled
from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.search.generation.one_device import GenerationSearchResult
from optimizer.search.generation.search import search_generation_plans
from optimizer.search.generation.stages import split_evenly
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

CONFIG: dict[str, Any] = {
    **SMALL_CONFIGS["llama"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WORKLOAD = GenerationWorkload(prompt_length=32, num_new_tokens=16, num_sequences=8)
TWO = table_machine("RTX 3060", num_devices=2)
SLOW = replace(TWO, rates=replace(TWO.rates, host_to_device_bytes_per_s=1e9))
"""The same on a slow link to the host: so small a model streams in no time on a fast one."""


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(read_model_spec(CONFIG), representations=("fp32",))


@pytest.fixture(scope="module")
def weight_bytes(profile: GenerationProfile) -> int:
    held = profile.weight_bytes("fp32")
    return held.outside + 12 * held.by_block[0]


def search(
    profile: GenerationProfile, budget_bytes: int, *, machine: Machine = TWO, **changes: Any
) -> GenerationSearchResult:
    goal = GenerationGoal(device_budget_bytes=budget_bytes, num_devices=2, **changes)
    return search_generation_plans(profile, workload=WORKLOAD, goal=goal, machine=machine)


@pytest.fixture(scope="module")
def cut(profile: GenerationProfile, weight_bytes: int) -> GenerationSearchResult:
    return search(profile, int(0.75 * weight_bytes), machine=SLOW)


def test_a_model_that_fits_on_one_device_is_copied_and_the_answer_says_why_it_is_not_cut(
    profile: GenerationProfile, weight_bytes: int
) -> None:
    result = search(profile, 3 * weight_bytes)
    assert result.chosen.plan.layout == GenerationLayout(num_replicas=2)
    assert result.chosen.prediction.num_replicas == 2
    words = "2 devices, the model cut: not tried, since the model fits on one device with all it needs"
    assert words in result.explanation
    assert [option.layout.num_devices for option in result.layouts] == [1, 2, 2]
    alone = result.layouts[0].best
    assert alone is not None
    assert alone.prediction.total_s > result.chosen.prediction.total_s


def test_a_model_that_no_device_holds_is_cut_where_that_is_faster_than_streaming(
    cut: GenerationSearchResult, weight_bytes: int
) -> None:
    chosen = cut.chosen
    assert chosen.plan.layout.is_cut
    assert sum(chosen.plan.layout.stage_blocks) == 12
    assert chosen.verdict == "fits"
    assert chosen.prediction.device_peak_high_bytes <= int(0.75 * weight_bytes)
    others = [option.best for option in cut.layouts if option.best is not None and not option.layout.is_cut]
    assert all(other.plan.weights.place != "device" for other in others)
    assert all(other.prediction.total_s > chosen.prediction.total_s for other in others)
    assert any(sentence.startswith("the model is cut over 2 devices: blocks 1 to ") for sentence in cut.explanation)
    assert 0 <= cut.bound <= chosen.prediction.total_s


def test_where_streaming_is_faster_the_model_is_not_cut(profile: GenerationProfile, weight_bytes: int) -> None:
    result = search(profile, int(0.75 * weight_bytes))
    assert result.chosen.plan.layout == GenerationLayout(num_replicas=2)
    assert result.chosen.plan.weights.place == "host"
    assert result.layouts[-1].best is not None
    assert result.layouts[-1].best.prediction.total_s > result.chosen.prediction.total_s


def test_each_stage_of_the_chosen_cut_is_predicted(cut: GenerationSearchResult) -> None:
    stages = cut.chosen.prediction.stages
    assert [stage.first_block for stage in stages] == [0, cut.chosen.plan.layout.stage_blocks[0]]
    assert max(stage.device_peak_bytes for stage in stages) == cut.chosen.prediction.device_peak_bytes
    assert stages[0].sent_bytes == 8 * (32 + 15) * 256 * 4
    assert stages[-1].sent_bytes == 0


def test_what_the_goal_forbids_is_not_done(profile: GenerationProfile, weight_bytes: int) -> None:
    result = search(profile, int(0.75 * weight_bytes), machine=SLOW, forbid=("cut_model",))
    assert not result.chosen.plan.layout.is_cut
    assert "2 devices, the model cut: forbidden" in result.explanation
    alone = search(profile, 3 * weight_bytes, forbid=("share_prompts",))
    assert alone.chosen.plan.layout == GenerationLayout()


def test_a_model_that_only_a_cut_can_hold_is_planned(profile: GenerationProfile, weight_bytes: int) -> None:
    everything_else = ("stream_weights", "offload_kv", "disk", "remote")
    goal = GenerationGoal(device_budget_bytes=int(0.75 * weight_bytes), forbid=everything_else)
    with pytest.raises(NoFeasiblePlan):
        search_generation_plans(profile, workload=WORKLOAD, goal=goal, machine=TWO)
    result = search(profile, int(0.75 * weight_bytes), forbid=everything_else)
    assert result.chosen.plan.layout.is_cut
    with pytest.raises(NoFeasiblePlan):
        search(profile, int(0.1 * weight_bytes), forbid=everything_else)


def test_micro_batches_keep_stages_at_work(profile: GenerationProfile) -> None:
    plan = GenerationPlan(batch_size=4, layout=GenerationLayout(stage_blocks=(6, 6)))
    waves = replace(plan, batch_size=2, num_micro_batches=2)
    machine = make_cpu_machine()
    one, two = (
        estimate_generation(profile, plan=each, workload=replace(WORKLOAD, num_sequences=4), machine=machine)
        for each in (plan, waves)
    )
    busy = [sum(stage.busy_ms for stage in each.stages) / (2 * 1000 * each.total_s) for each in (one, two)]
    assert busy[0] <= 0.5 < busy[1]


def test_blocks_left_over_go_to_the_first_stages() -> None:
    assert split_evenly(14, 4) == (4, 4, 3, 3)


def test_comparisons_are_of_one_device(profile: GenerationProfile) -> None:
    goal = GenerationGoal(device_budget_bytes=2**30, num_devices=2)
    with pytest.raises(InvalidInput, match="goal.num_devices is 2; comparisons, rankings and estimates are of plans on one"):
        compare_generations_profiled(profile, {"a": "best", "b": "resident"}, machine=TWO, workload=WORKLOAD, goal=goal)
