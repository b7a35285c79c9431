"""A profile holds how a block makes keys and values again."""

import json
from typing import Any

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.estimate.shape.compiled import PartRequest, compile_shape
from optimizer.models.spec import read_model_spec
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile, block_part
from optimizer.profile.ops import EMBEDDING, HEAD
from optimizer.profile.trace.generation import profile_generation
from tests.optimizer.models.small_configs import SMALL_CONFIGS


def trace(config: dict[str, Any], *representations: str) -> GenerationProfile:
    return profile_generation(read_model_spec(config), representations=representations or ("fp32",))


@pytest.fixture(scope="module")
def mixed() -> GenerationProfile:
    """A window in every other block."""
    return trace({**SMALL_CONFIGS["gemma2"], "num_key_value_heads": 4}, "fp32", "bf16")


def test_only_blocks_that_can_do_anything(mixed: GenerationProfile) -> None:
    assert [mixed.can_rebuild(kind) for kind in mixed.block_kinds] == [False, True, False]
    compiled = compile_shape(mixed.rebuild, WeightsPlan(), (3, 10))
    assert [compiled.num_ops(block_part(kind)) > 0 for kind in mixed.block_kinds] == [False, True, False]
    assert compiled.num_ops(HEAD) == 0


def test_copies_of_positions_stay_and_all_else_goes(mixed: GenerationProfile) -> None:
    compiled = compile_shape(mixed.rebuild, WeightsPlan(dtype="bf16"), (3, 10))
    assert compiled.part_bytes(PartRequest(EMBEDDING)).net.sum() == 10 * (2 * 8 * 2 + 8)
    assert compiled.part_bytes(PartRequest(block_part(1))).net.sum() == 0
    assert compiled.part_bytes(PartRequest(block_part(1))).rise > 2 * 3 * 10 * 32 * 2


def test_products_are_those_of_keys_and_values_alone() -> None:
    profile = trace({**SMALL_CONFIGS["llama"], "num_key_value_heads": 4})
    for regime in profile.rebuild.regimes["fp32"]:
        part = profile.rebuild.parts[regime.parts[block_part(0)]]
        assert [profile.rebuild.ops[op].kind for op in part.ops].count("matmul") == 2


def test_it_survives_json(mixed: GenerationProfile) -> None:
    assert GenerationProfile.from_json(json.loads(json.dumps(mixed.to_json()))) == mixed


def test_a_part_that_is_not_there_is_refused_by_name(mixed: GenerationProfile) -> None:
    document = mixed.to_json()
    document["rebuild"]["regimes"]["bf16"][0]["parts"]["head"] = 999
    with pytest.raises(InvalidModel, match=r"profile\.rebuild\.regimes\.bf16\[0\]\.parts points to 999"):
        GenerationProfile.from_json(document)


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon"])
def test_where_nothing_would_be_saved_nothing_is_traced(name: str) -> None:
    assert trace(SMALL_CONFIGS[name]).rebuild is None
