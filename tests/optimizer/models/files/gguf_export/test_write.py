"""GGUF files that are written hold the model, by the gguf package's reader and by this program's own."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from optimizer.base.errors import DiskFull, ExportInvalid, InvalidWorkload
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.chat_facts import ChatFacts
from optimizer.models.build import build_model, load_weights
from optimizer.models.files.export import list_parameters
from optimizer.models.files.gguf_export.check import check_gguf_file
from optimizer.models.files.gguf_export.kinds import ARCHITECTURES, check_gguf
from optimizer.models.files.gguf_export.tensors import GgufEntry, list_entries
from optimizer.models.files.gguf_export.vocabulary import read_vocabulary
from optimizer.models.files.gguf_export.write import write_gguf
from optimizer.models.spec import ModelSpec, read_model_spec

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
GEMMA = {"tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    more: dict[str, Any] = GEMMA if model_type.startswith("gemma") else {}
    if model_type == "gemma3_text":
        more = {**more, "layer_types": ["sliding_attention"] * 2}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or model_type != "qwen2"}
    return read_model_spec({"model_type": model_type, **sizes, **more, **changes})


def entries_of(spec: ModelSpec, *, packing: Any = "f16") -> list[GgufEntry]:
    model = build_model(spec, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.linspace(0, 0.1, parameter.numel()))
    return list_entries(list_parameters(model, dtype=torch.float32), spec, packing=packing)


def write(folder: Path, spec: ModelSpec, *, packing: Any = "f16", chat: ChatFacts | None = None) -> tuple[Path, list[GgufEntry]]:
    entries = entries_of(spec, packing=packing)
    vocabulary = read_vocabulary(TOKENIZER_FILE, vocab_size=spec.vocab_size, special_ids={"eos": 0}, chat=chat)
    file = folder / "model.gguf"
    write_gguf(file, entries, spec, vocabulary=vocabulary, packing=packing, name="a model")
    return file, entries


@pytest.mark.breadth
@pytest.mark.parametrize("packing", ["f16", "q8_0"])
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_every_kind_is_written_within_its_packings_bound(model_type: str, packing: str, tmp_path: Path) -> None:
    file, entries = write(tmp_path, spec_of(model_type), packing=packing)
    used = check_gguf_file(file, entries)
    assert used == 0 if packing == "f16" else 0.9 < used <= 1


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_a_file_that_was_written_is_read_as_the_same_model(model_type: str, tmp_path: Path) -> None:
    spec = spec_of(model_type)
    write(tmp_path, spec)
    written, found = build_model(spec, seed=1).eval(), build_model(spec, seed=2).eval()
    load_weights(found, tmp_path)
    read = dict(found.named_parameters())
    for name, parameter in written.named_parameters():
        if parameter.dim() > 1:
            assert torch.equal(read[name], parameter.half().float()), name


def test_metadata_is_that_of_the_model(tmp_path: Path) -> None:
    chat = ChatFacts(template="{{ messages }}", named_templates={"tool_use": "{{ tools }}"})
    file, _ = write(tmp_path, spec_of("llama", rope_theta=500_000.0), packing="q8_0", chat=chat)
    fields = gguf.GGUFReader(file).fields

    def value(key: str) -> Any:
        return fields[key].contents()

    assert value("general.architecture") == "llama"
    assert value("general.file_type") == 7
    assert value("llama.block_count") == 2
    assert value("llama.attention.head_count_kv") == 2
    assert value("llama.rope.freq_base") == 500_000.0
    assert value("tokenizer.ggml.model") == "gpt2"
    assert value("tokenizer.ggml.pre") == "gpt-2"
    assert value("tokenizer.ggml.eos_token_id") == 0
    assert value("tokenizer.chat_template") == "{{ messages }}"
    assert value("tokenizer.chat_template.tool_use") == "{{ tools }}"
    document = json.loads(TOKENIZER_FILE.read_text())
    tokens = value("tokenizer.ggml.tokens")
    assert len(tokens) == 4096
    assert {token: index for index, token in enumerate(tokens)} == document["model"]["vocab"] | {tokens[0]: 0}
    assert len(value("tokenizer.ggml.merges")) == len(document["model"]["merges"])


def test_llama_3s_scaling_is_a_tensor_of_factors(tmp_path: Path) -> None:
    spec = spec_of("llama", rope_theta=500_000.0, rope_scaling=LLAMA3)
    file, entries = write(tmp_path, spec)
    check_gguf_file(file, entries)
    factors = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "rope_freqs.weight").data
    model: Any = build_model(spec)
    plain: Any = build_model(spec_of("llama", rope_theta=500_000.0))
    ratio = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    np.testing.assert_allclose(factors, ratio.numpy(), rtol=1e-5)


def test_a_tensor_that_is_not_what_was_written_is_named(tmp_path: Path) -> None:
    file, entries = write(tmp_path, spec_of("qwen3"), packing="q8_0")
    wrong = tmp_path / "wrong.gguf"
    content = bytearray(file.read_bytes())
    content[-5000] ^= 0x7F
    wrong.write_bytes(content)
    with pytest.raises(ExportInvalid, match="differs from what was trained by"):
        check_gguf_file(wrong, entries)


def test_the_disk_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(DiskFull, match="the GGUF file needs .* of disk; 1 B are free"):
        write(tmp_path, spec_of("llama"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("olmo2", {}, "models of type olmo2 cannot be written as GGUF, allowed: llama, mistral"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64, and llama.cpp computes gemma2 with 16"),
        ("llama", {"hidden_act": "gelu"}, "activation is 'gelu', and llama.cpp computes llama with 'silu'"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        check_gguf(spec_of(model_type, **changes))
    assert message in str(caught.value)
    assert caught.value.fields["field"] == "workload.export.gguf"
