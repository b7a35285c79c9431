"""Reads a dataset file as a stream of documents, and refuses what is not text, by line or row.

- ``txt``: UTF-8. Documents are parted by two or more blank lines, or by a line that holds only ``<|endoftext|>``; a single
  blank line parts paragraphs and stays inside. A file without either is one document.
- ``jsonl``: one object a line, with ``text``, or with ``messages`` (a list of ``{"role", "content"}``).
- ``parquet``: a column ``text`` of strings.

Memory stays small whatever the file's size: long documents come in pieces, of which all but the last say ``continues``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from optimizer.base.errors import InvalidDataset

DatasetFormat = Literal["txt", "jsonl", "parquet"]
FORMATS: tuple[DatasetFormat, ...] = ("txt", "jsonl", "parquet")

MAX_LINE_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_PIECE_CHARACTERS = 1_000_000
MAX_ROWS = 100_000_000
MAX_ROW_GROUPS = 10_000
MAX_COLUMNS = 1_000
DOCUMENT_SEPARATOR = "<|endoftext|>"

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document, or a piece of a long one: either ``text`` or ``messages``."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    continues: bool = False
    """The next piece belongs to the same document."""
    where: str = ""
    """Line or row, for errors."""


def read_documents(path: str | Path, *, format: DatasetFormat) -> Iterator[Document]:
    """Documents in the order of the file; empty ones are passed over.

    Raises InvalidDataset, while iterating, at the first thing that is wrong.
    """
    if format not in FORMATS:
        raise InvalidDataset(
            f"dataset format {str(format)[:40]!r} is not known; allowed: {', '.join(FORMATS)}",
            field="format",
            value=format,
            allowed=list(FORMATS),
        )
    path = Path(path)
    if not path.is_file():
        raise InvalidDataset(f"there is no file {path.name}", field="file", value=path.name, allowed="a file")
    readers = {"txt": _read_txt, "jsonl": _read_jsonl, "parquet": _read_parquet}
    return readers[format](path)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number from 1 and line without its end. Raises InvalidDataset for one that is too long, or is not UTF-8."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise _invalid(
                    f"line {number}", "longer than allowed", allowed=f"at most {MAX_LINE_BYTES:,} bytes a line"
                )
            yield number, _decode(raw, number=number)


def _decode(raw: bytes, *, number: int) -> str:
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        raise _invalid(f"line {number}", found, allowed="UTF-8 text") from error
    if "\0" in line:
        raise _invalid(f"line {number}", "a NUL character", allowed="text")
    if number == 1:
        line = line.removeprefix("\ufeff")
    return line.removesuffix("\n").removesuffix("\r")


def _read_txt(path: Path) -> Iterator[Document]:
    lines: list[str] = []
    num_characters = num_blank = first_number = 0
    has_begun = False
    for number, line in read_lines(path):
        is_separator = line == DOCUMENT_SEPARATOR
        if is_separator or not line.strip():
            num_blank += 1
            if has_begun and (is_separator or num_blank == 2):
                yield _txt_document(lines, first_number)
                lines, num_characters, has_begun = [], 0, False
            continue
        if has_begun and num_blank == 1:
            lines.append("")
        if not lines:
            first_number = number
        num_blank, has_begun = 0, True
        if num_characters > MAX_PIECE_CHARACTERS:
            yield replace(_txt_document(lines, first_number), text="\n".join([*lines, ""]), continues=True)
            lines, num_characters, first_number = [], 0, number
        lines.append(line)
        num_characters += len(line) + 1
    if has_begun:
        yield _txt_document(lines, first_number)


def _txt_document(lines: list[str], first_number: int) -> Document:
    return Document(text="\n".join(lines), where=f"line {first_number}")


def _read_jsonl(path: Path) -> Iterator[Document]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"line {number}"
        record = _parse_record(line, where=where)
        if "messages" in record and "text" not in record:
            yield Document(messages=_read_messages(record["messages"], where=where), where=where)
        else:
            text = _checked_text(record.get("text"), name="text", where=where)
            if text:
                yield Document(text=text, where=where)


def _parse_record(line: str, *, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"not JSON ({error}): {line[:60]!r}", allowed="one JSON object a line") from error
    if not isinstance(record, dict):
        raise _invalid(where, f"a JSON {type(record).__name__}", allowed="an object with text or messages")
    if not is_shallow(record, MAX_DEPTH):
        raise _invalid(where, f"nested deeper than {MAX_DEPTH}", allowed=f"at most {MAX_DEPTH} levels")
    return record


def is_shallow(value: Any, depth: int) -> bool:
    """Report whether parsed JSON is nested no deeper."""
    if depth < 0:
        return False
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(is_shallow(child, depth - 1) for child in children)


def _read_messages(messages: Any, *, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise _invalid(where, "messages is not a list with entries", allowed='a list of {"role", "content"}')
    read = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _invalid(where, f"messages[{index}] is not an object", allowed='{"role", "content"}')
        read.append(
            {
                "role": _checked_text(message.get("role"), name=f"messages[{index}].role", where=where),
                "content": _checked_text(message.get("content"), name=f"messages[{index}].content", where=where),
            }
        )
    return tuple(read)


def _checked_text(value: Any, *, name: str, where: str) -> str:
    if not isinstance(value, str):
        found = f"no {name}" if value is None else f"{name} is {str(value)[:60]}"
        raise _invalid(where, found, allowed=f"{name} as a string" + (", or messages" if name == "text" else ""))
    if "\0" in value:
        raise _invalid(where, f"{name} holds a NUL character", allowed="text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _invalid(where, f"{name} holds half a surrogate pair", allowed="text that UTF-8 can hold") from error
    return value


def _read_parquet(path: Path) -> Iterator[Document]:
    """pyarrow takes a file's claims on trust, so its limits are set and its errors wrapped; call it in a limited process."""
    import pyarrow as pa

    try:
        yield from _read_parquet_rows(path)
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise _invalid("the file", f"not readable as parquet ({str(error)[:200]})", allowed="a parquet file") from error


def _read_parquet_rows(path: Path) -> Iterator[Document]:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetFile(
        path,
        thrift_string_size_limit=16_000_000,
        thrift_container_size_limit=1_000_000,
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
    ) as file:
        facts = file.metadata
        for name, count, limit in (
            ("rows", facts.num_rows, MAX_ROWS),
            ("row groups", facts.num_row_groups, MAX_ROW_GROUPS),
            ("columns", facts.num_columns, MAX_COLUMNS),
        ):
            if count > limit:
                raise _invalid("the file", f"{count:,} {name}", allowed=f"at most {limit:,}")
        schema = file.schema_arrow
        if schema.get_field_index("text") < 0:
            listed = ", ".join(schema.names[:10])
            raise _invalid("the file", f"columns {listed[:200]}", allowed="a column text of strings")
        kind = schema.field("text").type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise _invalid("the file", f"column text of {kind}", allowed="a column text of strings")
        row = 0
        for batch in file.iter_batches(64, columns=["text"], use_threads=False):
            for value in cast("list[Any]", batch.column(0).to_pylist()):
                row += 1
                yield from _parquet_documents(value, where=f"row {row}")


def _parquet_documents(value: Any, *, where: str) -> Iterator[Document]:
    text = _checked_text(value, name="text", where=where)
    if len(text) > MAX_LINE_BYTES or len(text.encode()) > MAX_LINE_BYTES:
        raise _invalid(where, f"text of {len(text):,} characters", allowed=f"at most {MAX_LINE_BYTES:,} bytes")
    if text:
        yield Document(text=text, where=where)


def _invalid(where: str, found: str, *, allowed: str) -> InvalidDataset:
    message = f"dataset, {where}: {found}; allowed: {allowed}"
    return InvalidDataset(message, field=f"dataset.{where}", value=found, allowed=allowed)
