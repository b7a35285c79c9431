"""An exported folder is complete, loads in transformers alone, and generates."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimizer.base.errors import InvalidModel
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.models.build import build_model
from optimizer.models.files.export import export_model
from optimizer.models.spec import read_model_spec
from tests.optimizer.models.small_configs import PUBLISHED_TYPES, SMALL_CONFIGS

DEMO_LIKE: dict[str, Any] = {
    **SMALL_CONFIGS["llama"],
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.breadth
@pytest.mark.parametrize("model_type", sorted(PUBLISHED_TYPES))
def test_every_type_loads_with_the_same_logits_and_generates(model_type: str, tmp_path: Path) -> None:
    spec = read_model_spec(SMALL_CONFIGS[model_type])
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1).eval()
    export_model(model, spec, folder=tmp_path / "out")
    loading_class = getattr(transformers, spec.config["architectures"][0])
    loaded, info = loading_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded.eval()
    inputs = torch.arange(12).reshape(1, 12)
    more = {"decoder_input_ids": inputs} if loaded.config.is_encoder_decoder else {}
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=inputs, **more).logits, model(input_ids=inputs, **more).logits)
    if spec.kind != "encoder":
        # transformers' cache of an encoder-decoder has as many layers as the encoder, whatever the decoder has.
        lengths = {"max_new_tokens": 4, "min_new_tokens": 4, "use_cache": not more}
        generated = loaded.generate(inputs, attention_mask=torch.ones_like(inputs), **lengths)
        assert generated.shape[1] == (5 if more else 16)


def test_the_tokenizer_comes_along_and_writes_text_back(tmp_path: Path) -> None:
    spec = read_model_spec(DEMO_LIKE)
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    export_model(model, spec, folder=tmp_path / "out", tokenizer_file=TOKENIZER_FILE, chat_template="{{ messages }}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "In the beginning God created the heaven and the earth."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.chat_template) == (
        "<|endoftext|>",
        0,
        "{{ messages }}",
    )
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_the_end_token_is_the_one_that_parted_documents(tmp_path: Path) -> None:
    spec = read_model_spec({**DEMO_LIKE, "eos_token_id": [7, 8]})
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    export_model(model, spec, folder=tmp_path / "bundled", tokenizer_file=TOKENIZER_FILE)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bundled").generation_config.eos_token_id == 0
    document = json.loads(TOKENIZER_FILE.read_text())
    (tmp_path / "own.json").write_text(json.dumps(document))
    export_model(model, spec, folder=tmp_path / "own", tokenizer_file=tmp_path / "own.json")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "own").generation_config.eos_token_id == 7


def test_every_file_is_listed_with_its_size_and_hash(tmp_path: Path) -> None:
    spec = read_model_spec(DEMO_LIKE)
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    files = export_model(model, spec, folder=tmp_path / "out", tokenizer_file=TOKENIZER_FILE)
    assert [file.name for file in files] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [file.name for file in files]
    for file in files:
        content = (tmp_path / "out" / file.name).read_bytes()
        assert (file.num_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_tied_weights_are_written_once_and_loaded_tied(tmp_path: Path) -> None:
    spec = read_model_spec(DEMO_LIKE)
    export_model(build_model(spec, dtype=torch.float32, device="cpu", seed=1), spec, folder=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    weights_bytes = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 4 * spec.num_parameters <= weights_bytes < 4 * spec.num_parameters + 10_000


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_on_request_leaves_the_model_as_it_was(
    dtype: str, expected: torch.dtype, tmp_path: Path
) -> None:
    spec = read_model_spec(DEMO_LIKE)
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    export_model(model, spec, folder=tmp_path / "out", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    pairs = zip(model.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(ours.to(expected), theirs) for ours, theirs in pairs)


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    spec = read_model_spec(DEMO_LIKE)
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    first = export_model(model, spec, folder=tmp_path / "one", tokenizer_file=TOKENIZER_FILE)
    assert export_model(model, spec, folder=tmp_path / "two", tokenizer_file=TOKENIZER_FILE) == first


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    spec = read_model_spec(SMALL_CONFIGS["llama"])
    model = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    with pytest.raises(InvalidModel, match="the bundled tokenizer has 4,096 entries, the model's vocab_size is 128"):
        export_model(model, spec, folder=tmp_path / "out", tokenizer_file=TOKENIZER_FILE)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    spec = read_model_spec(DEMO_LIKE)
    with pytest.raises(FileExistsError, match="export writes a new folder"):
        export_model(build_model(spec, dtype=torch.float32, device="meta", seed=1), spec, folder=tmp_path)
