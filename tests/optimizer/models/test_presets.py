"""Presets have the published sizes, counted on built modules."""

import pytest
import torch

from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.presets import PRESETS

PUBLISHED_PARAMETERS = {
    "headroom-demo-10m": 10_492_160,
    "headroom-local-10m": 10_492_160,
    "headroom-linear-6m": 5_770_496,
    "gpt2": 124_439_808,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_241_732_096,
    "gemma-2-2b": 2_614_341_888,
    "phi-3-mini": 3_821_079_552,
    "mixtral-8x7b": 46_702_792_704,
}


def test_every_preset_has_a_known_size() -> None:
    assert set(PRESETS) == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_a_preset_builds_to_its_published_number_of_parameters(name: str) -> None:
    spec = PRESETS[name].spec
    model = build_model(spec, dtype=torch.bfloat16, device="meta", seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[name]
    assert spec.num_parameters == PUBLISHED_PARAMETERS[name]
    assert len(find_blocks(model)) == spec.num_blocks


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_room_for_the_bundled_tokenizer_and_says_where_it_is_from(name: str) -> None:
    preset = PRESETS[name]
    assert preset.spec.vocab_size >= 4_096
    assert preset.name == name
    assert preset.title
    assert preset.source


def test_only_our_own_models_come_with_their_tokenizer() -> None:
    assert [name for name, preset in PRESETS.items() if preset.has_tokenizer] == [
        "headroom-demo-10m",
        "headroom-local-10m",
        "headroom-linear-6m",
    ]
