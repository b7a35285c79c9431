"""A tokenizer.json as GGUF's vocabulary: byte-level BPE with its merges, or SentencePiece-like BPE with scores. Torch-free.

Byte-level: llama.cpp must know how a text is cut before merging, which it does by a name (``tokenizer.ggml.pre``) for each
known regular expression; one that is not known is refused, since the tokens would silently be others. SentencePiece-like:
llama.cpp merges by the score of what comes out, so the rank of a token's first merge, negated, is its score.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from optimizer.base.errors import InvalidWorkload
from optimizer.data.chat_facts import ChatFacts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's kinds of tokens."""
_FIELD = "workload.export.gguf"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KNOWN_CUTS: Mapping[str, str] = {
    rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
}
"""llama.cpp's name of each regular expression that it has built in (``src/llama-vocab.cpp``)."""
_LLAMA_CUT_WITH_MERGES = "dbrx"
"""The same expression as Llama 3's, where a word that is a token is merged all the same."""
_TEXT = "a"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Metadata of the tokenizer."""

    model: Literal["gpt2", "llama"]
    """llama.cpp's: byte-level BPE, or SentencePiece."""
    cut: str
    """``tokenizer.ggml.pre``."""
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    """Pairs that byte-level BPE merges, first ones first."""
    scores: tuple[float, ...]
    """Scores of SentencePiece."""
    special: Mapping[str, int]
    """bos, eos, unk, pad, as far as there are any."""
    adds_begin: bool
    adds_end: bool
    adds_space: bool
    chat_template: str | Sequence[Mapping[str, str]] | None


def read_vocabulary(
    tokenizer_file: str | Path, *, vocab_size: int, special_ids: Mapping[str, int], chat: ChatFacts | None
) -> Vocabulary:
    """vocab_size: of the model; ids beyond the tokenizer's are filled up. special_ids: bos, eos, pad, unk where the config names
    them. Raises InvalidWorkload for a tokenizer that GGUF has no words for.
    """
    document = json.loads(Path(tokenizer_file).read_bytes())
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refusal(f"a tokenizer of kind {model.get('type')}", allowed="BPE, byte-level or with bytes as its fallback")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    is_pieces = bool(model.get("byte_fallback"))
    tokens, kinds = _list_tokens(document, vocab_size=vocab_size, is_pieces=is_pieces)
    merges = [entry if isinstance(entry, str) else " ".join(entry) for entry in model["merges"]]
    special = _find_special(document, tokens, special_ids)
    ids = tokenizer.encode(_TEXT).ids
    plain = tokenizer.encode(_TEXT, add_special_tokens=False).ids
    return Vocabulary(
        model="llama" if is_pieces else "gpt2",
        cut="default" if is_pieces else _find_cut(document),
        tokens=tokens,
        kinds=kinds,
        merges=() if is_pieces else tuple(merges),
        scores=_scores(tokens, model["merges"]) if is_pieces else (),
        special=special,
        adds_begin="bos" in special and bool(ids) and ids[0] == special["bos"],
        adds_end="eos" in special and bool(ids) and ids[-1] == special["eos"],
        adds_space=is_pieces and bool(plain) and tokens[plain[0]].startswith("\u2581"),
        chat_template=_templates(chat),
    )


def add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """writer: the gguf package's, before its file is open."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.cut)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.kinds))
    if vocabulary.model == "gpt2":
        writer.add_token_merges(list(vocabulary.merges))
    else:
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(vocabulary.adds_space)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, token_id in vocabulary.special.items():
        adders[name](token_id)
    writer.add_add_bos_token(vocabulary.adds_begin)
    writer.add_add_eos_token(vocabulary.adds_end)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


# Tokens.


def _list_tokens(
    document: Mapping[str, Any], *, vocab_size: int, is_pieces: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    by_id = {token_id: text for text, token_id in document["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in document.get("added_tokens", ())}
    by_id |= {token_id: entry["content"] for token_id, entry in added.items()}
    if max(by_id, default=-1) >= vocab_size:
        raise _refusal(f"a tokenizer with ids up to {max(by_id):,}", allowed=f"the model's vocabulary of {vocab_size:,}")
    unknown = document["model"].get("unk_token")
    tokens, kinds = [], []
    for token_id in range(vocab_size):
        text = by_id.get(token_id)
        if text is None:
            tokens.append(f"[PAD{token_id}]")
            kinds.append(UNUSED)
            continue
        tokens.append(text)
        if text == unknown:
            kinds.append(UNKNOWN)
        elif token_id in added:
            kinds.append(CONTROL if added[token_id].get("special") else USER_DEFINED)
        else:
            kinds.append(BYTE if is_pieces and _is_byte(text) else NORMAL)
    return tuple(tokens), tuple(kinds)


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(tokens: Sequence[str], merges: Sequence[Any]) -> tuple[float, ...]:
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return tuple(-float(ranks.get(token, len(merges))) for token in tokens)


def _find_special(document: Mapping[str, Any], tokens: Sequence[str], given: Mapping[str, int]) -> dict[str, int]:
    special = {name: token_id for name, token_id in given.items() if 0 <= token_id < len(tokens)}
    unknown = document["model"].get("unk_token")
    if unknown in tokens:
        special["unk"] = tokens.index(unknown)
    return special


# How a text is cut.


def _find_cut(document: Mapping[str, Any]) -> str:
    """Raises InvalidWorkload where llama.cpp has none that is the same."""
    steps = _flatten(document.get("pre_tokenizer"))
    kinds = [step.get("type") for step in steps]
    normalizers = [step.get("type") for step in _flatten(document.get("normalizer"))]
    if normalizers not in ([], ["NFC"]):
        raise _refusal(f"a tokenizer that normalizes by {', '.join(map(str, normalizers))}", allowed="none, or NFC")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0].get("pattern", {}).get("Regex", "")
        cut, takes_whole_words = _KNOWN_CUTS.get(pattern), bool(document["model"].get("ignore_merges"))
        if cut == "llama-bpe" and not takes_whole_words:
            return _LLAMA_CUT_WITH_MERGES
        if cut is not None and takes_whole_words == (cut == "llama-bpe"):
            return cut
    raise _refusal(
        f"a tokenizer that cuts texts by {', '.join(map(str, kinds)) or 'nothing'} in a way llama.cpp has no name for",
        allowed="the cuts of GPT-2, SmolLM, Llama 3 and Qwen",
    )


def _flatten(step: Any) -> list[Mapping[str, Any]]:
    if not step:
        return []
    return list(step.get("pretokenizers") or step.get("normalizers") or ()) if step.get("type") == "Sequence" else [step]


def _templates(chat: ChatFacts | None) -> str | list[dict[str, str]] | None:
    if chat is None or (chat.template is None and not chat.named_templates):
        return None
    named = [{"name": name, "template": text} for name, text in chat.named_templates.items()]
    if not named:
        return chat.template
    return [{"name": "default", "template": chat.template}, *named] if chat.template is not None else named


def _refusal(found: str, *, allowed: str) -> InvalidWorkload:
    return InvalidWorkload(
        f"{_FIELD} is set; the model has {found}, which cannot be written as GGUF; allowed: {allowed}",
        field=_FIELD,
        value=found,
        allowed=allowed,
        hint="Leave it at none and use the safetensors.",
    )
