"""A tokenized dataset on disk: flat files, memory-mapped, and a manifest that says what they are.

The ids of all samples one after the other, the place where each begins, and, where not all are to be learnt, a flag for each id.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.base.errors import InvalidDataset
from optimizer.base.serialize import from_json, to_json

MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens.bin"
TRAINED_FILE = "trained.bin"
STARTS_FILE = "starts.bin"
FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class TokenManifest:
    """Facts about ``tokens.bin`` and its sources."""

    version: int
    dtype: str
    """``uint16`` where the vocabulary allows, else ``uint32``; little-endian."""
    num_tokens: int
    """End-of-text tokens included."""
    num_documents: int
    vocab_size: int
    end_of_text_id: int
    """Stands after each document."""
    dataset_sha256: str
    tokenizer_sha256: str
    tokenizer: str
    """``own`` where the model brought one, ``bundled`` for the one that ships with the program."""
    tokens_sha256: str
    num_trained: int = -1
    """Tokens to be learnt, those that end a text among them; -1 where all are, and there is no file of flags."""
    answers: dict[str, int] = field(default_factory=dict)
    """Answers in conversations by how they were found (``samples/answers.py``)."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One folder with a manifest and its tokens."""

    folder: Path
    manifest: TokenManifest

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    def tokens(self) -> NDArray[np.unsignedinteger[Any]]:
        """All ids, memory-mapped and read-only; costs no memory until read."""
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        return np.memmap(self.folder / TOKENS_FILE, dtype=dtype, mode="r", shape=(self.num_tokens,))

    def starts(self) -> NDArray[np.int64]:
        """Place of each document's first token and, at the end, the number of tokens: [num_documents + 1]."""
        path = self.folder / STARTS_FILE
        return np.memmap(path, dtype=np.dtype("<i8"), mode="r", shape=(self.manifest.num_documents + 1,))

    def trained(self) -> NDArray[np.uint8] | None:
        """One flag for each token, 1 where it is to be learnt; None where all are."""
        if self.manifest.num_trained < 0:
            return None
        return np.memmap(self.folder / TRAINED_FILE, dtype=np.uint8, mode="r", shape=(self.num_tokens,))

    @classmethod
    def open(cls, folder: str | Path) -> "TokenFile":
        """Read the manifest and check the size of the tokens against it; ``verify`` also hashes them."""
        folder = Path(folder)
        manifest = from_json(TokenManifest, json.loads((folder / MANIFEST_FILE).read_text()), error=InvalidDataset)
        size_bytes = (folder / TOKENS_FILE).stat().st_size
        wanted_bytes = manifest.num_tokens * np.dtype(manifest.dtype).itemsize
        if manifest.version != FORMAT_VERSION or size_bytes != wanted_bytes:
            raise InvalidDataset(
                f"token file in {folder.name} has version {manifest.version} and {size_bytes} bytes; "
                f"version {FORMAT_VERSION} and {wanted_bytes} bytes were expected",
                field="dataset",
                value=size_bytes,
                allowed=wanted_bytes,
                hint="Delete the folder; it is made again from the dataset.",
            )
        return cls(folder=folder, manifest=manifest)

    def verify(self) -> bool:
        """Report whether the tokens still hash to what the manifest says. Reads the whole file."""
        with (self.folder / TOKENS_FILE).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.manifest.tokens_sha256


def write_manifest(folder: Path, manifest: TokenManifest) -> None:
    """The manifest as JSON, its keys in the order of the class."""
    (folder / MANIFEST_FILE).write_text(json.dumps(to_json(manifest), indent=1) + "\n")
