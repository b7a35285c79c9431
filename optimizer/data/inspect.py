"""Says what is in a dataset file, or what is wrong with it.

    python -m optimizer.data.inspect PATH --format txt|jsonl|json|csv|parquet

prints one JSON object: ``{"facts": {...}}`` with exit code 0, or ``{"error": {...}}`` with exit code 2. The process limits its
own address space and CPU time before it opens the file; whoever starts it also kills it after a while, since a limit on CPU
time does not end a process that waits.
"""

import argparse
import json
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidDataset
from optimizer.base.serialize import to_json
from optimizer.base.units import GIB
from optimizer.data.documents import FORMATS, DatasetFormat, check_is_file, read_documents
from optimizer.data.samples.columns import FORM, Columns, Kind, Row, find_columns, read_columns
from optimizer.data.samples.records import Record, RowFormat, read_records, read_rows
from optimizer.data.texts import Texts

MAX_PREVIEW_CHARACTERS = 600
MAX_NAMES = 50


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """Counts over the whole file, and its beginning."""

    num_documents: int
    num_bytes: int
    """Bytes of the file."""
    num_characters: int
    """Bytes of the text in it, without what parts the documents."""
    preview: str
    """The beginning of the first documents, at most 600 characters, each ended by a line ``---``."""
    records: tuple[str, ...] = ()
    """The beginnings of the first documents (``texts.py``), as is the next."""
    lengths: tuple[tuple[int, int], ...] = ()
    kind: Kind = "text"
    """Form of its rows."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The column that holds each part of a row."""
    names: tuple[str, ...] = ()
    """All columns of the first row, at most 50."""

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def inspect_dataset(path: str | Path, *, format: DatasetFormat, columns: Columns | None = None) -> DatasetFacts:
    """Read the whole file once. columns: the kind of its rows, found if not given.

    Raises InvalidDataset that names the line or row, what was found, and what is allowed.
    """
    num_documents = num_characters = 0
    preview, texts = "", Texts()
    first = None if format == "txt" else _first_row(Path(path), format=format)
    found = None if first is None else columns or find_columns(first[1], where=first[0])
    has_words = False
    for text, continues, says_something in _read_texts(Path(path), format=format, columns=columns):
        has_words = has_words or says_something
        num_documents += not continues
        num_characters += len(text)
        texts.add(text, continues=continues)
        if len(preview) < MAX_PREVIEW_CHARACTERS:
            preview += text[:MAX_PREVIEW_CHARACTERS] + ("" if continues else "\n---\n")
    if not num_characters:
        raise InvalidDataset("the dataset holds no text", field="dataset", value=0, allowed="at least one document")
    if not has_words:
        found_words = f"all {num_documents:,} answers are empty"
        raise InvalidDataset(
            f"dataset: {found_words}; allowed: at least one with text to learn",
            field="dataset",
            value=found_words,
            allowed="at least one answer with text",
        )
    return DatasetFacts(
        num_documents=num_documents,
        num_bytes=Path(path).stat().st_size,
        num_characters=num_characters,
        preview=preview[:MAX_PREVIEW_CHARACTERS],
        records=tuple(texts.records),
        lengths=texts.lengths(),
        kind="text" if found is None else found.kind,
        columns={} if found is None else found.by_part,
        names=() if first is None else tuple(str(name)[:200] for name in list(first[1])[:MAX_NAMES]),
    )


def _first_row(path: Path, *, format: RowFormat) -> tuple[str, Row] | None:
    """None for a file without rows, which is refused for that."""
    check_is_file(path)
    return next(read_rows(path, format=format), None)


def _read_texts(path: Path, *, format: DatasetFormat, columns: Columns | None) -> Iterator[tuple[str, bool, bool]]:
    """Texts as people read them, whether each goes on in the next, and whether it holds anything to learn.

    Templates are applied when tokenizing.
    """
    if format == "txt":
        for document in read_documents(path):
            yield document.text, document.continues, True
        return
    for record in read_records(path, format=format, columns=columns):
        yield _plain_text(record), False, record.has_words


def _plain_text(record: Record) -> str:
    if record.messages:
        text = "\n".join(f"{message['role']}: {message['content']}" for message in record.messages)
        return text if record.rejected is None else f"{text}\n(rejected) {record.rejected.messages[-1]['content']}"
    return record.text or f"{record.prompt}\n{record.completion}"


def limit_process(*, address_space_bytes: int, cpu_s: int) -> None:
    """Lower this process's limits; what is asked above a limit already in force is left at that limit."""
    for kind, wanted in (
        (resource.RLIMIT_AS, address_space_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, hard if kind != resource.RLIMIT_CORE else 0))


def _answer(path: Path, *, format: DatasetFormat, columns: str, address_space_bytes: int) -> dict[str, Any]:
    try:
        return {"facts": inspect_dataset(path, format=format, columns=read_columns(columns)).to_json()}
    except InvalidDataset as error:
        return {"error": error.to_json()}
    except MemoryError:
        found = "more memory is needed to read it than is allowed"
        refusal = InvalidDataset(
            f"dataset: {found}", field="dataset", value=found, allowed=f"{address_space_bytes:,} bytes of memory"
        )
        return {"error": refusal.to_json()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m optimizer.data.inspect", description="Say what is in a dataset file."
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--columns", default="", help="which column holds what, where it is not to be found: " + FORM)
    parser.add_argument("--address-space-bytes", type=int, default=4 * GIB)
    parser.add_argument("--cpu-s", type=int, default=600)
    options = parser.parse_args(arguments)
    limit_process(address_space_bytes=options.address_space_bytes, cpu_s=options.cpu_s)
    answer = _answer(
        options.path, format=options.format, columns=options.columns, address_space_bytes=options.address_space_bytes
    )
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0 if "facts" in answer else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
