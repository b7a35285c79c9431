"""A profile of generation holds exact keys and values and one template per distinct block, and is JSON."""

import json
from typing import Any

import pytest

from optimizer.base.errors import InvalidModel, InvalidPlan, InvalidWorkload
from optimizer.estimate.shape.compiled import PartRequest, compile_shape
from optimizer.models.spec import read_model_spec
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile, KvTensors, block_part
from optimizer.profile.trace.generation import profile_generation
from tests.optimizer.models.small_configs import SMALL_CONFIGS

LLAMA = SMALL_CONFIGS["llama"]


def trace(config: dict[str, Any], *representations: str) -> GenerationProfile:
    return profile_generation(read_model_spec(config), representations=representations or ("fp32",))


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return trace(LLAMA, "fp32", "bf16", "fp32/int8")


def test_it_survives_json(profile: GenerationProfile) -> None:
    assert GenerationProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_part_that_is_not_there_is_refused_by_name(profile: GenerationProfile) -> None:
    document = profile.to_json()
    document["decode"]["regimes"]["bf16"][0]["parts"]["head"] = 999
    with pytest.raises(InvalidModel, match=r"profile\.decode\.regimes\.bf16\[0\]\.parts points to 999"):
        GenerationProfile.from_json(document)


def test_depth_adds_nothing_but_instances(profile: GenerationProfile) -> None:
    deep = trace({**LLAMA, "num_hidden_layers": 40}, "fp32", "bf16", "fp32/int8")
    assert deep.prefill.ops == profile.prefill.ops
    assert deep.decode.parts == profile.decode.parts
    assert deep.block_kinds == (0, *[1] * 38, 2)


@pytest.mark.parametrize(("num_groups", "elements"), [(4, 64), (2, 32), (1, 16)])
def test_keys_and_values_are_those_of_the_groups(num_groups: int, elements: int) -> None:
    traced = trace({**LLAMA, "num_key_value_heads": num_groups})
    tensors = KvTensors(elements_per_token=elements, window=None, num_heads=num_groups, key_dim=8)
    assert set(traced.kv) == {tensors}
    assert tensors.value_dim == 8


def test_blocks_with_and_without_a_window_are_distinguished() -> None:
    traced = trace({**SMALL_CONFIGS["gemma2"], "num_hidden_layers": 6})
    assert [traced.kv[kind].window for kind in traced.block_kinds] == [16, None] * 3
    assert traced.kv[0].num_elements(40) == 16 * 32


def test_packed_weights_are_weighed_with_their_scales(profile: GenerationProfile) -> None:
    matrices = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
    outputs = 2 * 32 + 2 * 16 + 2 * 48 + 32
    assert profile.weight_bytes("fp32/int8").by_block[0] == matrices + 4 * outputs + 2 * 32 * 4
    assert profile.weight_bytes("fp16").by_block == profile.weight_bytes("bf16").by_block


def test_a_representation_that_was_not_traced_is_refused(profile: GenerationProfile) -> None:
    with pytest.raises(InvalidPlan, match="plan.weights are bf16/int8, .* known: fp32, bf16, fp32/int8"):
        profile.weight_bytes("bf16/int8")
    with pytest.raises(InvalidPlan, match="plan.weights are int3"):
        trace(LLAMA, "int3")


def test_lengths_beyond_the_positions_are_refused(profile: GenerationProfile) -> None:
    with pytest.raises(InvalidWorkload, match="65 tokens were asked for; this model was profiled for 2 to 64"):
        profile.prefill.regime("fp32", (1, 65))


def test_prompts_of_attention_in_blocks_are_whole_blocks() -> None:
    traced = trace({**SMALL_CONFIGS["headroom_decoder"], "layer_types": ["local"] * 3})
    with pytest.raises(InvalidWorkload, match="prompt_length is 20; .* in blocks of 8 tokens"):
        traced.prefill.regime("fp32", (1, 20))
    assert traced.decode.regime("fp32", (1, 21)).covers((1, 21))


def test_a_model_that_keeps_no_keys_and_values_is_refused() -> None:
    with pytest.raises(InvalidModel, match="layer_types holds linear"):
        trace(SMALL_CONFIGS["headroom_decoder"])


def test_attention_on_the_host_leaves_ops_that_do_not_depend_on_the_tokens_seen() -> None:
    traced = trace({**SMALL_CONFIGS["gemma2"], "num_hidden_layers": 6}).on_host
    assert traced is not None
    assert set(traced.num_query_heads) == {4}
    assert set(traced.caps_scores) == {True}
    ranges = [(regime.sequence_low, regime.sequence_high) for regime in traced.decode.regimes["fp32"]]
    assert ranges == [(3, 64)] * 2
    short, long = (
        compile_shape(traced.decode, WeightsPlan(), (4, length)).part_bytes(PartRequest(block_part(0))) for length in (5, 60)
    )
    assert (short.rise, short.net.tolist()) == (long.rise, long.net.tolist())


def test_a_model_that_attends_in_code_of_its_own_has_no_attention_on_the_host() -> None:
    traced = trace(SMALL_CONFIGS["falcon"])
    assert traced.on_host is None
    with pytest.raises(InvalidPlan, match=r"plan\.kv_cache\.attention is host; falcon attends in code of its own"):
        traced.decode_with("host")


def test_what_is_traced_of_attention_on_the_host_must_be_of_every_block(profile: GenerationProfile) -> None:
    document = profile.to_json()
    document["on_host"]["num_query_heads"] = [4]
    with pytest.raises(InvalidModel, match=r"profile\.on_host\.num_query_heads has 1 entries; there are 3 distinct blocks"):
        GenerationProfile.from_json(document)
