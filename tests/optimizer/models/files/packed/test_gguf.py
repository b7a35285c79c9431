"""GGUF files, written with the ``gguf`` package as llama.cpp's converter lays tensors out, are read as their model."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from optimizer.base.errors import InvalidModel
from optimizer.models.build import build_model, load_weights
from optimizer.models.files.packed.gguf_read import read_gguf
from optimizer.models.files.readers import tensor_readers
from optimizer.models.spec import ModelSpec, read_model_spec

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
ENUMS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def spec_of(model_type: str) -> ModelSpec:
    sizes = dict(SIZES)
    if model_type == "qwen2":
        sizes["head_dim"] = 16
    if model_type.startswith("gemma"):
        sizes |= {"tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 32}
    if model_type == "gemma3_text":
        sizes["layer_types"] = ["sliding_attention"] * 2
    return read_model_spec({"model_type": model_type, **sizes})


def permuted(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's own: ``convert_hf_to_gguf.py``, ``LlamaModel.permute``."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(file: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor], *, packing: str = "F32", **changes: Any) -> None:
    architecture, config = ARCHITECTURES[spec.model_type], spec.to_config()
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(SIZES["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_token_list([f"t{index}" for index in range(96)])
    writer.add_eos_token_id(2)
    for key, value in changes.items():
        writer.add_string(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(ENUMS[spec.model_type], config["num_hidden_layers"])
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if spec.model_type == "llama" and ".q_proj." in name:
            values = permuted(values, config["num_attention_heads"])
        if spec.model_type == "llama" and ".k_proj." in name:
            values = permuted(values, config["num_key_value_heads"])
        if spec.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = gguf.GGMLQuantizationType[packing if values.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    model = build_model(spec, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape) / 4)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_a_file_is_the_model_that_it_was_made_of(tmp_path: Path, model_type: str) -> None:
    spec = spec_of(model_type)
    tensors = tensors_of(spec)
    write(tmp_path / "model.gguf", spec, tensors)
    _, found = read_gguf(tmp_path / "model.gguf")
    read = read_model_spec(found.config)
    ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert {key: value for key, value in read.config.items() if key not in ids} == {
        key: value for key, value in spec.config.items() if key not in ids
    }
    assert read.end_of_text_id == 2
    loaded = build_model(read, seed=2)
    load_weights(loaded, tmp_path)
    for name, parameter in loaded.named_parameters():
        # Gemma's norms went up by one and down again in fp32
        torch.testing.assert_close(parameter, tensors[name], rtol=0, atol=2e-7 if "norm" in name else 0)


@pytest.mark.parametrize("packing", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_packed_numbers_are_those_of_the_gguf_package(tmp_path: Path, packing: str) -> None:
    spec = spec_of("qwen2")
    tensors = tensors_of(spec)
    write(tmp_path / "model.gguf", spec, tensors, packing=packing)
    kind = gguf.GGMLQuantizationType[packing]
    for reader in tensor_readers(tmp_path):
        values = tensors[reader.name].numpy()
        expected = dequantize(quantize(values, kind), kind) if values.ndim > 1 else values
        assert reader.packing == (packing if values.ndim > 1 else "F32")
        assert torch.equal(reader.read(), torch.from_numpy(np.ascontiguousarray(expected, dtype=np.float32)))


def test_llama_3_scaling_is_known_by_its_numbers(tmp_path: Path) -> None:
    spec = read_model_spec(
        {
            "model_type": "llama",
            **SIZES,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    )
    model = build_model(spec, seed=1)
    plain = 1.0 / (SIZES["rope_theta"] ** (torch.arange(0, 32, 2).float() / 32))
    factors = plain / dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    write(tmp_path / "model.gguf", spec, tensors)
    _, found = read_gguf(tmp_path / "model.gguf")
    assert "rope_scaling" not in found.config
    _write_factors(tmp_path / "scaled.gguf", tmp_path / "model.gguf", factors)
    _, found = read_gguf(tmp_path / "scaled.gguf")
    assert read_model_spec(found.config).config["rope_parameters"] == spec.config["rope_parameters"]
    _write_factors(tmp_path / "odd.gguf", tmp_path / "model.gguf", factors + torch.linspace(0, 1, 16))
    with pytest.raises(InvalidModel, match="a rope_freqs.weight that is not Llama 3's scaling; allowed: its config.json"):
        read_gguf(tmp_path / "odd.gguf")


def _write_factors(file: Path, source: Path, factors: torch.Tensor) -> None:
    """The same file with one tensor more."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub)
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    spec = spec_of("qwen2")
    write(tmp_path / "model.gguf", spec, tensors_of(spec))
    data = (tmp_path / "model.gguf").read_bytes()
    for length in (0, 3, 4, 20, 60, 500, 3_000, len(data) // 2, len(data) - 64):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(InvalidModel, match=r"weights file cut.gguf: .*; allowed: "):
            read_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize("place", range(4, 400, 7))
def test_a_changed_byte_of_the_header_is_refused_or_harmless(tmp_path: Path, place: int) -> None:
    spec = spec_of("qwen2")
    write(tmp_path / "model.gguf", spec, tensors_of(spec))
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    data[place] ^= 0xFF
    (tmp_path / "model.gguf").write_bytes(data)
    message = "allowed:"
    try:
        for reader in tensor_readers(tmp_path):
            reader.read()
    except InvalidModel as error:
        message = error.message
    assert "allowed:" in message


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("x", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match="GGUF: architecture 'mamba'; allowed: llama, mistral, qwen2, qwen3, gemma"):
        tensor_readers(tmp_path)


def test_several_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(InvalidModel, match="GGUF: 2 GGUF files; allowed: one"):
        tensor_readers(tmp_path)
