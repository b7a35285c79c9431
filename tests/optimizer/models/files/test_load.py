"""Weights are loaded strictly, from the names that published files use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.models.build import build_model, load_weights
from optimizer.models.spec import read_model_spec
from tests.optimizer.models.small_configs import PUBLISHED_TYPES, SMALL_CONFIGS


def _build(model_type: str, *, seed: int, dtype: torch.dtype = torch.float32, **changes: object) -> Any:
    return build_model(read_model_spec({**SMALL_CONFIGS[model_type], **changes}), dtype=dtype, device="cpu", seed=seed)


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", sorted(PUBLISHED_TYPES))
def test_what_transformers_saved_is_loaded_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    saved, loaded = _build(model_type, seed=1), _build(model_type, seed=2)
    saved.save_pretrained(tmp_path)
    assert not _equal(saved, loaded)
    load_weights(loaded, tmp_path)
    assert _equal(saved, loaded)


def test_shards_are_loaded_like_one_file(tmp_path: Path) -> None:
    saved, loaded = _build("llama", seed=1), _build("llama", seed=2)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    load_weights(loaded, tmp_path)
    assert _equal(saved, loaded)


def test_names_without_the_base_prefix_and_old_buffers_are_understood(tmp_path: Path) -> None:
    saved, loaded = _build("gpt2", seed=1), _build("gpt2", seed=2)
    state = {
        name.removeprefix("transformer."): value
        for name, value in saved.state_dict().items()
        if name != "lm_head.weight"
    }
    state["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "model.safetensors")
    load_weights(loaded, tmp_path)
    assert _equal(saved, loaded)


def test_tied_weights_stay_tied_and_may_come_twice(tmp_path: Path) -> None:
    saved, loaded = _build("gemma", seed=1), _build("gemma", seed=2)
    save_file({name: value.clone() for name, value in saved.state_dict().items()}, tmp_path / "model.safetensors")
    load_weights(loaded, tmp_path)
    assert _equal(saved, loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in _build("gemma", seed=1).state_dict().items()}
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match="differs from the one it is tied to by tie_word_embeddings"):
        load_weights(_build("gemma", seed=2), tmp_path)


def test_weights_are_converted_to_the_models_dtype(tmp_path: Path) -> None:
    saved, loaded = _build("llama", seed=1, dtype=torch.bfloat16), _build("llama", seed=2)
    saved.save_pretrained(tmp_path)
    load_weights(loaded, tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert _equal(saved.float(), loaded)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    state = dict(_build("llama", seed=1).state_dict())
    del state["model.norm.weight"]
    state["model.extra.weight"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel) as caught:
        load_weights(_build("llama", seed=2), tmp_path)
    assert str(caught.value) == (
        "the weights do not match the config of LlamaForCausalLM: "
        "1 missing (model.norm.weight); 1 not expected (model.extra.weight)"
    )
    assert caught.value.fields["value"] == {"missing": ["model.norm.weight"], "unexpected": ["model.extra.weight"]}


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    state = dict(_build("llama", seed=1).state_dict())
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=r"1 missing \(lm_head.weight\); none not expected"):
        load_weights(_build("llama", seed=2), tmp_path)


def test_another_shape_is_named_with_the_one_asked_for(tmp_path: Path) -> None:
    _build("llama", seed=1, vocab_size=130).save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match=r"has shape \[130, 32\]; the config asks for \[128, 32\]"):
        load_weights(_build("llama", seed=2), tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    _build("mixtral", seed=1).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=r"1 missing \(model\.layers\.1\.mlp\.experts\.gate_up_proj\[2\]\.w3\)"):
        load_weights(_build("mixtral", seed=2), tmp_path)


def test_a_hostile_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    header = json.dumps({"../x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(InvalidModel, match="a tensor named '../x'"):
        load_weights(_build("llama", seed=2), tmp_path)
