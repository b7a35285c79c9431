"""Plans and workloads of generation: JSON there and back, what cannot go together, and what is said of it."""

import pytest

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationWorkload

WORKLOAD = GenerationWorkload(prompt_length=16, num_new_tokens=8, num_sequences=4)


def test_a_plan_survives_json() -> None:
    plan = GenerationPlan(batch_size=3, weights=WeightsPlan(dtype="bf16", frozen="nf4", place="disk", prefetch=2))
    assert GenerationPlan.from_json(plan.to_json()) == plan
    assert GenerationPlan.from_json(plan.to_json()).fingerprint == plan.fingerprint


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidPlan, match=r"plan\.kv_cache\.bits is not a known field"):
        GenerationPlan.from_json({"kv_cache": {"bits": 4}})


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"plan\.batch_size is 0; allowed: 1 or more"):
        GenerationPlan(batch_size=0)


def test_a_batch_larger_than_the_workload_is_a_conflict() -> None:
    with pytest.raises(InvalidPlan, match=r"batch size is 5, .* \(the workload has 4\)"):
        GenerationPlan(batch_size=5).check(workload=WORKLOAD, max_sequence_length=64)


def test_autocast_is_a_conflict() -> None:
    conflict = GenerationPlan(weights=WeightsPlan(autocast="bf16")).find_conflict(WORKLOAD)
    assert str(conflict).startswith("weights autocast is bf16, which is for training")


@pytest.mark.parametrize("prefix", [-1, 1])
def test_a_prefix_of_one_token_or_less_than_none_is_refused(prefix: int) -> None:
    with pytest.raises(InvalidPlan, match=rf"plan\.kv_cache\.prefix_tokens is {prefix}; allowed: 0, or 2 or more"):
        KvCachePlan(place="host", prefix_tokens=prefix)


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({}, "which saves nothing if keys and values stay on the device: choose another place for them, or 0"),
        ({"dtype": "int8"}, "which saves nothing if keys and values stay on the device"),
        ({"dtype": "int4", "place": "disk"}, "which saves nothing if keys and values travel in int4"),
    ],
)
def test_a_prefix_of_what_does_not_move_or_is_packed_is_a_conflict(choices: dict[str, str], why: str) -> None:
    plan = GenerationPlan(kv_cache=KvCachePlan(prefix_tokens=8, **choices))
    conflict = plan.find_conflict(WORKLOAD)
    assert str(conflict).startswith(f"KV cache prefix tokens is 8, {why}")
    with pytest.raises(InvalidPlan):
        plan.check(workload=WORKLOAD, max_sequence_length=64)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_prefix_off_the_device_changes_no_numbers(place: str) -> None:
    plan = GenerationPlan(kv_cache=KvCachePlan(place=place, prefix_tokens=8))
    assert plan.find_conflict(WORKLOAD) is None
    assert plan.is_lossless


def test_tokens_beyond_the_positions_are_refused_with_their_sum() -> None:
    with pytest.raises(InvalidWorkload, match="make 24 tokens; this model has positions for 23"):
        GenerationPlan().check(workload=WORKLOAD, max_sequence_length=23)


def test_tokens_up_to_the_last_position_are_not() -> None:
    GenerationPlan().check(workload=WORKLOAD, max_sequence_length=24)


@pytest.mark.parametrize("field", ["prompt_length", "num_new_tokens", "num_sequences"])
def test_a_workload_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(InvalidWorkload, match=rf"workload\.{field} is 0; allowed: an integer from"):
        GenerationWorkload(**{field: 0})


def test_the_last_token_is_not_kept() -> None:
    assert WORKLOAD.cache_length == 23


@pytest.mark.parametrize(
    ("weights", "is_lossless"),
    [
        (WeightsPlan(), True),
        (WeightsPlan(place="disk"), True),
        (WeightsPlan(dtype="bf16"), False),
        (WeightsPlan(frozen="int8"), False),
    ],
)
def test_only_fp32_weights_that_are_not_packed_are_lossless(weights: WeightsPlan, is_lossless: bool) -> None:
    assert GenerationPlan(weights=weights).is_lossless is is_lossless


@pytest.mark.parametrize("place", ["device", "disk"])
def test_attention_on_the_host_needs_keys_and_values_there(place: str) -> None:
    conflict = GenerationPlan(kv_cache=KvCachePlan(place=place, attention="host")).find_conflict(WORKLOAD)
    assert str(conflict) == (
        f"KV cache attention is host, which needs keys and values on the host; their place is {place}"
    )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_attention_on_the_host_reads_nothing_that_is_packed(dtype: str) -> None:
    plan = GenerationPlan(kv_cache=KvCachePlan(place="host", dtype=dtype, attention="host"))
    assert str(plan.find_conflict(WORKLOAD)) == (
        f"KV cache attention is host, which reads unpacked keys and values; dtype {dtype} packs them"
    )


def test_attention_on_the_host_is_lossless_and_keeps_who_is_over() -> None:
    plan = GenerationPlan(kv_cache=KvCachePlan(place="host", attention="host"))
    assert plan.find_conflict(WORKLOAD) is None
    assert (plan.is_lossless, plan.drops_ended, plan.kv_cache.num_ahead) == (True, False, 0)
