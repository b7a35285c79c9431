"""Built models are deterministic, have findable parts, and their parts put together give the whole."""

import os
import socket
from typing import Any

import pytest
import torch

from optimizer.models.anatomy import find_anatomy, find_blocks
from optimizer.models.build import build_model
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.models.schema.schema import ARCHITECTURES
from optimizer.models.spec import read_model_spec
from tests.optimizer.models.small_configs import SMALL_CONFIGS

ALL_TYPES = sorted(SMALL_CONFIGS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _inputs() -> torch.Tensor:
    return torch.arange(40).reshape(2, 20) * 7 % 128


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_backbone_and_logits_give_what_the_model_gives(model_type: str) -> None:
    model: Any = build_model(read_model_spec(SMALL_CONFIGS[model_type]), dtype=torch.float32, device="cpu", seed=1).eval()
    anatomy = find_anatomy(model)
    seen: list[torch.Tensor] = []
    inputs = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(_inputs())} if _has_decoder(model) else {}
    with torch.no_grad():
        result = anatomy.run(_inputs(), labels=_inputs(), masks={}, at_hidden=seen.append)
        assert torch.equal(anatomy.compute_logits(result), model(input_ids=_inputs(), **inputs).logits)
    assert [hidden.shape[:2] for hidden in seen] == [_inputs().shape]


def _has_decoder(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder)


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_blocks_are_all_found_and_hold_no_words(model_type: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    blocks = find_blocks(build_model(spec, dtype=torch.float32, device="meta", seed=1))
    assert len(blocks) == spec.num_blocks
    assert len({type(block) for block in blocks}) <= 2
    embeddings = [part for block in blocks for part in block.modules() if isinstance(part, torch.nn.Embedding)]
    assert all(embedding.num_embeddings < spec.vocab_size for embedding in embeddings)


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_every_type_trains(model_type: str) -> None:
    model = build_model(read_model_spec(SMALL_CONFIGS[model_type]), dtype=torch.float32, device="cpu", seed=1)
    inputs = {"decoder_input_ids": _inputs()} if _has_decoder(model) else {}
    logits = model(input_ids=_inputs(), **inputs).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), _inputs()[:, 1:].flatten()).backward()
    assert model.training
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_the_parameter_count_without_torch_is_the_built_one(model_type: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    model = build_model(spec, dtype=torch.float32, device="meta", seed=1)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "config",
    [
        {**SMALL_CONFIGS["gpt2"], "tie_word_embeddings": False, "n_inner": 40},
        {**SMALL_CONFIGS["opt"], "tie_word_embeddings": False, "word_embed_proj_dim": None},
        {**SMALL_CONFIGS["opt"], "enable_bias": False, "layer_norm_elementwise_affine": False},
        {**SMALL_CONFIGS["opt"], "do_layer_norm_before": False},
        {**SMALL_CONFIGS["llama"], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {**SMALL_CONFIGS["llama"], "head_dim": 10},
        {**SMALL_CONFIGS["qwen3"], "attention_bias": True},
        {**SMALL_CONFIGS["gemma2"], "tie_word_embeddings": False, "attention_bias": True},
        {**SMALL_CONFIGS["cohere"], "use_qk_norm": False},
        {**SMALL_CONFIGS["falcon"], "new_decoder_architecture": True, "num_kv_heads": 2},
        {**SMALL_CONFIGS["falcon"], "multi_query": False, "parallel_attn": False, "bias": True},
        {**SMALL_CONFIGS["gpt_bigcode"], "multi_query": False, "tie_word_embeddings": False},
        {**SMALL_CONFIGS["gpt_neox"], "attention_bias": False},
        {**SMALL_CONFIGS["phi"], "qk_layernorm": True},
        {**SMALL_CONFIGS["qwen3_moe"], "decoder_sparse_step": 2},
        {**SMALL_CONFIGS["stablelm"], "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
        {**SMALL_CONFIGS["starcoder2"], "use_bias": False, "tie_word_embeddings": False},
        {**SMALL_CONFIGS["distilbert"], "tie_word_embeddings": False},
        {**SMALL_CONFIGS["electra"], "tie_word_embeddings": False, "embedding_size": 32},
        {**SMALL_CONFIGS["bart"], "tie_word_embeddings": False},
        {**SMALL_CONFIGS["t5"], "tie_word_embeddings": False, "feed_forward_proj": "relu"},
    ],
)
def test_the_parameter_count_follows_the_switches(config: dict[str, object]) -> None:
    spec = read_model_spec(config)
    model = build_model(spec, dtype=torch.float32, device="meta", seed=1)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(model_type: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    first, second, third = (build_model(spec, dtype=torch.float32, device="cpu", seed=seed) for seed in (5, 5, 6))
    weights = list(zip(first.parameters(), second.parameters(), third.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in weights)
    assert any(not torch.equal(one, three) for one, _, three in weights)


def test_building_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    build_model(read_model_spec(SMALL_CONFIGS["llama"]), dtype=torch.float32, device="cpu", seed=9)
    assert torch.equal(torch.get_rng_state(), state)


def test_dtype_and_settings_are_as_asked() -> None:
    model: Any = build_model(read_model_spec(SMALL_CONFIGS["llama"]), dtype=torch.bfloat16, device="cpu", seed=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"
    assert model.config.use_cache is False


def test_the_defaults_written_down_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    for model_type, architecture in ARCHITECTURES.items():
        if model_type == DECODER_TYPE:
            continue  # Ours alone.
        theirs = AutoConfig.for_model(model_type)
        for name, field in architecture.fields.items():
            # Left to the model: derived there from other keys, or different for each size.
            if field.required or name in {
                "head_dim",
                "num_key_value_heads",
                "word_embed_proj_dim",
                "layer_types",
                "sliding_window",
                "num_kv_heads",
                "ffn_hidden_size",
                "num_decoder_layers",
                "decoder_start_token_id",
                "sliding_window_pattern",
            }:
                continue
            assert getattr(theirs, name, None) == field.default, f"{model_type}.{name}"
        if architecture.uses_rope:
            rope = theirs.rope_parameters
            rope = rope["full_attention"] if architecture.rope_by_layer_type else rope
            assert rope["rope_theta"] == architecture.default_rope_theta
            assert rope.get("partial_rotary_factor", 1.0) == architecture.default_partial_rotary


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_the_models_own_config_keeps_every_validated_value(model_type: str) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    config = build_model(spec, dtype=torch.float32, device="meta", seed=0).config
    for name, value in spec.config.items():
        if name in {"dtype", "use_sliding_window", "sliding_window", "sliding_window_pattern", "mlp_only_layers"}:
            continue
        assert getattr(config, name) == value, name


def test_no_connection_is_attempted(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: attempts.append(address))
    build_model(read_model_spec(SMALL_CONFIGS["llama"]), dtype=torch.float32, device="cpu", seed=1)
    import huggingface_hub

    assert attempts == []
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert huggingface_hub.is_offline_mode()
