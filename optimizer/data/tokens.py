"""Tokenizes a dataset once for each (dataset, tokenizer, chat template), into a file that is then memory-mapped.

Streams: memory does not grow with the dataset. The result appears under its final name complete or not at all. Torch-free.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimizer.base.errors import DiskFull, InvalidDataset
from optimizer.data.chat import DEFAULT_CHAT_TEMPLATE, ChatTemplate
from optimizer.data.documents import DatasetFormat, Document, read_documents
from optimizer.data.token_file import FORMAT_VERSION, TOKENS_FILE, TokenFile, TokenManifest, write_manifest
from optimizer.data.tokenizer import LoadedTokenizer, encode, load_tokenizer

__all__ = ["TokenFile", "tokenize_dataset"]

BATCH_CHARACTERS = 1_000_000
"""Text handed to the tokenizer at once: enough to use all its threads, little enough to hold."""


def tokenize_dataset(
    *,
    file: str | Path,
    format: DatasetFormat,
    tokenizer_file: str | Path | None,
    folder: str | Path,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    end_of_text_id: int | None = None,
) -> TokenFile:
    """The dataset's tokens, made now or found in ``folder`` from an earlier call.

    tokenizer_file: a tokenizer.json; None for the bundled tokenizer (the manifest says which it was).
    folder: holds one subfolder for each (dataset, tokenizer, template); made if absent; safe with several processes at once.
    chat_template: for datasets of messages; None for a plain ``role: content`` a line.
    vocab_size, end_of_text_id: the model's, where known; see ``load_tokenizer``.
    Raises InvalidDataset, InvalidModel (tokenizer or template), DiskFull.
    """
    tokenizer = load_tokenizer(tokenizer_file, model_vocab_size=vocab_size, end_of_text_id=end_of_text_id)
    template = ChatTemplate(chat_template or DEFAULT_CHAT_TEMPLATE, end_of_text=tokenizer.end_of_text)
    dataset_sha256 = _hash_file(file)
    target = Path(folder) / _cache_name(dataset_sha256, format, tokenizer, chat_template or DEFAULT_CHAT_TEMPLATE)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if target.is_dir():
            return TokenFile.open(target)
        with _staged(target) as stage:
            documents = read_documents(file, format=format)
            manifest = _write_tokens(stage, documents, tokenizer, template, dataset_sha256=dataset_sha256)
            write_manifest(stage, manifest)
    return TokenFile.open(target)


def _hash_file(file: str | Path) -> str:
    path = Path(file)
    if not path.is_file():
        raise InvalidDataset(f"there is no file {path.name}", field="file", value=path.name, allowed="a file")
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _cache_name(dataset_sha256: str, format: DatasetFormat, tokenizer: LoadedTokenizer, template: str) -> str:
    """All that the tokens depend on, as a folder name."""
    parts = (str(FORMAT_VERSION), dataset_sha256, format, tokenizer.sha256, str(tokenizer.end_of_text_id), template)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process at a time for one target; the lock goes with the process, however it ends."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A folder beside the target that becomes it at the end, or vanishes. Call under the lock.

    A stage that is already there was left by a process that was killed, since that process had the lock.
    """
    stage = target.with_name(f".{target.name}.stage")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
        for path in (*stage.iterdir(), stage):
            _sync(path)
        stage.rename(target)
        _sync(target.parent)
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no room for the tokens of the dataset under {target.parent}",
                hint="Free some space; nothing half-written was left behind.",
                folder=str(target.parent),
            ) from error
        raise
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Text to encode, and whether a document ends with it."""

    text: str
    ends_document: bool


def _write_tokens(
    stage: Path,
    documents: Iterable[Document],
    tokenizer: LoadedTokenizer,
    template: ChatTemplate,
    *,
    dataset_sha256: str,
) -> TokenManifest:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")
    digest = hashlib.sha256()
    num_tokens = num_documents = 0
    with (stage / TOKENS_FILE).open("wb") as file:
        for pieces in _grouped(_to_pieces(documents, template)):
            ids = _encode_pieces(pieces, tokenizer)
            data = np.array(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            num_tokens += len(ids)
            num_documents += sum(piece.ends_document for piece in pieces)
    if num_tokens == num_documents:
        raise InvalidDataset("the dataset holds no text", field="dataset", value=0, allowed="at least one document")
    return TokenManifest(
        version=FORMAT_VERSION,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=num_tokens,
        num_documents=num_documents,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        dataset_sha256=dataset_sha256,
        tokenizer_sha256=tokenizer.sha256,
        tokenizer=tokenizer.source,
        tokens_sha256=digest.hexdigest(),
    )


def _to_pieces(documents: Iterable[Document], template: ChatTemplate) -> Iterator[_Piece]:
    for document in documents:
        text = template.render(document.messages) if document.messages else document.text
        yield _Piece(text=text, ends_document=not document.continues)


def _grouped(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    num_characters = 0
    for piece in pieces:
        group.append(piece)
        num_characters += len(piece.text) + 1
        if num_characters >= BATCH_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group


def _encode_pieces(pieces: list[_Piece], tokenizer: LoadedTokenizer) -> list[int]:
    ids: list[int] = []
    for piece, encoded in zip(pieces, encode(tokenizer.tokenizer, [piece.text for piece in pieces]), strict=True):
        ids += encoded
        if piece.ends_document:
            ids.append(tokenizer.end_of_text_id)
    return ids
