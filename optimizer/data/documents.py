"""Reads a text file as a stream of documents, and refuses what is not text, by line. Files of rows: ``samples/records.py``.

Documents are parted by two or more blank lines, or by a line that holds only ``<|endoftext|>``; a single blank line parts
paragraphs and stays inside. A file without either is one document.

Memory stays small whatever the file's size: long documents come in pieces, of which all but the last say ``continues``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from optimizer.base.errors import InvalidDataset

DatasetFormat = Literal["txt", "jsonl", "json", "csv", "parquet"]
FORMATS: tuple[DatasetFormat, ...] = ("txt", "jsonl", "json", "csv", "parquet")

MAX_LINE_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_PIECE_CHARACTERS = 1_000_000
MAX_ROWS = 100_000_000
MAX_ROW_GROUPS = 10_000
MAX_COLUMNS = 1_000
DOCUMENT_SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document, or a piece of a long one."""

    text: str = ""
    continues: bool = False
    """The next piece belongs to the same document."""
    where: str = ""
    """Line or row, for errors."""


def read_documents(path: str | Path) -> Iterator[Document]:
    """Documents in the order of the file; empty ones are passed over.

    Raises InvalidDataset: for a file that is not there at once, and while iterating at the first thing that is wrong.
    """
    path = Path(path)
    check_is_file(path)
    return _read_txt(path)


def check_is_file(path: Path) -> None:
    """Raise InvalidDataset where there is no file."""
    if not path.is_file():
        raise InvalidDataset(f"there is no file {path.name}", field="file", value=path.name, allowed="a file")


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


def is_shallow(value: Any, depth: int) -> bool:
    """Report whether parsed JSON is nested no deeper."""
    if depth < 0:
        return False
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(is_shallow(child, depth - 1) for child in children)


def _invalid(where: str, found: str, *, allowed: str) -> InvalidDataset:
    message = f"dataset, {where}: {found}; allowed: {allowed}"
    return InvalidDataset(message, field=f"dataset.{where}", value=found, allowed=allowed)
