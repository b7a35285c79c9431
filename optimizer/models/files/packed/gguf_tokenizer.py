"""``python -m optimizer.models.files.packed.gguf_tokenizer FOLDER``: makes a tokenizer.json of the GGUF file there.

The service runs it in a limited process: transformers rebuilds the tokenizer, and what a stranger wrote is parsed. Special tokens
and the chat template are the file's own. Prints one JSON object.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from optimizer.base.errors import HeadroomError, InvalidModel
from optimizer.models.files.packed.gguf_file import read_gguf_header
from optimizer.models.files.packed.gguf_names import find_gguf

_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def main(arguments: list[str]) -> int:
    try:
        document = _convert(Path(arguments[0]))
    except HeadroomError as error:
        document = {"error": error.to_json()}
    print(json.dumps(document, default=str))
    return 0


def _convert(folder: Path) -> dict[str, Any]:
    file = find_gguf(folder)
    metadata = read_gguf_header(file).metadata if file is not None else {}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if file is None or not isinstance(tokens, list) or "tokenizer.ggml.model" not in metadata:
        return {"has_tokenizer": False}
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    except BaseException as error:
        raise InvalidModel(
            f"the tokenizer of {file.name} cannot be rebuilt: {str(error)[:200]}",
            field="weights",
            allowed="a file whose tokenizer transformers knows, or its tokenizer.json beside it",
        ) from error
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(metadata, tokens), indent=1))
    return {"has_tokenizer": True}


def _tokenizer_config(metadata: Any, tokens: list[Any]) -> dict[str, Any]:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _TOKENS.items()}
    named = {name: tokens[token] for name, token in ids.items() if isinstance(token, int) and 0 <= token < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        **({"chat_template": template} if isinstance(template, str) else {}),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
