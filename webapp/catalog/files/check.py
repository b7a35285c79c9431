"""``python -m webapp.catalog.files.check weights|tokenizer PATH``: checks a staged upload, prints JSON. No Django here.

Runs only inside ``limited.run_limited``: a tokenizer's regular expressions are the sender's, and a bad one ends in a Rust panic,
which Python sees as a BaseException.
"""

import json
import sys
from pathlib import Path
from typing import Any

from optimizer.base.errors import HeadroomError, InvalidModel
from optimizer.models.files.check_weights import check_weights
from optimizer.models.files.linked_files import describe_links
from optimizer.models.files.packed.gguf_names import find_gguf
from optimizer.models.files.packed.gguf_read import read_gguf
from optimizer.models.files.packed.groups import group_tensors
from optimizer.models.files.packed.quantization import read_quantization

MAX_TOKENIZER_BYTES = 50 * 10**6


def main(arguments: list[str]) -> int:
    kind, path = arguments
    try:
        document = _weights(Path(path)) if kind == "weights" else _tokenizer(Path(path))
    except HeadroomError as error:
        document = {"error": error.to_json()}
    print(json.dumps(document, default=str))
    return 0


def _weights(folder: Path) -> dict[str, Any]:
    """A folder whose files may be links: those that were made here, to files that were found to be allowed."""
    gguf_file = find_gguf(folder)
    noted = {"linked_files": describe_links(folder)}
    if gguf_file is not None:
        header, model = read_gguf(gguf_file)
        return {"files": [gguf_file.name], "num_elements": len(header.tensors), "config": model.config, **noted}
    facts = check_weights(folder, may_link=bool(noted["linked_files"]))
    located = dict(zip((tensor.name for tensor in facts.tensors), facts.tensor_files, strict=True))
    stored = {tensor.name: tensor for tensor in facts.tensors}

    def read_json(name: str) -> Any:
        with (folder / located[name]).open("rb") as stream:
            stream.seek(stored[name].offset_bytes)
            return json.loads(stream.read(stored[name].num_bytes))

    group_tensors(stored, quantization=read_quantization(folder), read_json=read_json)
    return {"files": list(facts.files), "num_bytes": facts.num_bytes, "num_elements": facts.num_elements, **noted}


def _tokenizer(path: Path) -> dict[str, Any]:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_TOKENIZER_BYTES:
        raise InvalidModel(
            f"tokenizer.json has {num_bytes:,} bytes; allowed: at most {MAX_TOKENIZER_BYTES:,}",
            field="tokenizer",
            value=num_bytes,
        )
    from tokenizers import Tokenizer  # here, so that the check of weights does not load it

    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode("In the beginning God created the heaven and the earth. 1234 \u00e9\u4e2d\n")
    except BaseException as error:
        raise InvalidModel(
            f"tokenizer.json cannot be used: {str(error)[:200]}",
            field="tokenizer",
            allowed="a tokenizer.json of the tokenizers library",
        ) from error
    return {"vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
