"""Tokenizers as GGUF's vocabulary: what llama.cpp needs to cut and merge as they do."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from optimizer.base.errors import InvalidWorkload
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.models.files.gguf_export.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

SPACE = "\u2581"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pieces(tmp_path: Path) -> Path:
    """As transformers writes the tokenizer of Llama 2: BPE over SentencePiece's pieces, bytes as the fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", "ab", f"{SPACE}ab", "aba"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("a", "b"), (SPACE, "ab"), ("ab", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def edited(tmp_path: Path, **changes: Any) -> Path:
    document = json.loads(TOKENIZER_FILE.read_text())
    document["model"].update(changes.pop("model", {}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**document, **changes}))
    return tmp_path / "tokenizer.json"


def read(file: Path, **changes: Any) -> Vocabulary:
    given: dict[str, Any] = {"vocab_size": 4096, "special_ids": {}, "chat": None, **changes}
    return read_vocabulary(file, **given)


def test_pieces_are_merged_by_the_rank_of_their_merge(tmp_path: Path) -> None:
    found = read(pieces(tmp_path), vocab_size=268, special_ids={"bos": 1, "eos": 2})
    assert (found.model, found.cut, found.merges) == ("llama", "default", ())
    scores = dict(zip(found.tokens, found.scores, strict=True))
    assert scores["ab"] > scores[f"{SPACE}ab"] > scores["aba"] > scores["a"]
    assert found.special == {"bos": 1, "eos": 2, "unk": 0}
    assert (found.adds_begin, found.adds_end, found.adds_space) == (True, False, True)


def test_every_token_has_its_kind_and_ids_beyond_the_tokenizer_are_filled_up(tmp_path: Path) -> None:
    found = read(pieces(tmp_path), vocab_size=268)
    kinds = dict(zip(found.tokens, found.kinds, strict=True))
    assert kinds["<unk>"] == UNKNOWN
    assert kinds["<s>"] == CONTROL
    assert kinds["<0x0A>"] == BYTE
    assert kinds["ab"] == NORMAL
    assert kinds["<tool>"] == USER_DEFINED
    assert (found.tokens[-1], found.kinds[-1]) == ("[PAD267]", UNUSED)
    assert len(found.tokens) == 268


def test_the_bundled_tokenizer_cuts_as_gpt_2_does() -> None:
    found = read(TOKENIZER_FILE)
    assert (found.model, found.cut, found.scores) == ("gpt2", "gpt-2", ())


@pytest.mark.parametrize(("ignores", "cut"), [(True, "llama-bpe"), (False, "dbrx")])
def test_llama_3s_cut_is_known_by_its_expression(ignores: bool, cut: str, tmp_path: Path) -> None:
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)])
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokenizer.pre_tokenizer = split
    document = json.loads(tokenizer.to_str())
    document["model"]["ignore_merges"] = ignores
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert read(tmp_path / "tokenizer.json").cut == cut


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "a tokenizer that cuts texts by Whitespace in a way llama.cpp has no"),
        ({"normalizer": {"type": "Lowercase"}}, "a tokenizer that normalizes by Lowercase"),
        ({"model": {"type": "Unigram"}}, "a tokenizer of kind Unigram"),
    ],
)
def test_a_tokenizer_without_words_in_gguf_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        read(edited(tmp_path, **changes))
    assert message in str(caught.value)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    with pytest.raises(InvalidWorkload, match="ids up to 4,095"):
        read(TOKENIZER_FILE, vocab_size=4000)
