"""Tokenizes a dataset once for each (dataset, tokenizer, chat template), into a file that is then memory-mapped.

Streams: memory does not grow with the dataset. The result appears under its final name complete or not at all. Torch-free.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from optimizer.base.errors import DiskFull, InvalidDataset
from optimizer.base.serialize import to_json
from optimizer.data.chat import DEFAULT_REPLY_TEMPLATE, ChatTemplate, Span
from optimizer.data.chat_facts import ChatFacts
from optimizer.data.documents import DatasetFormat, Document, read_documents
from optimizer.data.samples.answers import AnswerMarker
from optimizer.data.samples.columns import Columns
from optimizer.data.samples.records import Record, read_records
from optimizer.data.token_file import (
    FORMAT_VERSION,
    STARTS_FILE,
    TOKENS_FILE,
    TRAINED_FILE,
    TokenFile,
    TokenManifest,
    write_manifest,
)
from optimizer.data.tokenizer import LoadedTokenizer, encode_with_offsets, load_tokenizer
from optimizer.workload import LossOn

__all__ = ["TokenFile", "tokenize_dataset"]

BATCH_CHARACTERS = 1_000_000
"""Text handed to the tokenizer at once: enough to use all its threads, little enough to hold."""


def tokenize_dataset(
    *,
    file: str | Path,
    format: DatasetFormat,
    tokenizer_file: str | Path | None,
    folder: str | Path,
    chat: ChatFacts | None = None,
    loss_on: LossOn = "all",
    columns: Columns | None = None,
    pairs: bool = False,
    vocab_size: int | None = None,
    end_of_text_id: int | None = None,
) -> TokenFile:
    """The dataset's tokens, made now or found in ``folder`` from an earlier call.

    tokenizer_file: a tokenizer.json; None for the bundled tokenizer (the manifest says which it was).
    folder: holds one subfolder for each (dataset, tokenizer, template, loss_on); made if absent; safe with several processes.
    chat: the model's template, for conversations; without one they are plain lines ``role: content``.
    loss_on: the parts that are learnt. columns: the kind of the file's rows, found if not given.
    pairs: whether each record is to be two samples, a better and a worse answer; else the better one of a pair is taken alone.
    vocab_size, end_of_text_id: the model's, where known; see ``load_tokenizer``.
    Raises InvalidDataset, InvalidModel (tokenizer or template), DiskFull.
    """
    chat = chat or ChatFacts()
    tokenizer = load_tokenizer(tokenizer_file, model_vocab_size=vocab_size, end_of_text_id=end_of_text_id)
    marker = make_marker(chat, tokenizer=tokenizer, loss_on=loss_on)
    dataset_sha256 = _hash_file(file)
    target = Path(folder) / _cache_name(dataset_sha256, format, tokenizer, chat, loss_on, columns, pairs=pairs)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if target.is_dir():
            return TokenFile.open(target)
        with _staged(target) as stage:
            pieces = _read_pieces(file, format=format, columns=columns, marker=marker, pairs=pairs)
            marks = loss_on == "assistant" and format != "txt"
            manifest = _write_tokens(stage, pieces, tokenizer, dataset_sha256=dataset_sha256, marks=marks)
            write_manifest(stage, replace(manifest, answers=dict(marker.counts)))
    return TokenFile.open(target)


def _read_pieces(
    file: str | Path, *, format: DatasetFormat, columns: Columns | None, marker: AnswerMarker, pairs: bool
) -> Iterator["Piece"]:
    if format == "txt":
        if pairs:
            raise InvalidDataset(
                "dataset: a text, without pairs of a better and a worse answer",
                field="dataset",
                value="txt",
                allowed="rows with chosen and rejected",
            )
        return document_pieces(read_documents(file))
    records = read_records(file, format=format, columns=columns)
    return pair_pieces(records, marker) if pairs else record_pieces(records, marker)


def make_marker(chat: ChatFacts, *, tokenizer: LoadedTokenizer, loss_on: LossOn) -> AnswerMarker:
    """The way from a record to text for one model."""
    template = ChatTemplate(
        chat.template or DEFAULT_REPLY_TEMPLATE,
        begin_of_text=chat.begin_of_text,
        end_of_text=chat.end_of_text or tokenizer.end_of_text,
    )
    return AnswerMarker(template=template, is_own=chat.template is not None, loss_on=loss_on)


def _hash_file(file: str | Path) -> str:
    path = Path(file)
    if not path.is_file():
        raise InvalidDataset(f"there is no file {path.name}", field="file", value=path.name, allowed="a file")
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _cache_name(
    dataset_sha256: str,
    format: DatasetFormat,
    tokenizer: LoadedTokenizer,
    chat: ChatFacts,
    loss_on: LossOn,
    columns: Columns | None,
    *,
    pairs: bool,
) -> str:
    """All that the tokens depend on, as a folder name."""
    facts = json.dumps([to_json(chat), loss_on, None if columns is None else to_json(columns)], sort_keys=True)
    facts += " pairs" if pairs else ""
    parts = (str(FORMAT_VERSION), dataset_sha256, format, tokenizer.sha256, str(tokenizer.end_of_text_id), facts)
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
class Piece:
    """Text to encode, the parts of it that are learnt, and whether a sample ends with it."""

    text: str
    spans: tuple[Span, ...]
    ends_sample: bool = True
    needs_end: bool = True
    """True if an end-of-text token is to follow."""


def _write_tokens(
    stage: Path, pieces: Iterable[Piece], tokenizer: LoadedTokenizer, *, dataset_sha256: str, marks: bool
) -> TokenManifest:
    """marks: whether some tokens may not be learnt, so that flags are kept."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")
    digest = hashlib.sha256()
    num_tokens = num_texts = num_trained = 0
    starts = [0]
    with (stage / TOKENS_FILE).open("wb") as file, (stage / TRAINED_FILE).open("wb") as flags:
        for group in grouped(pieces):
            for piece, ids, trained in encode_pieces(group, tokenizer):
                data = np.array(ids, dtype=dtype).tobytes()
                file.write(data)
                digest.update(data)
                flags.write(bytes(trained))
                num_tokens += len(ids)
                num_trained += sum(trained)
                num_texts += len(ids) > piece.needs_end
                if piece.ends_sample:
                    starts.append(num_tokens)
    if not num_texts:
        raise InvalidDataset("the dataset holds no text", field="dataset", value=0, allowed="at least one document")
    if not num_trained:
        raise InvalidDataset(
            "the dataset holds no answer to learn from", field="dataset", value=0, allowed="answers, or workload.loss_on all"
        )
    if not marks:
        (stage / TRAINED_FILE).unlink()
    (stage / STARTS_FILE).write_bytes(np.array(starts, dtype="<i8").tobytes())
    return TokenManifest(
        version=FORMAT_VERSION,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=num_tokens,
        num_documents=len(starts) - 1,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        dataset_sha256=dataset_sha256,
        tokenizer_sha256=tokenizer.sha256,
        tokenizer=tokenizer.source,
        tokens_sha256=digest.hexdigest(),
        num_trained=num_trained if marks else -1,
    )


def document_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    for document in documents:
        text, ends = document.text, not document.continues
        yield Piece(text=text, spans=((0, len(text)),), ends_sample=ends, needs_end=ends)


def record_pieces(records: Iterable[Record], marker: AnswerMarker) -> Iterator[Piece]:
    for record in records:
        marked = marker.write(record)
        yield Piece(text=marked.text, spans=marked.spans, needs_end=marked.needs_end)


def pair_pieces(records: Iterable[Record], marker: AnswerMarker) -> Iterator[Piece]:
    """Two of each record: the better answer, then the worse one."""
    for record in records:
        for marked in marker.write_pair(record):
            yield Piece(text=marked.text, spans=marked.spans, needs_end=marked.needs_end)


def grouped(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        group.append(piece)
        num_characters += len(piece.text) + 1
        if num_characters >= BATCH_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group


def encode_pieces(pieces: list[Piece], tokenizer: LoadedTokenizer) -> Iterator[tuple[Piece, list[int], bytearray]]:
    """Ids of each piece and a flag for each id: 1 if it begins in a part that is learnt, or ends the turn after one."""
    encoded = encode_with_offsets(tokenizer.tokenizer, [piece.text for piece in pieces])
    for piece, (ids, offsets) in zip(pieces, encoded, strict=True):
        trained = _flags(offsets, piece.spans, num_characters=len(piece.text))
        for place in range(1, len(ids)):
            if ids[place] == tokenizer.end_of_text_id and trained[place - 1]:
                trained[place] = 1
        if piece.needs_end:
            ids.append(tokenizer.end_of_text_id)
            trained.append(1)
        yield piece, ids, trained


def _flags(offsets: Sequence[Span], spans: Sequence[Span], *, num_characters: int) -> bytearray:
    if spans == ((0, num_characters),):
        return bytearray(b"\1" * len(offsets))
    starts = np.fromiter((start for start, _ in offsets), dtype=np.int64, count=len(offsets))
    flags = np.zeros(len(offsets), dtype=np.uint8)
    for begin, end in spans:
        flags[(starts >= begin) & (starts < end)] = 1
    return bytearray(flags.tobytes())
