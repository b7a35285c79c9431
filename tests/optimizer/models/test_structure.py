"""A model's structure from its config: every parameter is in one place, and blocks that are alike are folded."""

from typing import Any

import pytest

from optimizer.models.presets import PRESETS
from optimizer.models.spec import read_model_spec
from optimizer.models.structure import Structure, describe_structure

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "decoder_sparse_step": 2,
    "max_position_embeddings": 512,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 1000,
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
}


def total(structure: Structure) -> int:
    in_blocks = sum(fold.num_parameters for stack in structure.stacks for fold in stack.folds)
    return structure.embedding_parameters + in_blocks + structure.head_parameters + structure.other_parameters


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_parts_of_every_preset_sum_to_the_whole(name: str) -> None:
    spec = PRESETS[name].spec
    structure = describe_structure(spec)
    assert total(structure) == spec.num_parameters
    assert sum(fold.num_blocks for stack in structure.stacks for fold in stack.folds) == spec.num_blocks
    assert structure.other_parameters >= 0


def test_equal_blocks_are_one_run() -> None:
    [fold] = describe_structure(PRESETS["llama-3-8b"].spec).stacks[0].folds
    [run] = fold.runs
    assert (run.first, run.last, fold.times, run.block.num_parameters) == (1, 32, 1, 218_112_000)


def test_a_pattern_that_repeats_is_described_once() -> None:
    structure = describe_structure(read_model_spec(MOE))
    [fold] = structure.stacks[0].folds
    assert (fold.times, [run.num_blocks for run in fold.runs]) == (3, [1, 1])
    dense, sparse = (run.block.num_parameters for run in fold.runs)
    assert sparse - dense == 4 * (3 * 64 * 32 + 64) - 3 * 64 * 128
    assert ("experts", 4) in structure.facts


def test_an_encoder_with_a_decoder_has_two_stacks() -> None:
    structure = describe_structure(read_model_spec(T5))
    assert [(stack.name, stack.folds[0].num_blocks) for stack in structure.stacks] == [("encoder", 3), ("decoder", 2)]
    assert structure.head_parameters == 0
