"""A GGUF file alone becomes a model: config, tokenizer and chat template are its own."""

import json
from pathlib import Path

import gguf
import pytest
from django.contrib.auth.models import User
from pytest_django import Settings
from tokenizers import Tokenizer

from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.models.build import build_model, load_weights
from optimizer.models.spec import read_model_spec
from tests.optimizer.models.files.packed.test_gguf import spec_of, tensors_of, write
from webapp.catalog.actions import create_model
from webapp.catalog.files.kept_file import KeptFile
from webapp.catalog.linked import link_model
from webapp.catalog.weights import weights_folder


@pytest.fixture
def file(tmp_path: Path, settings: Settings) -> Path:
    settings.HEADROOM_MODEL_ROOTS = [tmp_path / "open"]
    (tmp_path / "open").mkdir()
    path = tmp_path / "open" / "small.gguf"
    spec = spec_of("qwen2")
    write(path, spec, tensors_of(spec), packing="Q8_0", tokenizer__chat_template="{{ messages }}")
    return path


def test_a_file_is_linked_with_its_config_and_template(ada: User, file: Path, headroom_home: Path) -> None:
    model = link_model(owner=ada, name="mine", path=str(file))
    assert (model.model_type, model.has_weights, model.linked_from) == ("qwen2", True, str(file))
    folder = weights_folder(model)
    assert folder is not None
    loaded = build_model(read_model_spec(model.config), seed=2)
    load_weights(loaded, folder)


def test_a_file_is_uploaded_as_well(ada: User, file: Path, headroom_home: Path) -> None:
    with KeptFile(file, name="small.gguf") as upload:
        model = create_model(owner=ada, name="mine", config=None, weights=[upload])
    assert (headroom_home / model.folder / "model.gguf").is_file()
    assert model.has_weights


def test_its_tokenizer_is_rebuilt(ada: User, tmp_path: Path, file: Path, headroom_home: Path) -> None:
    """The bundled tokenizer, as a GGUF file holds it, writes the same ids."""
    document = json.loads(TOKENIZER_FILE.read_text())
    vocab = document["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    path = tmp_path / "open" / "whole.gguf"
    spec = spec_of("qwen2")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, field in reader.fields.items():
        if name.startswith("qwen2."):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    wide = read_model_spec({**spec.to_config(), "vocab_size": len(tokens)})
    tensors = tensors_of(wide)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, tensor in tensors.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = link_model(owner=ada, name="mine", path=str(path))
    kept = headroom_home / model.folder
    assert (model.has_tokenizer, model.has_chat) == (True, True)
    assert json.loads((kept / "chat.json").read_text())["template"] == "{{ messages }}"
    ours, rebuilt = Tokenizer.from_file(str(TOKENIZER_FILE)), Tokenizer.from_file(str(kept / "tokenizer.json"))
    text = "In the beginning God created the heaven and the earth."
    assert rebuilt.encode(text, add_special_tokens=False).ids == ours.encode(text, add_special_tokens=False).ids
