"""Opens a tokenizer.json, a model's own or the bundled one, and finds its end-of-text token.

The bundled tokenizer is byte-level with 4,096 entries, so it can write any text and fits every model whose vocabulary has at
least as many; a model that is smaller and has no tokenizer of its own is refused.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from optimizer.base.errors import InvalidModel
from optimizer.data.bundled import TOKENIZER_FILE

MAX_TOKENIZER_BYTES = 50_000_000
MAX_VOCAB_SIZE = 1_048_576

_END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
    "[SEP]",
)
_OWNERS = {"own": "the model's own", "bundled": "the bundled"}


@dataclass(frozen=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer ready to encode, without truncation or padding."""

    tokenizer: Tokenizer
    sha256: str
    """Hash of the file."""
    vocab_size: int
    """One more than the largest id, added tokens included."""
    end_of_text_id: int
    source: str
    """``own`` or ``bundled``."""

    @property
    def end_of_text(self) -> str:
        return str(self.tokenizer.id_to_token(self.end_of_text_id))


def load_tokenizer(
    file: str | Path | None, *, model_vocab_size: int | None = None, end_of_text_id: int | None = None
) -> LoadedTokenizer:
    """Open a tokenizer.json; ``None`` means the bundled one.

    model_vocab_size: refuses a tokenizer whose ids the model has no embedding for.
    end_of_text_id: the model's own, where known; ignored for the bundled tokenizer, otherwise found by the usual names.
    Raises InvalidModel.
    """
    path = Path(file) if file is not None else TOKENIZER_FILE
    if not path.is_file() or path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise _invalid(f"{path.name} is no file of at most {MAX_TOKENIZER_BYTES:,} bytes", allowed="a tokenizer.json")
    data = path.read_bytes()
    source = "bundled" if data == TOKENIZER_FILE.read_bytes() else "own"
    tokenizer = _parse(data)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise _invalid(f"{vocab_size:,} entries", allowed=f"1 to {MAX_VOCAB_SIZE:,}")
    if model_vocab_size is not None and vocab_size > model_vocab_size:
        raise InvalidModel(
            f"{_OWNERS[source]} tokenizer has {vocab_size:,} entries, the model's vocab_size is {model_vocab_size:,}; "
            f"allowed: vocab_size of at least {vocab_size:,}",
            field="vocab_size",
            value=model_vocab_size,
            allowed=f"at least {vocab_size:,}",
            hint="Upload the model's own tokenizer.json, or raise vocab_size in config.json.",
        )
    return LoadedTokenizer(
        tokenizer=tokenizer,
        sha256=hashlib.sha256(data).hexdigest(),
        vocab_size=vocab_size,
        end_of_text_id=_find_end_of_text(tokenizer, vocab_size, wanted=end_of_text_id if source == "own" else None),
        source=source,
    )


def encode_with_offsets(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Ids of each text and the characters that each id stands for, without the special tokens that a tokenizer may put around a
    single text.
    """
    try:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    except BaseException as error:
        raise _wrapped(error, "cannot write this text") from error
    return [(encoding.ids, encoding.offsets) for encoding in encoded]


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Ids of one text, with what the tokenizer puts around a single one where asked for."""
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except BaseException as error:
        raise _wrapped(error, "cannot write this text") from error


def _parse(data: bytes) -> Tokenizer:
    try:
        json.loads(data)
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:
        raise _wrapped(error, "cannot be read") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _wrapped(error: BaseException, what: str) -> BaseException:
    """The library's failures as InvalidModel. Its panics (a regular expression that backtracks too long) are BaseExceptions."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return _invalid(f"{what} ({str(error)[:200]})", allowed="a tokenizer.json of the tokenizers library")
    return error


def _find_end_of_text(tokenizer: Tokenizer, vocab_size: int, *, wanted: int | None) -> int:
    if wanted is not None and 0 <= wanted < vocab_size and tokenizer.id_to_token(wanted) is not None:
        return wanted
    for name in _END_OF_TEXT_NAMES:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return int(found)
    raise _invalid(
        "no end-of-text token", allowed=f"one of {', '.join(_END_OF_TEXT_NAMES)}, or eos_token_id in config.json"
    )


def _invalid(found: str, *, allowed: str) -> InvalidModel:
    return InvalidModel(f"tokenizer: {found}; allowed: {allowed}", field="tokenizer", value=found, allowed=allowed)
