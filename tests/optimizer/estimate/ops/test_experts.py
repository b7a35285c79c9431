"""Few tokens read few experts: what a grouped product is expected to read, in time only."""

import pytest

from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.ops.experts import Experts, find_experts, unread_bytes
from optimizer.hardware.devices import table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    config = {**SMALL_CONFIGS["mixtral"], "num_local_experts": 16, "hidden_size": 128, "intermediate_size": 512}
    return profile_generation(read_model_spec(config), representations=("bf16",))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_experts_and_choices_follow_from_a_traces_sizes(profile: GenerationProfile, phase: str) -> None:
    assert find_experts(getattr(profile, phase).ops, element_bytes=2) == Experts(num_experts=16, num_chosen=2)


@pytest.mark.parametrize("num_chosen", [2, 4, 8])
def test_ops_of_another_width_in_the_same_profile_are_not_taken_for_these(num_chosen: int) -> None:
    config = {**SMALL_CONFIGS["mixtral"], "num_local_experts": 16, "num_experts_per_tok": num_chosen}
    both = profile_generation(read_model_spec(config), representations=("bf16", "fp32"))
    for num_bytes in (2, 4):
        found = find_experts(both.decode.ops, element_bytes=num_bytes)
        assert found == Experts(num_experts=16, num_chosen=num_chosen)


def test_one_token_reads_what_it_chose_and_many_read_all() -> None:
    experts = Experts(num_experts=16, num_chosen=2)
    assert experts.expected_share(1) == 2 / 16
    assert experts.expected_share(2) == 1 - (14 / 16) ** 2
    assert experts.expected_share(4096) == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_not_read_is_the_experts_that_nobody_chose(profile: GenerationProfile, batch: int) -> None:
    ops = profile.decode.ops
    part = profile.decode.parts[profile.decode.regime("bf16", (batch, 20)).parts["block 0"]]
    unread = unread_bytes(ops, (batch, 20), element_bytes=2)[list(part.ops)]
    matrices = 16 * (2 * 128 * (512 + 2 * 512)) + 2 * 16 * 4
    assert sum(unread) == pytest.approx((1 - 2 / 16) ** batch * matrices)


def test_a_dense_models_ops_are_left_alone(profile: GenerationProfile) -> None:
    dense = profile_generation(read_model_spec(SMALL_CONFIGS["llama"]), representations=("bf16",))
    assert find_experts(dense.decode.ops, element_bytes=2) is None
    assert not unread_bytes(dense.decode.ops, (2, 20), element_bytes=2).any()


def test_decoding_one_sequence_takes_the_time_of_its_experts_and_the_memory_of_all(profile: GenerationProfile) -> None:
    card = table_machine("RTX 4090")
    workload = GenerationWorkload(prompt_length=20, num_new_tokens=3, num_sequences=64)
    one, many = (
        estimate_generation(
            profile,
            plan=GenerationPlan(batch_size=size, weights=WeightsPlan(dtype="bf16")),
            workload=workload,
            machine=card,
        )
        for size in (1, 64)
    )
    assert one.decode_by_kind_ms["half_precision"] < 0.5 * many.decode_by_kind_ms["half_precision"]
    assert one.device_bytes_by_category["weights"] == many.device_bytes_by_category["weights"]
